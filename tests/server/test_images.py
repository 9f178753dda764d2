"""Images in chat messages, by OpenAI's own client: data URLs, within limits."""

from __future__ import annotations

import base64
import io
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import openai
import pytest
from helpers.openai_client import NAME, chat, client
from helpers.served import is_idle, serving, until
from helpers.vision import END, IMAGE, START, VisionOracle, make_vision_checkpoint
from helpers.word_model import words
from PIL import Image

import mtpc
from mtpc.engine.image_files import open_image
from mtpc.errors import RequestError
from mtpc.server.run import Running

__all__ = ["client"]
NEW = 10


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_vision_checkpoint("qwen3_5", tmp_path_factory.mktemp("pictured"))


@pytest.fixture(scope="module")
def spec(directory: Any) -> mtpc.SpecModel:
    options = dict(spec_tokens=1, backend="eager", dtype="float64", batch_buckets=(4,))
    return mtpc.compile(directory, images=True, max_len=96, page_size=4, prefill_chunk=8, **options)


@pytest.fixture(scope="module")
def server(spec: mtpc.SpecModel) -> Iterator[Running]:
    with serving(spec, model_name=NAME, max_images=2) as running:
        yield running
        until(lambda: is_idle(running, spec))


def picture(height: int, width: int) -> Image.Image:
    random = numpy.random.default_rng(height * width)
    return Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=numpy.uint8))


def part(image: Image.Image, kind: str = "PNG") -> dict[str, Any]:
    out = io.BytesIO()
    image.save(out, kind)
    url = f"data:image/{kind.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def ask(client: openai.OpenAI, *parts: Any, **fields: Any) -> Any:
    messages = [{"role": "user", "content": list(parts)}]
    return chat(
        client, messages=messages, max_tokens=NEW, extra_body={"ignore_eos": True}, **fields
    )


def test_images_end_to_end(client: openai.OpenAI, directory: Any) -> None:
    """Two images and text, whole and streamed: transformers' own text."""
    wide, tall = picture(16, 24), picture(40, 16)
    ids = [11, START, IMAGE, END, 7, 8, START, IMAGE, END, 94]
    wanted = words(VisionOracle(directory).generate(ids, [wide, tall], NEW))
    parts = (part(wide), {"type": "text", "text": "w7 w8"}, part(tall))
    done = ask(client, *parts)
    assert done.choices[0].message.content == wanted
    assert done.usage.prompt_tokens == len(ids) - 2 + 6 + 10
    stream = ask(client, *parts, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == wanted
    again = ask(client, *parts)
    assert again.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.slow
def test_glm4v_moe_end_to_end(tmp_path: Path) -> None:
    """GLM-4.5V: transformers' own text; an image that comes again in the next turn is kept."""
    directory = make_vision_checkpoint("glm4v_moe", tmp_path)
    sizes = dict(max_len=96, page_size=4, prefill_chunk=8, batch_buckets=(4,))
    options = dict(spec_tokens=3, backend="eager", dtype="float64", images=True)
    made = mtpc.compile(directory, **options, **sizes)
    wide, tall = picture(16, 24), picture(40, 16)
    oracle, first = VisionOracle(directory), [11, START, IMAGE, END, 7, 8, 94]
    parts = [part(wide), {"type": "text", "text": "w7 w8"}]
    fields = {"max_tokens": NEW, "extra_body": {"ignore_eos": True}}
    with (
        serving(made, model_name=NAME) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as asked,
    ):
        turns: list[Any] = [{"role": "user", "content": parts}]
        answer = chat(asked, messages=turns, **fields).choices[0].message.content
        ids = oracle.generate(first, [wide], NEW)
        assert answer == words(ids)
        turns += [{"role": "assistant", "content": answer}]
        turns += [{"role": "user", "content": [part(tall)]}]
        done = chat(asked, messages=turns, **fields)
        second = [*first[:-1], 12, *ids, 13, START, IMAGE, END, 94]
        assert done.choices[0].message.content == words(oracle.generate(second, [wide, tall], NEW))
        assert done.usage.prompt_tokens_details.cached_tokens > 0
        until(lambda: is_idle(running, made))
    assert (made.stats.images_embedded, made.stats.images_reused) == (2, 1)


URL = "https://example.org/cat.png"


@pytest.mark.parametrize(
    ("parts", "code", "said"),
    [
        ([part(picture(8, 8))] * 3, "too_many_images", "3 images; this server takes at most 2"),
        ([{"type": "image_url", "image_url": {"url": URL}}], "invalid_image", "no URL is fetched"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "invalid_image", ""),
        (
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
            "invalid_image",
            "cannot be decoded",
        ),
        ([part(Image.new("L", (9000, 9000)))], "invalid_image", "9000 x 9000 pixels"),
        ([part(Image.new("L", (5000, 8000)))] * 2, "invalid_image", "5000 x 8000 pixels"),
        ([part(picture(200, 200))] * 2, None, "at most 96"),
        ([part(picture(8, 8)), {"type": "text", "text": "w90"}], None, "2 image tokens"),
        ([{"type": "image_url", "image_url": {"url": 7}}], "invalid_value", "expected"),
        (
            [{"type": "image_url", "image_url": {"url": URL, "detail": "high"}}],
            "invalid_value",
            '"auto"',
        ),
    ],
)
def test_what_is_refused(client: openai.OpenAI, parts: Any, code: str | None, said: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, *parts)
    assert said in refused.value.message
    assert refused.value.code == code


def flat_png(width: int, height: int) -> bytes:
    """A black picture of any size, whose rows are never in memory together."""
    rows, packed = bytes(1 + 3 * width), zlib.compressobj()
    data = b"".join(packed.compress(rows) for _ in range(height)) + packed.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in chunks
    )


def saved(kind: str, *pictures: Image.Image) -> bytes:
    out, more = io.BytesIO(), dict[str, Any](save_all=True, append_images=pictures[1:])
    pictures[0].save(out, kind, **(more if len(pictures) > 1 else {}))
    return out.getvalue()


def resized(data: bytes, place: int, form: str, *size: int) -> bytes:
    """A file that states another size."""
    new = struct.pack(form, *size)
    return data[:place] + new + data[place + len(new) :]


def many_scans() -> bytes:
    """A small JPEG file with a pass over 4096 x 4096 pixels for every few bytes."""
    out = io.BytesIO()
    Image.new("L", (4096, 4096)).save(out, "JPEG", progressive=True)
    data = out.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * 2000 + data[-2:]


TINY_GIF, TINY_JPEG = saved("GIF", picture(8, 8)), saved("JPEG", picture(8, 8))
FRAME = TINY_JPEG.index(b"\xff\xc0") + 5
COSTLY: dict[str, Callable[[], bytes]] = {
    "a PNG of 1 x 2**20": lambda: flat_png(1, 2**20),
    "a PNG of 2**20 x 1": lambda: flat_png(2**20, 1),
    "a PNG of 1 x 2**26": lambda: resized(flat_png(1, 8), 16, ">II", 1, 2**26),
    "a PNG of 2**31 a side": lambda: resized(flat_png(1, 8), 16, ">II", 2**31 - 1, 2**31 - 1),
    "a JPEG of 65535 a side": lambda: resized(TINY_JPEG, FRAME, ">HH", 65535, 65535),
    "a JPEG of 2000 scans": many_scans,
    "a GIF of 65535 a side": lambda: resized(TINY_GIF, 6, "<HH", 65535, 65535),
    "an animated PNG": lambda: resized(
        saved("PNG", picture(8, 8), picture(8, 8)), 16, ">II", 2**16, 2**12
    ),
    "an animated WebP": lambda: resized(
        saved("WEBP", picture(8, 8), picture(8, 8).rotate(90)), 24, "<HBHB", *(0x3FFF, 0) * 2
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", COSTLY)
def test_images_that_would_cost_much(what: str) -> None:
    """Refused by what their heads say, before any row is decoded."""
    data, start = COSTLY[what](), time.process_time()
    with pytest.raises(RequestError, match=r"the image (has|cannot be decoded)"):
        open_image(data)
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP"])
def test_animations_cost_their_first_picture(kind: str) -> None:
    """Whatever follows is not decoded."""
    first, others = picture(60, 60), [picture(60, 60).rotate(90 * i) for i in range(1, 30)]
    data = saved(kind, first, *others)
    start = time.process_time()
    opened = open_image(data)
    assert time.process_time() - start < 0.5
    assert (opened.size, opened.mode) == (first.size, "RGB")
    if kind == "PNG":
        assert opened.tobytes() == first.tobytes()


def test_pictures_stay_their_owners() -> None:
    """An image of the caller's is turned in a copy; a file is turned the right way up."""
    made = picture(8, 16)
    exif = made.getexif()
    exif[0x0112] = 6
    out = io.BytesIO()
    made.save(out, "PNG", exif=exif)
    opened = Image.open(out)
    assert open_image(opened).size == (8, 16)
    assert opened.size == (16, 8)
    assert open_image(out.getvalue()).size == (8, 16)
    assert open_image(picture(8, 16)).tobytes() == picture(8, 16).tobytes()


def test_a_model_without_images(word_spec: mtpc.SpecModel) -> None:
    with (
        serving(word_spec, model_name=NAME) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as asked,
        pytest.raises(openai.BadRequestError, match="start the server with --images") as refused,
    ):
        ask(asked, part(picture(8, 8)))
    assert refused.value.code == "no_images"

"""Images in chat messages, by OpenAI's own client: data URLs, within limits."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
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
from mtpc.server.run import Running

__all__ = ["client"]
NEW = 10


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_vision_checkpoint("qwen3_5", tmp_path_factory.mktemp("pictured"))


@pytest.fixture(scope="module")
def spec(directory: Any) -> mtpc.SpecModel:
    options = dict(spec_tokens=3, backend="eager", dtype="float64", batch_buckets=(4,))
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


def test_a_model_without_images(word_spec: mtpc.SpecModel) -> None:
    with (
        serving(word_spec, model_name=NAME) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as asked,
        pytest.raises(openai.BadRequestError, match="start the server with --images") as refused,
    ):
        ask(asked, part(picture(8, 8)))
    assert refused.value.code == "no_images"

"""Prompts with images: text as transformers' own multimodal model has it, drafts as an oracle."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers.oracles import MIN_MARGIN_FLOAT32
from helpers.theorem import poison
from helpers.vision import END, IMAGE, START, VisionOracle, VisionPage, make_vision_checkpoint
from helpers.word_model import words
from PIL import Image

import mtpc
from mtpc.engine.prompt_images import PromptImages
from mtpc.errors import OptionError, RequestError, UnsupportedModelError
from mtpc.layout import PROMPT_EMBEDS

FAMILIES = ("qwen3_5", "qwen3_5_moe")
OPTIONS: dict[str, Any] = dict(
    images=True,
    backend="eager",
    dtype="float64",
    max_len=128,
    page_size=4,
    prefill_chunk=8,
    batch_buckets=(4,),
)
"""Images of 6 to 10 tokens lie over the edges of pages and of chunks."""
NEW = 14


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    random = numpy.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=numpy.uint8))


WIDE, TALL, SQUARE = picture(16, 24), picture(40, 16), picture(24, 24)
PROMPTS: list[tuple[list[int], list[Image.Image]]] = [
    ([5, 6, START, IMAGE, END, 7, 8, 9, START, IMAGE, END, 10, 11], [WIDE, TALL]),
    ([START, IMAGE, END], [SQUARE]),
    ([3, 4, 5], []),
    ([*range(10, 17), IMAGE, 20], [WIDE]),
    ([3, 9, IMAGE], [TALL]),
]
"""Two images; one; none; one that begins a chunk; one that ends the prompt."""


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """pictured(family): a checkpoint that takes images."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_vision_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="module")
def plain(pictured: Callable[[str], Path]) -> Callable[[str], VisionOracle]:
    made: dict[str, VisionOracle] = {}

    def get(family: str) -> VisionOracle:
        return made.setdefault(family, VisionOracle(pictured(family)))

    return get


@pytest.fixture(scope="module")
def seeing(pictured: Callable[[str], Path]) -> Callable[..., mtpc.SpecModel]:
    """seeing(family, K, **options): a model that takes images, compiled once."""
    made: dict[Any, mtpc.SpecModel] = {}

    def get(family: str, spec_tokens: int, **options: Any) -> mtpc.SpecModel:
        key = (family, spec_tokens, *sorted(options.items()))
        if key not in made:
            options = {**OPTIONS, "spec_tokens": spec_tokens, **options}
            made[key] = mtpc.compile(pictured(family), **options)
        return made[key]

    return get


def placed(spec: mtpc.SpecModel, ids: list[int], images: list[Any]) -> Any:
    """A prompt's token ids and images, as `Engine.add` takes them."""
    assert spec.vision is not None
    return spec.vision.place(ids, images, 128) if images else (ids, None)


def add(spec: mtpc.SpecModel, ids: list[int], images: list[Any], new: int = NEW) -> int:
    ids, found = placed(spec, ids, images)
    return spec.engine.add(ids, new, images=found)


def serve(spec: mtpc.SpecModel, prompts: Any, new: int = NEW) -> list[list[int]]:
    """Texts of prompts that join one after the other."""
    texts: dict[int, list[int]] = {}
    waiting = list(prompts)
    while waiting or spec.engine.has_work:
        if waiting:
            texts[add(spec, *waiting.pop(0), new)] = []
        for output in spec.engine.step():
            texts[output.request_id] += output.token_ids
    return list(texts.values())


@pytest.mark.parametrize(
    ("family", "spec_tokens"),
    [
        pytest.param(family, k, marks=[] if (family, k) == ("qwen3_5", 3) else pytest.mark.slow)
        for family in FAMILIES
        for k in range(4)
    ],
)
def test_text_is_transformers(
    family: str,
    spec_tokens: int,
    seeing: Callable[..., mtpc.SpecModel],
    plain: Callable[[str], VisionOracle],
) -> None:
    """Alone and together, over poisoned memory. The images do decide the text."""
    spec, oracle = seeing(family, spec_tokens), plain(family)
    expected = [oracle.generate(*prompt, NEW) for prompt in PROMPTS]
    for _ in range(2):  # The second time pages and snapshots of the first are reused.
        assert serve(spec, PROMPTS) == expected
    poison(spec)
    assert [serve(spec, [prompt])[0] for prompt in PROMPTS] == expected
    if spec_tokens:
        accepted = spec.stats.acceptance_by_position
        assert 0 < accepted[-1] <= accepted[0] < 1
    ids, others = PROMPTS[1][0], [picture(24, 24, seed) for seed in range(1, 5)]
    seen = {tuple(oracle.generate(ids, [image], NEW)) for image in others}
    assert len(seen) > 1


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_drafts_after_images(
    family: str, seeing: Callable[..., mtpc.SpecModel], plain: Callable[[str], VisionOracle]
) -> None:
    """K = 3: the MTP layer sees image rows one token early, also over the edges of chunks."""
    spec, compared = seeing(family, 3), 0
    for ids, images in (p for p in PROMPTS if p[1]):
        poison(spec)
        page = VisionPage(plain(family), ids, images)
        tokens, found = placed(spec, ids, images)
        spec.engine.add(tokens, 8, images=found)
        text = list(tokens)
        while spec.engine.has_work:
            text += [token for output in spec.engine.step() for token in output.token_ids]
            for request in spec.engine.running:
                if request.is_prefilled:
                    row = spec.program.shared["state.token_ids"][request.slot].tolist()
                    logits = page.drafts(text, 3)
                    tops = [each.topk(2).values for each in logits]
                    assert min(float(a - b) for a, b in tops) > MIN_MARGIN_FLOAT32
                    assert row == [text[-1], *(int(each.argmax()) for each in logits)]
                    compared += 1
    assert compared >= 8


def test_rows_at_the_edges_of_chunks(seeing: Callable[..., mtpc.SpecModel]) -> None:
    """The MTP layer's keys and values do not depend on where chunks end: row t embeds t + 1."""
    kept = []
    for chunk in (8, 64):
        spec = seeing("qwen3_5", 3, prefill_chunk=chunk)
        spec.engine.reset_prefix_cache()
        poison(spec)
        ids, found = placed(spec, [*range(10, 17), IMAGE, 20], [WIDE])
        spec.engine.add(ids, 4, images=found)
        request = spec.engine.waiting[0]
        while not request.is_prefilled:
            spec.engine.step()
        last = max(int(name.split(".")[1]) for name in spec.program.shared if name[:3] == "kv.")
        pools = [spec.program.shared[f"kv.{last}.{name}"] for name in "kv"]
        rows = [pool[request.pages].flatten(0, 1)[: len(ids) - 1].clone() for pool in pools]
        kept.append(torch.stack(rows))
        while spec.engine.has_work:
            spec.engine.step()
    assert ids[7] == ids[8] == IMAGE  # The first chunk of eight ends within the image.
    torch.testing.assert_close(kept[0], kept[1], rtol=0, atol=1e-9)


@pytest.mark.slow
def test_after_preemption(
    seeing: Callable[..., mtpc.SpecModel], plain: Callable[[str], VisionOracle]
) -> None:
    """Requests that lose their pages prefill their images and their text again."""
    spec = seeing("qwen3_5", 1, num_pages=26, prefix_caching=False)
    expected = [plain("qwen3_5").generate(*prompt, 30) for prompt in PROMPTS]
    before = spec.stats.preemptions
    assert serve(spec, PROMPTS, 30) == expected
    assert spec.stats.preemptions > before


def test_pages_are_reused_by_image(
    seeing: Callable[..., mtpc.SpecModel], plain: Callable[[str], VisionOracle]
) -> None:
    """The same tokens with another image of the same size share no page of an image."""
    spec, oracle = seeing("qwen3_5", 3), plain("qwen3_5")
    spec.engine.reset_prefix_cache()
    ids = [*range(2, 14), IMAGE, *range(40, 60)]
    cached = []
    for image in (picture(24, 24, 3), picture(24, 24, 4), picture(24, 24, 3)):
        number = add(spec, ids, [image])
        request = spec.engine.waiting[-1]
        text = []
        while spec.engine.has_work:
            text += [token for output in spec.engine.step() for token in output.token_ids]
        assert text == oracle.generate(ids, [image], NEW)
        assert request.request_id == number
        cached.append(request.num_cached)
    assert cached[0] == 0
    assert cached[1] <= 12
    assert cached[2] > 12 + 9


@pytest.mark.slow
def test_files_know_images(
    pictured: Callable[[str], Path], plain: Callable[[str], VisionOracle], tmp_path: Path
) -> None:
    """A later process takes pages over for the same image, and for it alone."""
    ids, oracle = [*range(2, 14), IMAGE, *range(40, 60)], plain("qwen3_5")
    options = {**OPTIONS, "spec_tokens": 1, "kv_offload_dir": tmp_path}
    first = mtpc.compile(pictured("qwen3_5"), **options)
    serve(first, [(ids, [SQUARE])])
    first.close()
    later = mtpc.compile(pictured("qwen3_5"), **options)
    for image, is_known in ((picture(24, 24, 9), False), (SQUARE, True)):
        add(later, ids, [image])
        request = later.engine.waiting[-1]
        text = []
        while later.engine.has_work:
            text += [token for output in later.engine.step() for token in output.token_ids]
        assert text == oracle.generate(ids, [image], NEW)
        assert (request.num_cached > 12 + 9) == is_known


def data_of(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def test_messages(
    seeing: Callable[..., mtpc.SpecModel],
    plain: Callable[[str], VisionOracle],
    tmp_path: Path,
) -> None:
    """`generate` takes messages: images as objects, paths and bytes, by the chat template."""
    spec = seeing("qwen3_5", 3)
    (tmp_path / "tall.png").write_bytes(data_of(TALL))
    text = {"type": "text", "text": "w7 w8"}
    images = [{"type": "image", "image": image} for image in (WIDE, tmp_path / "tall.png")]
    messages = [{"role": "user", "content": [images[0], text, images[1]]}]
    wanted = plain("qwen3_5").generate(
        [11, START, IMAGE, END, 7, 8, START, IMAGE, END, 94], [WIDE, TALL], NEW
    )
    one = spec.generate(messages, NEW, ignore_eos=True)
    assert (one.token_ids, one) == (wanted, words(wanted))
    messages[0]["content"][0]["image"] = data_of(WIDE)
    both = spec.generate([messages, [{"role": "user", "content": "w3"}]], NEW, ignore_eos=True)
    assert both[0].token_ids == wanted
    assert both[1].token_ids == plain("qwen3_5").generate([11, 3, 94], [], NEW)


def message(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([{"type": "image", "image": b"no image"}], "cannot be decoded"),
        ([{"type": "image", "image": 7}], "is a int; expected a path"),
        ([{"type": "image", "image": "missing.png"}], "cannot be read"),
        ([{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}], "no URL is fetched"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}}], "not base64"),
        ([{"type": "video", "video": "x"}], "'video'; expected text, image or image_url"),
        ([{"type": "text", "text": "w90"}, {"type": "image", "image": WIDE}], "2 image tokens"),
        ([{"type": "image", "image": picture(400, 400)}] * 2, "at most 128"),
        ([{"type": "image", "image": picture(4, 1000)}], "aspect ratio"),
    ],
)
def test_bad_images(parts: Any, said: str, seeing: Callable[..., mtpc.SpecModel]) -> None:
    with pytest.raises(RequestError, match=said):
        seeing("qwen3_5", 3).generate(message(*parts), 4)


def test_a_decompression_bomb(seeing: Callable[..., mtpc.SpecModel]) -> None:
    """Sizes that a file claims are refused before anything of it is decoded."""
    small = bytearray(data_of(Image.new("RGB", (1, 1))))
    for side in (9000, 11000, 60000):
        small[16:24] = side.to_bytes(4, "big") * 2
        small[29:33] = zlib.crc32(small[12:29]).to_bytes(4, "big")
        parts = {"type": "image", "image": bytes(small)}
        with pytest.raises(RequestError, match=r"pixels"):
            seeing("qwen3_5", 3).generate(message(parts), 4)


def test_what_cannot_be(
    checkpoint: Callable[..., Path],
    seeing: Callable[..., mtpc.SpecModel],
) -> None:
    with pytest.raises(UnsupportedModelError, match="of which mtpc runs text only; expected one"):
        mtpc.compile(checkpoint("mimo"), spec_tokens=0, images=True, backend="eager")
    with pytest.raises(UnsupportedModelError, match="which has no vision tower"):
        mtpc.compile(checkpoint("qwen3_5"), spec_tokens=0, images=True, backend="eager")
    with pytest.raises(OptionError, match="images belongs to"):
        mtpc.compile_host(checkpoint("qwen3_5"), images=True)
    spec = seeing("qwen3_5", 3)
    ids, found = placed(spec, *PROMPTS[1])
    with pytest.raises(RequestError, match="expected spans"):
        spec.engine.add(ids[:3], 4, images=found)
    with pytest.raises(RequestError, match="of the sizes"):
        spec.engine.add([*ids, 5], 4, images=found)
    with pytest.raises(RequestError, match="follow each other"):
        spec.vision.place([IMAGE, IMAGE], [WIDE, WIDE], 99)


def test_keys_and_rows() -> None:
    """Which rows a chunk takes, and what identifies its tokens."""
    embeds = torch.arange(5.0)[:, None]
    images = PromptImages(((1, 3), (4, 7)), (b"a", b"b"), embeds, torch.zeros(8, 3).int(), -2)
    ids, rows = images.take([9, 8, 8, 7], 2, 100)
    assert (ids, rows.flatten().tolist()) == ([100, 8, 101, 102], [1, 2, 3])
    keys = images.keys([9, 8, 8, 7], 2)
    assert keys == [b"a\1\0\0\0", 8, b"b\0\0\0\0", b"b\1\0\0\0"]
    assert images.offset_rows(10)[:, 0].tolist() == [0] * 8 + [-2] * 2


def test_without_images_nothing_is_added(
    pictured: Callable[[str], Path], seeing: Callable[..., mtpc.SpecModel]
) -> None:
    ids, found = placed(seeing("qwen3_5", 3), *PROMPTS[1])
    spec = mtpc.compile(pictured("qwen3_5"), **{**OPTIONS, "images": False, "spec_tokens": 0})
    assert PROMPT_EMBEDS not in spec.program.layout
    assert spec.vision is None
    with pytest.raises(RequestError, match="compile the model with images=True"):
        spec.generate(message({"type": "image", "image": WIDE}), 4)
    with pytest.raises(RequestError, match="compile the model with images=True"):
        spec.engine.add(ids, 4, images=found)


@pytest.mark.slow
def test_compiled_in_bfloat16(
    pictured: Callable[[str], Path], plain: Callable[[str], VisionOracle], cpu_cache: Path
) -> None:
    """K = 3 is K = 0; and both choose as float64 does, hardly less often than transformers."""
    texts = []
    for spec_tokens in (0, 3):
        given = {"backend": "cpu", "cache_dir": cpu_cache, "dtype": "bfloat16"}
        options = {**OPTIONS, **given, "spec_tokens": spec_tokens}
        spec = mtpc.compile(pictured("qwen3_5"), **options)
        poison(spec)
        texts.append(serve(spec, PROMPTS))
    assert texts[0] == texts[1]
    rounded = VisionOracle(pictured("qwen3_5"), torch.bfloat16)
    ours, theirs = 0, 0
    for prompt, text in zip(PROMPTS, texts[0], strict=True):
        best = plain("qwen3_5").choices(*prompt, text)
        ours += sum(a == b for a, b in zip(text, best, strict=True))
        theirs += sum(a == b for a, b in zip(rounded.choices(*prompt, text), best, strict=True))
    count = len(PROMPTS) * NEW
    print(f"as float64: {ours}, transformers in bfloat16: {theirs}, of {count}")
    assert ours > max(theirs - 0.03 * count, 0.9 * count)


@pytest.mark.slow
def test_compiled(
    pictured: Callable[[str], Path], plain: Callable[[str], VisionOracle], cpu_cache: Path
) -> None:
    """The cpu's float64, built and then restored: the same text."""
    expected = [plain("qwen3_5").generate(*prompt, NEW) for prompt in PROMPTS]
    options = {**OPTIONS, "backend": "cpu", "cache_dir": cpu_cache, "spec_tokens": 3}
    for frozen in (False, True):
        spec = mtpc.compile(pictured("qwen3_5"), **options, frozen=frozen)
        poison(spec)
        assert serve(spec, PROMPTS) == expected

"""Prompts with images: text as transformers' own multimodal model has it, drafts as an oracle."""

from __future__ import annotations

import importlib.util
import io
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.oracles import MIN_MARGIN_FLOAT32
from helpers.pictured import (
    NEW,
    OPTIONS,
    PROMPTS,
    ROW,
    SQUARE,
    TALL,
    WIDE,
    add,
    picture,
    placed,
    prompts_of,
    serve,
)
from helpers.theorem import poison
from helpers.vision import (
    END,
    IMAGE,
    MARKS,
    START,
    Crops,
    VisionOracle,
    crops,
    make_vision_checkpoint,
    vision_page,
)
from helpers.word_model import words
from PIL import Image

import mtpc
from mtpc.engine.prompt_images import PromptImages
from mtpc.engine.stats import Stats
from mtpc.engine.vision import Vision
from mtpc.errors import OptionError, RequestError, UnsupportedModelError
from mtpc.layout import PROMPT_EMBEDS
from mtpc.models.image_inputs import ImageInputs
from mtpc.step.chaining import KeepLast
from mtpc.step.records import Metadata

FAMILIES = ("qwen3_5", "glm4v_moe", "step3p7", "qwen3_5_moe")
EACH = [
    pytest.param(family, marks=[pytest.mark.slow] * family.endswith("moe")) for family in FAMILIES
]
"""The default run has positions in three grids, and crops between marks."""
NO_SPECIAL = {"add_special_tokens": False}


def similar(family: str, seed: int) -> Any:
    """Images of one size."""
    return crops(1, 2, seed) if family == "step3p7" else picture(24, 24, seed)


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """pictured(family): a checkpoint that takes images."""
    return cache(lambda family: make_vision_checkpoint(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def plain(pictured: Callable[[str], Path]) -> Callable[[str], VisionOracle]:
    return cache(lambda family: VisionOracle(pictured(family)))


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


@pytest.mark.parametrize(
    ("family", "spec_tokens"),
    [
        pytest.param(family, k, marks=[pytest.mark.slow] * ((family, k) != ("qwen3_5", 3)))
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
    """Alone and together, over poisoned memory. The images do decide the text.

    The default run has Step-3.7's text at K = 3 in `test_pages_are_reused_by_image`.
    """
    spec, oracle, prompts = seeing(family, spec_tokens), plain(family), prompts_of(family)
    expected = [oracle.generate(*prompt, NEW) for prompt in prompts]
    for _ in range(2):  # The second time pages and snapshots of the first are reused.
        assert serve(spec, prompts) == expected
    poison(spec)
    assert [serve(spec, [prompt])[0] for prompt in prompts] == expected
    if spec_tokens:
        accepted = spec.stats.acceptance_by_position
        assert 0 < accepted[-1] <= accepted[0] < 1
    others = [similar(family, seed) for seed in range(1, 5)]
    seen = {tuple(oracle.generate(prompts[1][0], [image], NEW)) for image in others}
    assert len(seen) > 1


@pytest.mark.parametrize("family", EACH)
def test_drafts_after_images(
    family: str, seeing: Callable[..., mtpc.SpecModel], plain: Callable[[str], VisionOracle]
) -> None:
    """K = 3: the MTP layers see image rows early, also over the edges of chunks.

    After the first draft of Step-3.7's second layer the last layer is recycled.
    """
    spec, compared = seeing(family, 3), 0
    for ids, images in (p for p in prompts_of(family) if p[1]):
        poison(spec)
        page = vision_page(family, plain(family), ids, images)
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


@pytest.mark.parametrize("family", ["qwen3_5", "step3p7"])
def test_rows_at_the_edges_of_chunks(family: str, seeing: Callable[..., mtpc.SpecModel]) -> None:
    """MTP layers' keys and values do not depend on where chunks end: row t embeds t + 1.

    Another prompt takes rows of the first chunk of eight, or does not.
    """
    spec, kept, ends = seeing(family, 3), [], []
    ids, images = ([*range(10, 17), IMAGE, 20], [WIDE])
    if family == "step3p7":
        ids, images = ([*range(10, 16), IMAGE, 20], [ROW])
    for others in ([], [[3, 4]], [[3, 4, 5, 6, 7, 8, 9]]):
        poison(spec)
        for other in others:
            spec.engine.add(other, 30)
        tokens, found = placed(spec, ids, images)
        spec.engine.add(tokens, 4, images=found)
        request, ends = spec.engine.waiting[-1], [*ends, set[int]()]
        while not request.is_prefilled:
            spec.engine.step()
            ends[-1].add(request.num_prefilled)
        kept.append(mtp_rows(spec, request, len(tokens)))
        while spec.engine.has_work:
            spec.engine.step()
    assert tokens[7] == tokens[8] == IMAGE  # The first chunk of eight ends within the image.
    assert [8 in each for each in ends] == [True, False, False]
    assert ends[1] != ends[2]
    for rows in kept[1:]:
        torch.testing.assert_close(rows, kept[0], rtol=0, atol=1e-9)


def mtp_rows(spec: mtpc.SpecModel, request: Any, length: int) -> torch.Tensor:
    """Keys and values of the last MTP layer, in rows that rest on no draft."""
    last = max(int(name.split(".")[1]) for name in spec.program.shared if name[:3] == "kv.")
    pools = [spec.program.shared[f"kv.{last}.{name}"] for name in "kv"]
    rows = [pool[request.pages].flatten(0, 1)[: length - 1].clone() for pool in pools]
    return torch.stack(rows)


def test_what_a_slot_keeps() -> None:
    """The last tokens of a chunk are named anew: as rows that the slot keeps, whatever they were.

    Two of the slot's rows of before stay, and one is of the chunk; another request has text.
    """
    embeds, kept = torch.arange(4.0)[:, None], torch.tensor([[[9.0]] * 3, [[7.0], [8.0], [6.0]]])
    chain = torch.zeros(2, 3, dtype=torch.int64)
    ids = torch.tensor([104 + 1, 104 + 0, 100 + 2])  # The chunk has four rows, from id 100 on.
    row = (ids, torch.zeros(3, 1), torch.tensor([2]), torch.tensor([0, 3]), torch.tensor([1]))
    KeepLast(3, 100)(*row, chain, torch.zeros(2, 3, 1), embeds, kept)
    assert kept[1].flatten().tolist() == [8, 7, 2]
    assert chain[1].tolist() == [104, 105, 106]
    inputs = ImageInputs(100, embeds, None, kept)
    slots, where = torch.tensor([1, 0]), torch.tensor([0, 3, 4])
    rows: dict[str, Any] = dict.fromkeys(("slot_mapping", "seq_lens", "block_table"))
    rows |= {"positions": torch.arange(4), "query_start_loc": where, "certain_lens": None}
    metadata = Metadata(**rows, state_slots=slots)
    table = torch.nn.Embedding.from_pretrained(torch.full((100, 1), 5.0))
    found = inputs.embed_next(table, torch.tensor([104, 106, 103, 104]), metadata)
    assert found.flatten().tolist() == [8, 2, 3, 9]
    assert inputs.embed_next(table, torch.tensor([1, 101, 2, 99]), metadata)[:, 0].tolist() == [
        *(5, 1, 5, 5)
    ]
    assert inputs.positions(metadata).tolist() == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES[:3])
def test_after_preemption(
    family: str, seeing: Callable[..., mtpc.SpecModel], plain: Callable[[str], VisionOracle]
) -> None:
    """Requests that lose their pages prefill their images and their text again."""
    spec, prompts = seeing(family, 1, num_pages=26, prefix_caching=False), prompts_of(family)
    expected = [plain(family).generate(*prompt, 30) for prompt in prompts]
    before = spec.stats.preemptions
    assert serve(spec, prompts, 30) == expected
    assert spec.stats.preemptions > before


@pytest.mark.parametrize("family", EACH[:3])
def test_pages_are_reused_by_image(
    family: str, seeing: Callable[..., mtpc.SpecModel], plain: Callable[[str], VisionOracle]
) -> None:
    """The same tokens with another image of the same size share no page of an image."""
    spec, oracle = seeing(family, 3), plain(family)
    spec.engine.reset_prefix_cache()
    ids = [*range(2, 14), IMAGE, *range(40, 60)]
    cached = []
    for image in (similar(family, 3), similar(family, 4), similar(family, 3)):
        number = add(spec, ids, [image])
        request = spec.engine.waiting[-1]
        text = []
        while spec.engine.has_work:
            text += [token for output in spec.engine.step() for token in output.token_ids]
        assert text == oracle.generate(ids, [image], NEW)
        assert request.request_id == number
        cached.append(request.num_cached)
    assert cached[0] == 0
    assert cached[1] <= 13  # With the mark that begins Step-3.7's crops.
    assert cached[2] > 12 + 9
    if family == "step3p7":  # Two crops that are equal, in an image whose rest is another.
        other = Crops(crops(0, 0, 9).whole, similar(family, 3).crops, similar(family, 3).ends_row)
        add(spec, ids, [other])
        request = spec.engine.waiting[-1]
        while spec.engine.has_work:
            spec.engine.step()
        assert request.num_cached is not None
        assert request.num_cached <= 13


def test_an_image_that_comes_again(
    seeing: Callable[..., mtpc.SpecModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its embeddings are kept, as far as there is memory for them: what came last stays."""
    spec, stats = seeing("qwen3_5", 3), Stats(0)
    ids, images = PROMPTS[0]
    monkeypatch.setattr("mtpc.engine.vision.MOST_KEPT_BYTES", 16 * 64 * 8)
    vision = Vision(spec.served, torch.float64, "cpu", stats)
    _, first = vision.place(ids, images, 128)
    _, again = vision.place(ids, images, 128)
    assert torch.equal(first.embeds, again.embeds)
    assert (stats.images_embedded, stats.images_reused) == (2, 2)
    assert stats.image_bytes == (6 + 10) * 64 * 8  # All that may be kept.
    vision.place([3, IMAGE, 4], [SQUARE], 128)  # Nine tokens: the first image makes room.
    vision.place([3, IMAGE, 4], [SQUARE], 128)
    assert (stats.images_embedded, stats.images_reused) == (3, 3)
    assert stats.image_bytes == 9 * 64 * 8
    _, third = vision.place(ids, images, 128)
    assert stats.images_embedded == 5
    torch.testing.assert_close(first.embeds, third.embeds, rtol=0, atol=0)
    assert "5 embedded, 3 reused" in str(stats)
    assert "mtpc:images_reused_total 3" in stats.prometheus()


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
@pytest.mark.parametrize("family", FAMILIES[:3])
def test_compiled_in_bfloat16(
    family: str,
    pictured: Callable[[str], Path],
    plain: Callable[[str], VisionOracle],
    cpu_cache: Path,
) -> None:
    """K = 3 is K = 0; and both choose as float64 does, hardly less often than transformers."""
    texts, prompts = [], prompts_of(family)
    for spec_tokens in (0, 3):
        given = {"backend": "cpu", "cache_dir": cpu_cache, "dtype": "bfloat16"}
        options = {**OPTIONS, **given, "spec_tokens": spec_tokens}
        spec = mtpc.compile(pictured(family), **options)
        poison(spec)
        texts.append(serve(spec, prompts))
    assert texts[0] == texts[1]
    rounded = VisionOracle(pictured(family), torch.bfloat16)
    ours, theirs = 0, 0
    for prompt, text in zip(prompts, texts[0], strict=True):
        best = plain(family).choices(*prompt, text)
        ours += sum(a == b for a, b in zip(text, best, strict=True))
        theirs += sum(a == b for a, b in zip(rounded.choices(*prompt, text), best, strict=True))
    count = len(prompts) * NEW
    print(f"as float64: {ours}, transformers in bfloat16: {theirs}, of {count}")
    assert ours > max(theirs - 0.03 * count, 0.9 * count)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES[:3])
def test_compiled(
    family: str,
    pictured: Callable[[str], Path],
    plain: Callable[[str], VisionOracle],
    cpu_cache: Path,
) -> None:
    """The cpu's float64, built and then restored: the same text."""
    prompts = prompts_of(family)
    expected = [plain(family).generate(*prompt, NEW) for prompt in prompts]
    options = {**OPTIONS, "backend": "cpu", "cache_dir": cpu_cache, "spec_tokens": 3}
    for frozen in (False, True):
        spec = mtpc.compile(pictured(family), **options, frozen=frozen)
        poison(spec)
        assert serve(spec, prompts) == expected


# ---------------------------------------------------------------- Step-3.7's image processor


def test_pictures_without_torchvision(seeing: Callable[..., mtpc.SpecModel]) -> None:
    """transformers has Step-3.7's image processor on torchvision alone."""
    if importlib.util.find_spec("torchvision"):
        pytest.skip("torchvision is installed")
    with pytest.raises(OptionError, match="pip install torchvision"):
        seeing("step3p7", 3).generate(message({"type": "image", "image": WIDE}), 4)


@pytest.mark.parametrize("size", [(24, 24), (20, 36), (70, 40)])
def test_pictures_with_torchvision(
    size: tuple[int, int],
    seeing: Callable[..., mtpc.SpecModel],
    plain: Callable[[str], VisionOracle],
    pictured: Callable[[str], Path],
) -> None:
    """Pictures, tokens and text are those of transformers' own processor."""
    pytest.importorskip("torchvision", reason="transformers has this processor on it alone")
    spec, directory = seeing("step3p7", 3), pictured("step3p7")
    image = picture(*size, seed=3)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    images = transformers.AutoImageProcessor.from_pretrained(directory)
    processor = transformers.Step3p7Processor(images, tokenizer)
    text = "w11 <im_patch> w7 w94"
    given = dict(processor(text=text, images=[image], return_tensors="pt", **NO_SPECIAL))
    assert spec.vision is not None
    ids, found = spec.vision.place([11, IMAGE, 7, 94], [image], 128)
    assert ids == given["input_ids"][0].tolist()
    assert (MARKS["<patch_start>"] in ids) == (size[0] != size[1])
    model = plain("step3p7").model
    out = model.generate(**given, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    parts = ({"type": "image", "image": image}, {"type": "text", "text": "w7"})
    made = spec.generate(message(*parts), NEW, ignore_eos=True)
    assert made.token_ids == out[0, len(ids) :].tolist()
    assert len(found.embeds) == sum(token == IMAGE for token in ids)

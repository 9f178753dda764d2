"""Prompts with images for tiny models, and serving them."""

from __future__ import annotations

from typing import Any

import numpy
from PIL import Image

import mtpc
from helpers.vision import END, IMAGE, START, Crops, crops, processed

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
WHOLE, ROW, PAIR, GRID = crops(0, 0, 1), crops(1, 2, 2), crops(1, 2, 3), crops(2, 2, 4)
CROPPED: list[tuple[list[int], list[Crops]]] = [
    ([5, 6, IMAGE, 7, 8, 9, IMAGE, 10, 11], [WHOLE, ROW]),
    ([IMAGE], [GRID]),
    ([3, 4, 5], []),
    ([*range(10, 18), IMAGE, 20], [WHOLE]),
    ([3, 9, IMAGE], [PAIR]),
]
"""As above, of Step-3.7's pictures: runs of four tokens, with marks around and between them. Chunks
of eight end at each place of a run."""


def prompts_of(family: str) -> list[tuple[list[int], list[Any]]]:
    return [*(CROPPED if family == "step3p7" else PROMPTS)]


def placed(spec: mtpc.SpecModel, ids: list[int], images: list[Any]) -> Any:
    """A prompt's token ids and images, as `Engine.add` takes them."""
    assert spec.vision is not None
    if not images:
        return ids, None
    if not isinstance(images[0], Crops):
        return spec.vision.place(ids, images, 128)
    patches = spec.vision.tower.split(processed(images), spec.served.own_tokens)
    return spec.vision._place(ids, spec.vision._places(ids, len(images)), patches, 128)


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

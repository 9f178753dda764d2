"""Which calls aiter's kernels take, and the memory that they allocate, by hand.

The fake has the dispatch of aiter's sources; see `test_aiter`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from helpers.fake_aiter import ALL, installer
from torch import fx

import mtpc.ops.fused  # noqa: F401  (registers the references)
from mtpc.backends import aiter
from mtpc.backends.aiter import limits, sizes
from mtpc.backends.aiter.limits import Parts, Place, latent_parts
from mtpc.capture.graph import StepGraph
from mtpc.layout import StepKey

pytestmark = pytest.mark.with_triton

REFERENCE = torch.ops.mtpc
ANY_STEP = cast(
    StepGraph, SimpleNamespace(layout=SimpleNamespace(is_ragged=False), key=StepKey.decode(2, 1))
)
"""All that limits ask of a step."""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    yield from installer(tmp_path, monkeypatch)


def _attention(page: int, dtype: torch.dtype = torch.bfloat16) -> fx.Node:
    """A call of `paged_attention` on pages of some size."""
    graph = fx.Graph()
    shapes = [(3, 4, 128), (9, page, 2, 128), (9, page, 2, 128), (3, 5), (3,), (4,)]
    given = [graph.placeholder(f"given_{index}") for index in range(len(shapes))]
    for node, shape in zip(given, shapes, strict=True):
        node.meta["val"] = torch.empty(shape, dtype=dtype if len(shape) > 2 else torch.int32)
    return graph.call_function(REFERENCE.paged_attention.default, (*given, 1.0))


@pytest.mark.parametrize("page", [1, 8, 16, 24, 32, 48, 63, 64, 96, 128])
def test_pages_that_are_no_part_of_a_tile(page: int, install: Callable[..., None]) -> None:
    """aiter's tiles have the next power of two, up to 64, and asserts that they are whole pages;
    larger pages are cut anywhere."""
    install(ALL)
    reference = REFERENCE.paged_attention.default
    (binding,) = (b for b in aiter.aiter_bindings().bindings if b.reference is reference)
    tile = min(64, 1 << (page - 1).bit_length())
    fits = page >= 16 and (tile <= page or tile % page == 0)
    reason = None if fits else f"pages of {page} tokens; it takes 16, 32, and 64 or more"
    assert binding.refuses(_attention(page), ANY_STEP) == reason


def test_other_devices_are_refused(install: Callable[..., None]) -> None:
    """gfx1250 and gfx90a have no such kernel of latent attention, and other tiles."""
    install(ALL)
    for device in ("gfx90a", "gfx1250", "gfx942"):
        binding = aiter.aiter_bindings(device).bindings[0]
        reason = None if device == "gfx942" else f"{device}; it is bound on gfx942 and gfx950"
        assert binding.refuses(_attention(16), ANY_STEP) == reason


@pytest.mark.parametrize("device", ["gfx942", "gfx950"])
def test_every_part_has_one_kernel(device: str, install: Callable[..., None]) -> None:
    """By the dispatch of aiter's sources, for all heads and rows; together they are the heads."""
    install(ALL)
    aiter.aiter_bindings()
    theirs = sys.modules["aiter.mla"]
    for heads in range(1, 130):
        for rows in range(1, 20):
            parts = latent_parts(heads, rows, device)
            ((_, most),) = theirs.kernels_of(device, parts.heads, rows)
            assert rows <= (most or rows)
            assert heads <= parts.calls * parts.heads < heads + 128
        parts = latent_parts(heads, None, device)
        assert parts.heads in theirs.PROMPTS
        assert heads <= parts.calls * parts.heads < heads + 16


def test_parts_by_hand() -> None:
    """DeepSeek-V3's heads at 1, 2, 4, 8 and 16 ranks, and GLM-4.7-Flash's: K = 0, 1, 3, 7, 9, and
    prompts. What one kernel takes, it takes; 64 heads of four rows are two calls of 32, and not 64
    heads of zeros, as their products take longer than the keys."""
    for device in ("gfx942", "gfx950"):
        found = {
            heads: [_as_text(latent_parts(heads, rows, device)) for rows in (1, 2, 4, 8, 10, None)]
            for heads in (128, 64, 32, 20, 16, 8)
        }
        assert found == {
            128: ["128", "128", "128", "128", "128", "128"],
            64: ["64" if device == "gfx950" else "128", "2 x 32", "2 x 32", "2 x 32", "2 x 32",
                 "4 x 16"],
            32: ["32", "32", "32", "32", "32", "2 x 16"],
            20: ["32", "32", "32", "32", "32", "2 x 16"],
            16: ["16", "16", "16", "16", "32", "16"],
            8: ["8", "16", "16", "16", "32", "16"],
        }  # fmt: skip


def _as_text(parts: Parts) -> str:
    return f"{parts.calls} x {parts.heads}" if parts.calls > 1 else str(parts.heads)


def test_refused_latents() -> None:
    q = torch.empty(4, 16, 576, dtype=torch.bfloat16, device="meta")
    call = {"q": q, "latent_cache": q.new_empty(9, 16, 576), "block_table": q.new_empty(4, 4)}
    call |= {"latent_rank": 512}
    prompts, decode = (Place(phase, "gfx942") for phase in ("prefill", "decode"))
    said = "a row of each prompt; it would not split their contexts"
    assert limits.latent_attention(call, prompts) == said
    assert limits.latent_attention(call, decode) is None
    assert limits.latent_attention({**call, "q": q.new_empty(5, 16, 576)}, prompts) is None
    gaps = q.new_empty(9, 16, 600)[:, :, :576]
    said = "a cache with gaps; it takes rows that follow each other"
    assert limits.latent_attention({**call, "latent_cache": gaps}, decode) == said


# ---- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_reqs", "longest", "units", "splits"),
    [
        (1, 8192, 304, 16),  # 16 of 304 programs are nearest to full, and cost 14 % more keys.
        (64, 8192, 304, 9),  # 576 of 608 programs; 14 fill 896 of 912, and cost 13 % more keys.
        (304, 8192, 304, 1),  # Full.
        (64, 64, 304, 4),  # 256 of 304 programs, where a fifth split costs more than its keys.
    ],
)
def test_splits_are_those_that_aiter_would_choose(
    num_reqs: int, longest: int, units: int, splits: int
) -> None:
    assert sizes.latent_splits(num_reqs, longest, units) == splits


@pytest.mark.parametrize(
    ("rows", "num_reqs", "splits", "nbytes"),
    [
        (256, 64, 9, (603_979_776, 1_179_648, 256, 4)),  # 256 * 9 * 128 sums of 512 numbers.
        (64, 64, 1, (16_777_216, 32_768, 256, 4)),  # 64 * 128 sums.
        (256, 64, 1, (0, 131_072, 256, 4)),  # Four rows a request: written where results go.
        (64, 64, 1, (0, 8_192, 256, 4)),  # The same with 32 heads, whatever the rows.
    ],
)
def test_latent_scratch_by_hand(
    rows: int, num_reqs: int, splits: int, nbytes: tuple[int, ...]
) -> None:
    call = {
        "q": torch.empty(rows, 32 if nbytes[1] == 8_192 else 128, 576, device="meta"),
        "block_table": torch.empty(num_reqs, 7, device="meta"),
        "num_kv_splits": splits,
        "latent_rank": 512,
    }
    assert sizes.latent_scratch(call) == nbytes


@pytest.mark.parametrize(
    ("rows", "num_reqs", "longest", "heads", "width", "window", "segments"),
    [
        (1, 1, 32768, (32, 8), 128, 0, 128),  # 8 programs for 4,864: more than there may be.
        (64, 64, 8192, (32, 8), 128, 0, 16),  # 512 programs for 4,864: 10, the next power of two.
        (1, 1, 1024, (32, 8), 128, 0, 16),  # 1,024 keys have 16 tiles.
        (1, 1, 320 * 64, (32, 8), 512, 0, 128),  # 8 programs for 2,432: 304, and at most 128.
        (128, 128, 8192, (32, 8), 512, 0, 16),  # 1,024 programs for 2,432: 3, and at least 16.
        (1, 1, 512, (32, 8), 128, 0, 1),  # Short.
        (1, 1, 32768, (32, 8), 128, 9, 1),  # With a window.
        (256, 256, 32768, (32, 8), 128, 0, 1),  # 2,048 programs, more than 1,216.
        (4, 1, 32768, (32, 8), 128, 0, 128),  # Four rows in blocks of four: two blocks.
        (4, 1, 32768, (32, 8), 512, 0, 1),  # Wide heads, several rows.
        (9, 1, 32768, (100, 4), 128, 0, 128),  # 25 queries a key: blocks of one row of 32 places.
    ],
)
def test_paged_scratch_by_hand(
    rows: int, num_reqs: int, longest: int, heads: tuple[int, int], width: int, window: int,
    segments: int,
) -> None:  # fmt: skip
    """For an MI300X: 304 units, 1,216 programs wanted; 4,864 where contexts are cut."""
    call = {
        "q": torch.empty(rows, heads[0], width, device="meta"),
        "k_cache": torch.empty(9, 64, heads[1], width, device="meta"),
        "block_table": torch.empty(num_reqs, longest // 64, device="meta"),
        "sliding_window": window,
        "max_query_len": rows // num_reqs,
    }
    assert sizes.paged_segments(call) == segments
    sums = 4 * rows * heads[0] * segments
    expected = (sums * width, sums, sums) if segments > 1 else ()
    assert sizes.paged_scratch(call) == expected

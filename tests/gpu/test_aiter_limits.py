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


def _latents(heads: int, rows: int, phase: str, device: str | None) -> str | None:
    """Why a call of latent attention of two requests is refused."""
    q = torch.empty(2 * rows, heads, 576, dtype=torch.bfloat16, device="meta")
    cache = q.new_empty(9, 16, 576)
    call = {"q": q, "latent_cache": cache, "block_table": q.new_empty(2, 4), "latent_rank": 512}
    return limits.latent_attention(call, phase, device)


@pytest.mark.parametrize("device", ["gfx942", "gfx950"])
def test_every_call_that_is_taken_has_one_kernel(device: str, install: Callable[..., None]) -> None:
    """By the dispatch of aiter's sources, for all heads and rows. What it would find, and mtpc
    leaves out, are the cases that `facts.UNBOUND` names, and more rows than a kernel has."""
    install(ALL)
    aiter.aiter_bindings()
    theirs = sys.modules["aiter.mla"]
    left_out = set()
    for heads in range(1, 130):
        for rows in range(1, 20):
            found = theirs.kernels_of(device, heads, rows)
            if _latents(heads, rows, "decode", device) is not None:
                left_out |= {(heads, rows)} if found else set()
                continue
            ((_, most),) = found
            assert rows <= (most or rows)
        prompts = _latents(heads, 5, "prefill", device) is None
        assert prompts == (heads in theirs.PROMPTS)
    beyond = {(16, rows) for rows in range(9, 20)} | {(64, rows) for rows in range(2, 20)}
    assert left_out == beyond | ({(8, 2)} if device == "gfx950" else set())


def test_what_bindings_take_is_what_the_data_say() -> None:
    """DeepSeek-V3's heads at 1, 2, 4, 8 and 16 ranks: K = 0, 1, 3, 7, 9, and prompts."""
    taken = {
        (heads, device): [
            *(rows for rows in (1, 2, 4, 8, 10) if not _latents(heads, rows, "decode", device)),
            *(["prompts"] if not _latents(heads, 4, "prefill", device) else []),
        ]
        for heads in (128, 64, 32, 16, 8)
        for device in ("gfx942", "gfx950")
    }
    rows = [1, 2, 4, 8, 10]
    assert taken == {
        (128, "gfx942"): [*rows, "prompts"], (128, "gfx950"): [*rows, "prompts"],
        (64, "gfx942"): [], (64, "gfx950"): [1],
        (32, "gfx942"): rows, (32, "gfx950"): rows,
        (16, "gfx942"): [1, 2, 4, 8, "prompts"], (16, "gfx950"): [1, 2, 4, 8, "prompts"],
        (8, "gfx942"): [1], (8, "gfx950"): [1],
    }  # fmt: skip
    assert _latents(64, 1, "decode", "gfx942") == (
        "1 query rows a request with 64 heads on gfx942; it takes them on gfx950"
    )
    assert _latents(48, 1, "decode", "gfx942") == "48 heads; it takes 8, 16, 32, 64, 128"
    assert _latents(32, 4, "prefill", None) == "prompts with 32 heads; it takes them with 16 or 128"
    alone = _latents(16, 1, "prefill", None)
    assert alone == "a row of each prompt; it would not split their contexts"


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

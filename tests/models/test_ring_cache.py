"""Rings for sliding-window layers hold no more than the window, and read as paged caches do."""

from __future__ import annotations

import math

import pytest
import torch

from mtpc.layout import NO_SLOT, NULL_PAGE, buffers
from mtpc.models.caches import PagedKV, RingKV, ring_metadata
from mtpc.step.metadata import flat_metadata
from mtpc.step.records import Metadata

PAGE, BLOCKS, SLOTS = 4, 12, 4
HEADS, GROUPS, DIM, VALUE_DIM = 2, 2, 8, 6


def pages_of(window: int, rows: int) -> int:
    """`ring_pages` at this file's sizes."""
    sizes = {buffers.M: BLOCKS, buffers.P: PAGE, buffers.C: rows}
    return int(buffers.ring_pages(window).subs(sizes))


def metadata_of(lens: list[int], counts: list[int], slots: list[int]) -> Metadata:
    """Metadata for `counts` rows at `lens` of requests in `slots`; slot 0 is off."""
    table = torch.full((SLOTS, BLOCKS), NULL_PAGE, dtype=torch.int32)
    for slot in range(1, SLOTS):
        table[slot] = torch.randperm(BLOCKS) + 1 + (slot - 1) * BLOCKS
    indices = torch.tensor(slots)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    active = indices != 0
    num_tokens = int(starts[-1]) + 1  # one padded row
    positions, slot_mapping, seq_lens = flat_metadata(
        torch.tensor(lens, dtype=torch.int32), active, table[indices], starts, num_tokens, PAGE
    )
    certain = torch.tensor(counts, dtype=torch.int32)
    return Metadata(positions, slot_mapping, seq_lens, starts, table[indices], indices, certain)


@pytest.mark.parametrize("window", [1, 3, 4, 6, 9])
def test_rings_read_as_paged_caches_do(window: int) -> None:
    """Ragged chunks, then verified rows and chained drafts with rejections; stale rows are NaN."""
    generator = torch.Generator().manual_seed(window)
    drafts, chunk = 3, 5
    pages = pages_of(window, max(chunk, drafts + 1))
    options = dict(sliding_window=window, s_aux=torch.randn(HEADS * GROUPS, dtype=torch.float64))

    def pool(count: int, width: int) -> torch.Tensor:
        return torch.full((count, PAGE, HEADS, width), math.nan, dtype=torch.float64)

    count = (SLOTS - 1) * pages + 1
    ring = RingKV(pool(count, DIM), pool(count, VALUE_DIM), pages)
    count = (SLOTS - 1) * BLOCKS + 1
    paged = PagedKV(pool(count, DIM), pool(count, VALUE_DIM))
    slots, lens = [3, 0, 1], [0, 0, 0]

    def forward(counts: list[int], lens: list[int]) -> None:
        torch.manual_seed(0)  # the same block table each time
        metadata = metadata_of(lens, counts, slots)
        tokens = metadata.positions.shape[0]
        query, keys = (
            torch.randn(1, heads, tokens, DIM, generator=generator, dtype=torch.float64)
            for heads in (HEADS * GROUPS, HEADS)
        )
        values = torch.randn(1, HEADS, tokens, VALUE_DIM, generator=generator, dtype=torch.float64)
        found, wanted = (
            (
                cache.write(keys, values, metadata),
                cache.attend(None, query, 0.3, metadata, **options),
            )[1]
            for cache in (ring, paged)
        )
        assert torch.isfinite(wanted).all()
        assert torch.equal(found, wanted)

    for counts in ([5, 0, 2], [5, 0, 5], [1, 0, 4]):
        forward(counts, lens)
        lens = [length + new for length, new in zip(lens, counts, strict=True)]
    for accepted in ((0, 3), (3, 1), (2, 0), (0, 0), (3, 3), (1, 2)):
        forward([drafts + 1, 1, drafts + 1], lens)
        lens = [lens[0] + accepted[0] + 1, 0, lens[2] + accepted[1] + 1]
        for step in range(drafts - 1):
            forward([1, 1, 1], [length + step for length in lens])


def test_ring_pages_are_the_window_and_one_step() -> None:
    """Rounded up to pages, and never more than a request has."""
    assert pages_of(window=6, rows=8) == math.ceil((6 - 1 + 8) / PAGE)
    assert pages_of(window=128, rows=8) == BLOCKS


def test_pages_by_arithmetic() -> None:
    """Requests that are off and missing blocks have no pages; others have their slot's, in turn."""
    metadata = metadata_of([6, 2, 9], [2, 1, 1], [2, 0, 1])
    metadata.block_table[2, 3:] = NULL_PAGE
    rings = ring_metadata(metadata, pages=3, page_size=PAGE)
    assert rings.block_table[0].tolist() == [4, 5, 6] * 4
    assert rings.block_table[1].tolist() == [NULL_PAGE] * BLOCKS
    assert rings.block_table[2].tolist() == [1, 2, 3] + [NULL_PAGE] * 9
    assert rings.slot_mapping.tolist() == [
        5 * PAGE + 2,
        5 * PAGE + 3,
        NO_SLOT,
        3 * PAGE + 1,
        NO_SLOT,
    ]

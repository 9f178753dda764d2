"""Attention to keys by request slot, in Triton's interpreter: `tests/run_triton.sh`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers.batches import close
from helpers.triton_here import INTERPRETS, NO_INTERPRETER
from torch import Tensor

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from mtpc.backends.triton_kernels import ELEMENTS, load_kernels
from mtpc.layout import SCRATCH_SLOT

pytestmark = pytest.mark.triton

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_triton, torch.ops.mtpc
REQUESTS = ((50, 4), (3, 1), (0, 5), (7, 3))
"""Of each request: positions before a forward, and rows; the third begins. Then rows of none."""


@dataclass(frozen=True)
class Call:
    """Arguments of slot_attention; what no row sees is NaN."""

    query: Tensor
    fresh: Tensor
    ring: Tensor
    slots: Tensor
    sees_ring: Tensor
    sees_fresh: Tensor
    sinks: Tensor
    window: int
    entries: Tensor | None
    counts: Tensor | None
    chosen: Tensor | None

    def run(self, ops: Any) -> Tensor:
        rows = (self.query, self.fresh, self.ring, self.slots, self.sees_ring, self.sees_fresh)
        older = (self.entries, self.counts, self.chosen)
        out: Tensor = ops.slot_attention(*rows, self.sinks, 0.3, self.window, *older)
        return out


def make_call(
    kind: str,
    dtype: torch.dtype = torch.float32,
    heads: int = 6,
    dim: int = 20,
    window: int = 9,
    ratio: int = 2,
    choices: int = 7,
    padding: int = 2,
) -> Call:
    """Of `REQUESTS` in slots 3, 1, 4 and 2. `kind`: window (no entries), all, or chosen."""
    gen = torch.Generator().manual_seed(heads + window)
    places, most, slot_of = window + 3, 40, (3, 1, 4, 2)
    rows = [(r, context + j) for r, (context, n) in enumerate(REQUESTS) for j in range(n)]
    tokens = len(rows) + padding
    query, fresh = torch.randn(tokens, heads, dim, generator=gen), torch.randn(tokens, dim)
    fresh[len(rows) :] = torch.nan
    ring = torch.full((5, places, dim), torch.nan)
    entries = torch.full((5, most, dim), torch.nan)
    sees_ring = torch.zeros(tokens, places, dtype=torch.bool)
    sees_fresh = torch.zeros(tokens, tokens, dtype=torch.bool)
    slots, counts = torch.full((tokens,), SCRATCH_SLOT), torch.zeros(tokens, dtype=torch.int64)
    chosen = torch.full((tokens, choices), -1, dtype=torch.int32)
    for t, (request, position) in enumerate(rows):
        slot, context = slot_of[request], REQUESTS[request][0]
        slots[t] = slot
        for seen in range(max(0, position - window + 1), position + 1):
            if seen >= context:
                sees_fresh[t, t - (position - seen)] = True
                continue
            sees_ring[t, seen % places] = True
            if ring[slot, seen % places].isnan().any():
                ring[slot, seen % places] = torch.randn(dim, generator=gen)
        closed = min((position + 1) // ratio, most)
        picked = torch.arange(closed)
        if kind == "chosen":
            picked = torch.randperm(closed, generator=gen)[:choices].sort().values
            chosen[t, : len(picked)] = slot * most + picked
        counts[t] = len(picked)
        for entry in picked.tolist():
            if entries[slot, entry].isnan().any():
                entries[slot, entry] = torch.randn(dim, generator=gen)
    older: tuple[Any, ...] = (None, None, None)
    if kind != "window":
        older = (entries.to(dtype), counts, chosen if kind == "chosen" else None)
    given = [x.to(dtype) for x in (query, fresh, ring)]
    sinks = torch.randn(heads, generator=gen).to(dtype)
    return Call(*given, slots, sees_ring, sees_fresh, sinks, window, *older)


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("kind", ["window", "all", "chosen"])
def test_equals_the_reference(kind: str, dtype: torch.dtype) -> None:
    """Ragged rows, padding, NaN in what nobody sees; a ring that has come round, one that is empty,
    entries of none to more than a block."""
    call = make_call(kind, dtype)
    found, wanted = call.run(OURS), call.run(REFERENCE)
    assert wanted.isfinite().all()
    assert not wanted[-2:].any()
    assert not found[-2:].any()
    close(found, wanted)


@pytest.mark.parametrize(("heads", "dim", "window"), [(1, 5, 1), (17, 64, 40), (16, 130, 3)])
def test_sizes_that_no_tile_divides(heads: int, dim: int, window: int) -> None:
    """More heads than a program has; keys wider than a power of two; a window of one position."""
    call = make_call("all", heads=heads, dim=dim, window=window)
    close(call.run(OURS), call.run(REFERENCE))


def test_one_row_alone() -> None:
    """As in plain decoding; and state with gaps between its rows, int32 counts."""
    call = make_call("all", padding=0)
    one = replace(
        call, query=call.query[:1], fresh=call.fresh[:1], slots=call.slots[:1],
        sees_ring=call.sees_ring[:1], sees_fresh=call.sees_fresh[:1, :1],
        counts=call.counts[:1].int(),  # type: ignore[index]
        ring=torch.stack([call.ring, call.ring], 2)[:, :, 0],
        entries=torch.stack([call.entries, call.entries], 2)[:, :, 1],  # type: ignore[list-item]
    )  # fmt: skip
    close(one.run(OURS), call.run(REFERENCE)[:1])


def test_nan_reaches_rows_that_see_it() -> None:
    call = make_call("window")
    call.fresh[1] = torch.nan
    found = call.run(OURS)
    sees = call.sees_fresh[:, 1]
    assert found[sees].isnan().all()
    assert found[~sees].isfinite().all()
    assert 1 < int(sees.sum()) < len(sees)

"""Ragged batches for attention to keys that are stored by request slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtpc.layout import SCRATCH_SLOT

REQUESTS = ((50, 4), (3, 1), (0, 5), (7, 3))
"""(positions before the forward, rows) of each request; the third is new. Free rows follow."""


@dataclass(frozen=True)
class Call:
    """Arguments of slot_attention; keys that no row sees are NaN."""

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

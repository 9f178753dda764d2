"""For attention to keys by request slot: ragged batches, and texts that are cut into forwards."""

from __future__ import annotations

from collections.abc import Sequence
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
    requests: tuple[tuple[int, int], ...] = REQUESTS,
    most: int = 40,
) -> Call:
    """Up to four requests in slots 3, 1, 4 and 2. `kind`: window (no entries), all, or chosen."""
    gen = torch.Generator().manual_seed(heads + window)
    places, slot_of = window + 3, (3, 1, 4, 2)
    rows = [(r, context + j) for r, (context, n) in enumerate(requests) for j in range(n)]
    tokens = len(rows) + padding
    query, fresh = (torch.randn(tokens, *shape, generator=gen) for shape in ((heads, dim), (dim,)))
    fresh[len(rows) :] = torch.nan
    ring = torch.full((5, places, dim), torch.nan)
    entries = torch.full((5, most, dim), torch.nan)
    sees_ring = torch.zeros(tokens, places, dtype=torch.bool)
    sees_fresh = torch.zeros(tokens, tokens, dtype=torch.bool)
    slots, counts = torch.full((tokens,), SCRATCH_SLOT), torch.zeros(tokens, dtype=torch.int64)
    chosen = torch.full((tokens, choices), -1, dtype=torch.int32)
    for t, (request, position) in enumerate(rows):
        slot, context = slot_of[request], requests[request][0]
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


@dataclass(frozen=True)
class Text:
    """A request's queries and keys by position, its entries, and how many of them a row sees."""

    query: Tensor
    keys: Tensor
    entries: Tensor
    counts: Tensor
    chosen: Tensor | None
    sinks: Tensor
    window: int

    @classmethod
    def make(
        cls, seed: int, length: int, window: int, kind: str, dtype: torch.dtype,
        heads: int = 3, dim: int = 40,
    ) -> Text:  # fmt: skip
        """Of random numbers. `kind`: all, or chosen: a third of the entries."""
        gen = torch.Generator().manual_seed(seed)
        counts = torch.arange(1, length + 1)
        chosen = None
        if kind == "chosen":
            picks = [torch.randperm(n, generator=gen)[: -(-n // 3)].sort().values for n in counts]
            chosen = torch.nn.utils.rnn.pad_sequence(picks, True, -1)
            counts = torch.tensor([len(picked) for picked in picks])

        def new(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen).to(dtype)

        rows = (new(length, heads, dim), new(length, dim), new(length, dim))
        sinks = torch.linspace(-1, 1, heads).to(dtype)
        return cls(*rows, counts, chosen, sinks, window)


def run_texts(
    ops: Any, texts: Sequence[Text], cuts: Sequence[Sequence[int]], places: int
) -> list[Tensor]:
    """The results of whole texts [length, N, D], cut into forwards of so many rows.

    Forward i has `cuts[r][i]` rows of text r, none where there are no more. Text r has slot r + 1
    of rings with so many places; what nothing was written to is NaN.
    """
    first, done = texts[0], [0] * len(texts)
    ring = torch.full((len(texts) + 1, places, first.keys.shape[1]), torch.nan).to(first.keys)
    stored = [text.entries for text in (first, *texts)]
    entries, found = torch.stack(stored), [torch.empty_like(text.query) for text in texts]
    for turn in range(max(map(len, cuts))):
        rows = [
            (r, done[r] + j)
            for r, sizes in enumerate(cuts)
            for j in range(sizes[turn] if turn < len(sizes) else 0)
        ]
        call = _forward(texts, rows, done, ring, entries)
        for (r, position), row in zip(rows, call.run(ops), strict=True):
            found[r][position] = row
        for r, position in rows:
            ring[r + 1, position % places] = texts[r].keys[position]
            done[r] = position + 1
    assert done == [len(text.query) for text in texts]
    return found


def _forward(
    texts: Sequence[Text], rows: list[tuple[int, int]], done: list[int], ring: Tensor,
    entries: Tensor,
) -> Call:  # fmt: skip
    """The call for rows (text, position), of texts that have as many positions in the ring."""
    window, places, most = texts[0].window, ring.shape[1], entries.shape[1]
    sees_ring = torch.zeros(len(rows), places, dtype=torch.bool)
    sees_fresh = torch.zeros(len(rows), len(rows), dtype=torch.bool)
    for t, (r, position) in enumerate(rows):
        for seen in range(max(0, position - window + 1), position + 1):
            if seen < done[r]:
                sees_ring[t, seen % places] = True
            else:
                sees_fresh[t, t - (position - seen)] = True
    slots = torch.tensor([r + 1 for r, _ in rows])
    query, fresh, counts = (
        torch.stack([getattr(texts[r], name)[position] for r, position in rows])
        for name in ("query", "keys", "counts")
    )
    chosen = None
    if texts[0].chosen is not None:
        picks = [texts[r].chosen[position] for r, position in rows]  # type: ignore[index]
        picked = torch.nn.utils.rnn.pad_sequence(picks, True, -1)
        chosen = torch.where(picked >= 0, picked + slots[:, None] * most, -1).int()
    given = (query, fresh, ring, slots, sees_ring, sees_fresh, texts[0].sinks, window)
    return Call(*given, entries, counts, chosen)

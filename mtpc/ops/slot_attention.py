"""Attention to keys by request slot: a ring of the last keys, and entries for older ones."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpc.ops.traits import Traits, operator


@operator(
    Traits(
        "earlier",
        "sums",
        rows="query fresh row_slots sees_ring sees_fresh entry_counts chosen_entries",
        slots="ring entries",
        features=None,
    ),
    "query",
)
def slot_attention(
    query: Tensor,
    fresh: Tensor,
    ring: Tensor,
    row_slots: Tensor,
    sees_ring: Tensor,
    sees_fresh: Tensor,
    sinks: Tensor,
    scale: float,
    window: int,
    entries: Tensor | None = None,
    entry_counts: Tensor | None = None,
    chosen_entries: Tensor | None = None,
) -> Tensor:
    """One softmax over a ring's keys, the forward's own keys, and entries. Keys are also the
    values.

    All heads share the keys (DeepSeek-V4). Keys that a row does not see may be anything, even NaN.
    Computes in float32, in float64 where the query is float64.

    Args:
        query: [T, N, D].
        fresh: the forward's own keys, [T, D].
        ring: [S, places, D].
        row_slots: int64 [T], each row's request slot.
        sees_ring: bool [T, places], of the row's own ring.
        sees_fresh: bool [T, T], only where row - window < key <= row.
        sinks: [N], logits that only take part in the normalisation.
        scale: of scores.
        window: see sees_fresh.
        entries: [S, E, D]; None: there are none.
        entry_counts: int64 [T], with `entries`: how many of them a row sees.
        chosen_entries: int32 [T, k], the entries that a row sees, as slot * E + entry, then -1.
            None: a row sees the first entries of its slot.

    Returns:
        [T, N, D], dtype of query; zeros for rows that see nothing.
    """
    keys, seen = [ring[row_slots]], [sees_ring]
    if entries is not None and entry_counts is not None:
        if chosen_entries is None:
            keys.append(entries[row_slots])
            place = torch.arange(entries.shape[1], device=query.device)
        else:
            keys.append(entries.view(-1, entries.shape[-1])[chosen_entries.clamp(min=0)])
            place = torch.arange(chosen_entries.shape[1], device=query.device)
        seen.append(place[None] < entry_counts[:, None])
    return _attend(query, torch.cat(keys, 1), torch.cat(seen, 1), fresh, sees_fresh, sinks, scale)


def _attend(
    query: Tensor, keys: Tensor, seen: Tensor, fresh: Tensor, sees_fresh: Tensor, sinks: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """Attention over keys of each row's own [T, n, D], and over those of all rows [T, D]."""
    wide = torch.promote_types(query.dtype, torch.float32)
    old = torch.where(seen[..., None], keys, 0).to(wide)
    new = torch.where(sees_fresh.any(0)[:, None], fresh, 0).to(wide)
    query, dtype = query.to(wide) * scale, query.dtype
    scores = torch.cat(
        [torch.einsum("tnd,tcd->tnc", query, old), torch.einsum("tnd,ud->tnu", query, new)], -1
    )
    scores = torch.where(torch.cat([seen, sees_fresh], 1)[:, None], scores, float("-inf"))
    logits = sinks.to(wide)[None, :, None].expand(scores.shape[0], -1, 1)
    weights = torch.cat([scores, logits], -1).softmax(-1)
    before, own, _ = weights.split([old.shape[1], new.shape[0], 1], -1)
    out = torch.einsum("tnc,tcd->tnd", before, old) + torch.einsum("tnu,ud->tnd", own, new)
    return out.to(dtype)

"""What PyTorch computes around our ops on aiter's functions, in place of an `mtpc::` operator.

Each takes our operators, the place of the call, and the arguments of the `mtpc::` operator of its
name. Its calls are put into the step's graph: Inductor fuses them with what is before and behind,
and equal ones are made once for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtpc.backends.aiter.limits import Parts, Place, latent_parts, latent_rows
from mtpc.backends.aiter.sizes import latent_splits, units
from mtpc.backends.aiter.token_lists import token_lists

Calls = Sequence[Any]


def paged_attention(
    calls: Calls, place: Place, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor,
    seq_lens: Tensor, query_start_loc: Tensor, scale: float, sliding_window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A request of a prompt may have all rows of the step."""
    rows, given = q.shape[0], (block_table, seq_lens, query_start_loc)
    longest = rows // block_table.shape[0] if place.phase == "decode" else rows
    dense = q if q.stride(2) == 1 else q.contiguous()
    out = calls[0](dense, k_cache, v_cache, *given, scale, sliding_window, softcap, sinks, longest)
    return _zero_off(out, seq_lens, query_start_loc)


def latent_attention(
    calls: Calls, place: Place, q: Tensor, latent_cache: Tensor, block_table: Tensor,
    seq_lens: Tensor, query_start_loc: Tensor, scale: float, latent_rank: int,
) -> Tensor:  # fmt: skip
    """With each request's tokens as pages of one, and as many splits as aiter would choose: none
    for prompts."""
    decode, prefill = calls
    (num_reqs, blocks), page_size = block_table.shape, latent_cache.shape[1]
    rows = latent_rows(q.shape[0], num_reqs, place.phase)
    last = torch.ones(num_reqs, dtype=torch.int32, device=q.device)
    given: tuple[Any, ...] = (latent_cache, block_table, seq_lens, query_start_loc, scale,
                              latent_rank, *token_lists(block_table, seq_lens, page_size),
                              last)  # fmt: skip
    if rows is not None:
        splits = latent_splits(num_reqs, blocks * page_size, units(q.device))
        starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=q.device) * splits
        given = (*given, splits, starts)
    attend, heads = prefill if rows is None else decode, q.shape[1]
    parts = latent_parts(heads, rows, place.device)
    made = [attend(part, *given) for part in _cut(q, parts)]
    out = torch.cat(made, 1) if len(made) > 1 else made[0]
    return _zero_off(out[:, :heads] if heads < out.shape[1] else out, seq_lens, query_start_loc)


def _cut(q: Tensor, parts: Parts) -> list[Tensor]:
    """Queries [T, N, D] in parts of equally many heads. Heads of zeros stand for those that there
    are not: their attention is the average of all values, which the caller drops."""
    missing = parts.calls * parts.heads - q.shape[1]
    whole = pad(q, (0, 0, 0, missing)) if missing else q
    cut = whole.split(parts.heads, 1) if parts.calls > 1 else [whole]
    return [part.contiguous() for part in cut]


def experts(
    calls: Calls, place: Place, x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor,
    expert_weights: Tensor,
) -> Tensor:  # fmt: skip
    """Choices as aiter sorts them: one of nothing becomes one of an expert more than there are,
    which `expert_mask` leaves out, and each row has one such choice more."""
    count = down.shape[0]
    outside = (expert_ids < 0) | (expert_ids >= count)
    ids = pad(expert_ids.masked_fill(outside, count).int(), (0, 1), value=count)
    weights = pad(expert_weights.float().masked_fill(outside, 0), (0, 1))
    mask = (torch.arange(count + 1, device=x.device) < count).int()
    result: Tensor = calls[0](x.contiguous(), gate_up, down, ids, weights, mask)
    return result


def rows_off(seq_lens: Tensor, query_start_loc: Tensor, num_rows: int) -> Tensor:
    """Which rows are of no request that is on: aiter leaves open what it writes to them.

    Args:
        seq_lens: int32 [R]; 0 is off.
        query_start_loc: int32 [R + 1], from 0 on.
        num_rows: T.

    Returns:
        bool [T].
    """
    num_reqs = seq_lens.shape[0]
    row = torch.arange(num_rows, dtype=torch.int32, device=seq_lens.device)
    request = torch.searchsorted(query_start_loc, row, right=True) - 1
    return (request >= num_reqs) | (seq_lens[request.clamp(max=num_reqs - 1)] <= 0)


def _zero_off(out: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> Tensor:
    return out.masked_fill(rows_off(seq_lens, query_start_loc, out.shape[0])[:, None, None], 0)

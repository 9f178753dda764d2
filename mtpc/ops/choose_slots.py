"""The choice of a sparse attention: which cached tokens each row attends to."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mtpc.ops.attention import ATTENDS, gather_pages, visible_positions
from mtpc.ops.traits import operator

_ROWS = 64
"""Rows that the reference scores at a time, because it holds their scores for all heads."""


def _slots(query: Tensor, index_cache: Tensor, block_table: Tensor, count: int) -> Tensor:
    context = block_table.shape[1] * index_cache.shape[1]
    # Not `min`, which while a model is traced leaves a number that depends on the size.
    chosen = count if count <= context else context
    return query.new_empty((query.shape[0], chosen), dtype=torch.int32)


@operator(replace(ATTENDS, rows="query weights", pages="index_cache"), _slots)
def choose_slots(
    query: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    count: int,
) -> Tensor:
    """The `count` positions with the highest scores that a row sees, as slots of the cache.

    The indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1): the
    score of position s for row t is sum_h weights[t, h] * relu(query[t, h] . key[s]). Rows, pages
    and positions are those of `paged_attention`. Scores are float32, float64 for float64 queries.

    Args:
        query: [T, H, D].
        weights: [T, H].
        index_cache: [N, P, D], keys.
        block_table: int32 [R, M].
        seq_lens: int32 [R].
        query_start_loc: int32 [R+1].
        count: index_topk, at least 1.

    Returns:
        int32 [T, min(count, M * P)]: slots, page * P + offset, positions ascending; then -1, where
        a row sees fewer. Rows that attend to nothing have -1 only. Which of several positions with
        equal scores are chosen is undefined.
    """
    context, place = block_table.shape[1] * index_cache.shape[1], index_cache.shape[1]
    out = query.new_full((query.shape[0], min(count, context)), -1, dtype=torch.int32)
    for request in range(block_table.shape[0]):
        visible = visible_positions(
            query.shape[0], context, seq_lens, query_start_loc, request, sliding_window=0
        )
        keys = gather_pages(index_cache, block_table, request)
        total = _scores(query, weights, torch.where(visible.any(0)[:, None], keys, 0))
        chosen = torch.where(visible, total, float("-inf")).topk(out.shape[1], -1).indices
        chosen = torch.where(visible.gather(1, chosen), chosen, context).sort(-1).values
        seen, chosen = chosen < context, chosen.clamp(max=context - 1)
        pages = block_table[request].long().clamp(0, index_cache.shape[0] - 1)
        slots = pages[chosen // place] * place + chosen % place
        out = torch.where(seen, slots.to(torch.int32), out)
    return out


def _scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """[T, C] of queries [T, H, D] and keys [C, D], some rows at a time."""
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = keys.to(wide)
    parts = [
        torch.einsum("thc,th->tc", torch.einsum("thd,cd->thc", rows, keys).relu(), factors)
        for rows, factors in zip(
            query.to(wide).split(_ROWS), weights.to(wide).split(_ROWS), strict=True
        )
    ]
    return torch.cat(parts)

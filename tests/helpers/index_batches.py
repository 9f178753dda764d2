"""Ragged batches for the indexer of sparse attention, and its choice from the definition."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from helpers.batches import Batch, make_batch

LENGTHS = [(37, 4), (1, 1), (0, 3), (9, 5), (300, 2), (20, 3)]


def batch(
    lengths: list[tuple[int, int]], dtype: torch.dtype = torch.float32, **sizes: int
) -> Batch:
    """Keys in `k`, queries of five heads; the elements are multiples of 1/8, so sums are exact."""
    made = make_batch(lengths, dtype=dtype, heads=(5, 1), dims=(12, 1), **sizes)
    return replace(made, q=_coarse(made.q), k=_coarse(made.k))


def _coarse(x: Tensor) -> Tensor:
    return (8 * x).round().clamp(-15, 15) / 8


def weights_of(q: Tensor) -> Tensor:
    """Head weights of each row, one of them negative; multiples of 1/4."""
    return (4 * q[..., 0]).round() / 4


def choose(ops: object, of: Batch, count: int) -> Tensor:
    indices = (of.table, of.seq_lens, of.starts)
    return ops.choose_slots(of.q, weights_of(of.q), of.k[:, :, 0], *indices, count)  # type: ignore[attr-defined]


def plainly(of: Batch, count: int) -> tuple[list[set[int]], list[set[int]], list[set[int]]]:
    """For each row, from the definition: KV slots that it sees, must choose, and may choose."""
    seen, must, may = [], [], []
    place = of.k.shape[1]
    for request in range(len(of.seq_lens)):
        length = int(of.seq_lens[request])
        first, end = int(of.starts[request]), int(of.starts[request + 1])
        for token in range(first, end):
            visible = max(length - (end - token) + 1, 0) if length else 0
            table = of.table[request].tolist()
            slots = [table[p // place] * place + p % place for p in range(visible)]
            keys = of.k.flatten(0, 2)[slots].double()
            scores = of.q[token].double() @ keys.T
            total = (scores.relu() * weights_of(of.q)[token].double()[:, None]).sum(0).tolist()
            edge = sorted(total, reverse=True)[:count][-1] if total else 0.0
            seen.append(set(slots))
            must.append({s for s, t in zip(slots, total, strict=True) if t > edge})
            may.append({s for s, t in zip(slots, total, strict=True) if t >= edge})
    return seen, must, may

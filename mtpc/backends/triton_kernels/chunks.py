"""What recurrences share that go through chunks of positions by matrix products (`delta_chunks`,
`scan_chunks`).

Positions are those that are replayed, then the step's rows. A first launch works on all chunks in
parallel, and leaves a square of numbers for each: of every position with every other. A second one
goes through a request's chunks in order; a program has some columns of one head's state. Its
products are of bfloat16 parts (`dot2`), because float32 products spill on NVIDIA. A row with
NaN spoils also the rows before it in its chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.tiles import dot

CHUNK, FEATURES = 32, 32
"""Positions in a chunk; features of two positions in one product. Larger ones spill on NVIDIA."""
_LEAST_ROWS = 4 * CHUNK
"""The fewest rows of a step that goes in chunks. On paper, a chunk costs about ten positions."""


def count_chunks(num_tokens: int, num_reqs: int, replayed: int) -> int:
    """The most chunks of a step; 0 where a step has few rows, as steps that verify drafts do.

    A request's chunks begin at index (rows before it + replayed * requests before it) // CHUNK +
    requests before it, which leaves room for any lengths; see `tiles`.
    """
    if num_tokens < _LEAST_ROWS or num_tokens <= num_reqs * (replayed + 1):
        return 0
    return (num_tokens + num_reqs * replayed) // CHUNK + num_reqs


def squares(terms: Tensor, chunks: int, heads: int) -> Tensor:
    """Memory for a number for each two positions of a chunk, by head: [chunks, heads, CHUNK,
    CHUNK]."""
    return terms.new_empty((chunks, heads, CHUNK, CHUNK), dtype=torch.float32)


@triton.jit
def request_of_chunk(chunk, reqs, begins, num_reqs, REPLAYED: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A chunk's request, and where the chunk begins among its positions. `begins` holds the first
    row of each request."""
    firsts = (begins + reqs * REPLAYED) // CHUNK + reqs
    request = tl.sum(((reqs < num_reqs) & (firsts <= chunk)).to(tl.int32)) - 1
    return request, (chunk - tl.sum(tl.where(reqs == request, firsts, 0))) * CHUNK


@triton.jit
def dot2(a, b, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """a @ b of float32, each operand as a sum of two bfloat16: a relative error of about 2^-16."""
    a1, b1 = a.to(tl.bfloat16), b.to(tl.bfloat16)
    a2, b2 = (a - a1.to(tl.float32)).to(tl.bfloat16), (b - b1.to(tl.float32)).to(tl.bfloat16)
    return dot(a1, b2, WIDEN) + dot(a2, b1, WIDEN) + dot(a1, b1, WIDEN)


@triton.jit
def state_after(  # type: ignore[no-untyped-def]
    state, keys, delta, decay, position, last, WIDEN: tl.constexpr
):
    """The state after a chunk's positions up to `last`; keys [D, CHUNK]."""
    end = tl.sum(tl.where(position == last, decay, 0.0))
    left = tl.exp(tl.where(position <= last, end - decay, float("-inf")))
    return tl.exp(end) * state + dot2(keys * left[None], delta, WIDEN)


@triton.jit
def rows_at(  # type: ignore[no-untyped-def]
    first, length, committed, start, replays, CHUNK: tl.constexpr
):
    """A chunk's positions; whether each exists, and is a row of the step; its row; and its place in
    the terms."""
    position = first + tl.arange(0, CHUNK)
    now, row = position >= committed, (start + position - committed).to(tl.int64)
    return position, position < length, now, row, tl.where(now, row, replays + position)

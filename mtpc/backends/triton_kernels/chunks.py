"""Recurrences over chunks of positions, by matrix products, for steps of many rows.

A position adds w d^T to the state S, which its gate has faded, and reads r S. Let fade_i be the
product of a chunk's gates up to i. Then r_i (the state after i) = fade_i r_i S + sum over j <= i of
(fade_i / fade_j) (r_i . w_j) d_j, where S is the state before the chunk. So a first launch makes
the products r_i . w_j of every chunk, all chunks in parallel, and leaves a square of numbers for
each: of every position with every other. A second one goes through a request's chunks in order; a
program has some columns of one head's state. (Dao and Gu, Transformers are SSMs, arXiv:2405.21060,
section 6.)

In Mamba-2 d is known. By the delta rule it depends on what the positions before it added: (I + L) d
= beta (v - fade W S), where L_ij = beta_i (w_i . w_j) fade_i / fade_j for j < i. So the first
launch inverts I + L of every chunk, too. It inverts row by row and not by a sum of powers, whose
terms would cancel where keys are alike. (Yang et al., Parallelizing Linear Transformers with the
Delta Rule, arXiv:2406.06484, section 3; with the gates of arXiv:2412.06464.)

Positions are those that are replayed, then the step's rows. Sums are float32, as in the reference.
Products of the second launch are of bfloat16 parts (`dot2`), because float32 products spill on
NVIDIA. A quotient of fades is the exponential of a difference of sums, and is only made where j <=
i, so that it is at most 1. A row with NaN spoils also the rows before it in its chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from mtpc.backends.triton_kernels.launch import Change, Choice, Launch, is_interpreted, power_of_two
from mtpc.backends.triton_kernels.tiles import dot

CHUNK, FEATURES = 32, 32
"""Positions in a chunk; features of two positions in one product. Larger ones spill on NVIDIA."""
_LEAST_ROWS = 4 * CHUNK
"""The fewest rows of a step that goes in chunks. On paper, a chunk costs about ten positions."""
_COLUMNS = {True: 16, False: 32}
"""Columns of the state that a program has, by whether it is of the delta rule. More spill on
NVIDIA."""
_CHOICE = {
    True: Choice((Change(threads=128),)),
    False: Choice((Change(threads=128, factors={"BLOCK_V": 0.5}),), {"BLOCK_V": (2, "DV")}),
}


def count_chunks(num_tokens: int, num_reqs: int, replayed: int) -> int:
    """The most chunks of a step; 0 where a step has few rows, as steps that verify drafts do.

    A request's chunks begin at index (rows before it + replayed * requests before it) // CHUNK +
    requests before it, which leaves room for any lengths; see `tiles`.
    """
    if num_tokens < _LEAST_ROWS or num_tokens <= num_reqs * (replayed + 1):
        return 0
    return (num_tokens + num_reqs * replayed) // CHUNK + num_reqs


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
    state, writes, added, decay, position, last, WIDEN: tl.constexpr
):
    """The state after a chunk's positions up to `last`; writes [D, CHUNK]."""
    end = tl.sum(tl.where(position == last, decay, 0.0))
    left = tl.exp(tl.where(position <= last, end - decay, float("-inf")))
    return tl.exp(end) * state + dot2(writes * left[None], added, WIDEN)


@triton.jit
def rows_at(  # type: ignore[no-untyped-def]
    first, length, committed, start, replays, CHUNK: tl.constexpr
):
    """A chunk's positions; whether each exists, and is a row of the step; its row; and its place in
    the terms."""
    position = first + tl.arange(0, CHUNK)
    now, row = position >= committed, (start + position - committed).to(tl.int64)
    return position, position < length, now, row, tl.where(now, row, replays + position)


@triton.jit
def gates_at(at, live, HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A chunk's factors, and the logarithm of the product of its gates up to each position; `at` is
    where a position's are. A position that is not live leaves the state as it is."""
    factor = tl.load(at, mask=live, other=0.0)
    return factor, tl.cumsum(tl.load(at + HEADS, mask=live, other=0.0), 0)


@triton.jit
def _invert(below, i, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inverse of I + below; `below` is zero on the diagonal and above it."""
    inverse = -below
    for n in range(1, CHUNK):
        mine = i[:, None] == n
        line = -tl.sum(tl.where(mine, below, 0.0), 0)
        line += tl.sum(line[:, None] * inverse, 0)
        inverse = tl.where(mine, line[None], inverse)
    return tl.where(i[:, None] == i[None], 1.0, inverse)


@triton.jit
def chunk_squares_kernel(  # type: ignore[no-untyped-def]
    terms_ptr, standing_ptr, slots_ptr, lens_ptr, starts_ptr, inverse_ptr, scores_ptr, num_tokens,
    num_reqs,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, READS: tl.constexpr,
    WRITES: tl.constexpr, FIELDS: tl.constexpr, REPLAYED: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, R_PAD: tl.constexpr, IS_DELTA: tl.constexpr,
):  # fmt: skip
    """scores [chunks, heads, CHUNK, CHUNK]: r_i . w_j of every key head. With IS_DELTA, of every
    value head: (r_i . w_j) fade_i / fade_j for j <= i; and inverse, (I + L)^-1."""
    chunk, head, reqs = tl.program_id(0), tl.program_id(1), tl.arange(0, R_PAD)
    begins = tl.load(starts_ptr + reqs, mask=reqs < num_reqs, other=0).to(tl.int32)
    request, first = request_of_chunk(chunk, reqs, begins, num_reqs, REPLAYED, CHUNK)
    length = tl.load(lens_ptr + request).to(tl.int32)
    start = tl.load(starts_ptr + request).to(tl.int32)
    committed = length - tl.load(starts_ptr + request + 1).to(tl.int32) + start
    slot = tl.load(slots_ptr + request).to(tl.int64)
    is_on = (length > 0) & (committed > 0)
    stood = tl.load(standing_ptr + slot, mask=is_on, other=0).to(tl.int32)
    stood = stood if REPLAYED > 0 else committed
    if (length <= 0) | (first >= length - stood):
        return
    i, replays = tl.arange(0, CHUNK), num_tokens + request * REPLAYED - stood
    _, live, _, _, entry = rows_at(stood + first, length, committed, start, replays, CHUNK)
    # Some features at a time: of whole rows, products spill on NVIDIA.
    alike = tl.zeros([CHUNK, CHUNK], tl.float32)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    at = terms_ptr + entry[:, None] * FIELDS + (head // GROUP if IS_DELTA else head) * D
    for begin in range(0, D, BLOCK_K):
        d = begin + tl.arange(0, BLOCK_K)
        mask = live[:, None] & (d < D)[None]
        write = tl.load(at + WRITES + d[None], mask=mask, other=0.0)
        read = tl.load(at + READS + d[None], mask=mask, other=0.0)
        writes = tl.trans(write)
        if IS_DELTA:
            alike += tl.dot(write, writes, input_precision="ieee")
        scores += tl.dot(read, writes, input_precision="ieee")
    to = ((chunk.to(tl.int64) * tl.num_programs(1) + head) * CHUNK + i[:, None]) * CHUNK + i[None]
    if IS_DELTA:
        factor, decay = gates_at(
            terms_ptr + entry * FIELDS + FIELDS - 2 * HEADS + head, live, HEADS
        )
        fade = tl.exp(tl.where(i[:, None] >= i[None], decay[:, None] - decay[None], float("-inf")))
        below = tl.where(i[:, None] > i[None], alike * fade * factor[:, None], 0.0)
        tl.store(inverse_ptr + to, _invert(below, i, CHUNK))
        scores *= fade
    tl.store(scores_ptr + to, scores)


@triton.jit
def chunk_state_kernel(  # type: ignore[no-untyped-def]
    terms_ptr, skip_ptr, state_ptr, standing_ptr, slots_ptr, lens_ptr, starts_ptr, certain_ptr,
    inverse_ptr, scores_ptr, out_ptr, num_tokens,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    READS: tl.constexpr, WRITES: tl.constexpr, VALUES: tl.constexpr, FIELDS: tl.constexpr,
    REPLAYED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, IS_DELTA: tl.constexpr,
    CHUNK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """As `recurrent_state_kernel`, but a chunk at a time."""
    request, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lens_ptr + request).to(tl.int32)
    if length <= 0:
        return
    start = tl.load(starts_ptr + request).to(tl.int32)
    committed = length - tl.load(starts_ptr + request + 1).to(tl.int32) + start
    slot = tl.load(slots_ptr + request).to(tl.int64)
    stood = tl.load(standing_ptr + slot, mask=committed > 0, other=0).to(tl.int32)
    sure = tl.minimum(committed + tl.load(certain_ptr + request).to(tl.int32), length)
    i, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D)
    dv = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    cell = state_ptr + ((slot * HEADS + head) * D + d[:, None]) * DV + dv[None]
    inside = (d < D)[:, None] & (dv < DV)[None]
    known = (d < tl.where(stood > 0, D, 0))[:, None] & (dv < DV)[None]
    state = tl.load(cell, mask=known, other=0.0)
    # Where no step ever has drafts, the state has seen all that is committed.
    stood = stood if REPLAYED > 0 else committed
    if sure <= stood:
        tl.store(cell, state, mask=inside)
    chunk = (start + request * REPLAYED) // CHUNK + request
    replays = num_tokens + request * REPLAYED - stood
    SHARE: tl.constexpr = 1 if IS_DELTA else GROUP
    for first in range(stood, length, CHUNK):
        position, live, now, row, entry = rows_at(first, length, committed, start, replays, CHUNK)
        terms, number = terms_ptr + entry[:, None] * FIELDS, chunk + (first - stood) // CHUNK
        factor, decay = gates_at(
            terms_ptr + entry * FIELDS + FIELDS - 2 * HEADS + head, live, HEADS
        )
        # Loads stand where they are used, and writes are loaded twice, to save registers.
        at, mask = terms + head // GROUP * D + d[None], live[:, None] & (d < D)[None]
        square = (number.to(tl.int64) * (HEADS // SHARE) + head // SHARE) * CHUNK + i[:, None]
        square = square * CHUNK + i[None]
        fade, written = tl.exp(decay)[:, None], live[:, None] & (dv < DV)[None]
        value = tl.load(terms + VALUES + head * DV + dv[None], mask=written, other=0.0)
        if IS_DELTA:
            found = dot2(tl.load(at + WRITES, mask=mask, other=0.0), state, WIDEN)
            added = factor[:, None] * (value - fade * found)
            added = dot2(tl.load(inverse_ptr + square), added, WIDEN)
            out = fade * dot2(tl.load(at + READS, mask=mask, other=0.0), state, WIDEN)
            out += dot2(tl.load(scores_ptr + square), added, WIDEN)
        else:
            added, skip = value * factor[:, None], tl.load(skip_ptr + head).to(tl.float32)
            out = fade * dot2(tl.load(at + READS, mask=mask, other=0.0), state, WIDEN)
            out += value * skip
            ahead = tl.where(i[:, None] >= i[None], decay[:, None] - decay[None], float("-inf"))
            out += dot2(tl.load(scores_ptr + square) * tl.exp(ahead), added, WIDEN)
        to = out_ptr + (row[:, None] * HEADS + head) * DV + dv[None]
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=written & now[:, None])
        writes = tl.trans(tl.load(at + WRITES, mask=mask, other=0.0))
        if (first < sure) & (sure <= first + CHUNK):
            kept = state_after(state, writes, added, decay, position, sure - 1, WIDEN)
            tl.store(cell, kept, mask=inside)
        state = state_after(state, writes, added, decay, position, first + CHUNK - 1, WIDEN)


def chunk_launches(
    arguments: Mapping[str, Any], constants: Mapping[str, Any], chunks: int, num_reqs: int
) -> list[Launch]:
    """The launches that replace `recurrent_state_kernel`.

    Args:
        arguments: the arguments of that kernel.
        constants: its constants.
        chunks: the result of `count_chunks`, above 0.
        num_reqs: R.
    """
    heads, width, is_delta = (constants[name] for name in ("HEADS", "DV", "IS_DELTA"))
    squares, terms = heads if is_delta else heads // constants["GROUP"], arguments["terms_ptr"]
    scores = terms.new_empty((chunks, squares, CHUNK, CHUNK), dtype=torch.float32)
    made = dict(
        scores_ptr=scores, inverse_ptr=scores.new_empty(scores.shape) if is_delta else scores
    )
    block, columns = power_of_two(constants["D"], 16), _COLUMNS[is_delta]
    names = ("GROUP", "HEADS", "D", "READS", "WRITES", "FIELDS", "REPLAYED", "IS_DELTA")
    before = {name: constants[name] for name in names} | dict(
        CHUNK=CHUNK, R_PAD=power_of_two(num_reqs), BLOCK_K=min(block, FEATURES)
    )
    after = dict(constants, BLOCK_D=block, BLOCK_V=columns, CHUNK=CHUNK,
                 WIDEN=is_interpreted(chunk_state_kernel))  # fmt: skip
    unused = ("skip_ptr", "state_ptr", "certain_ptr", "out_ptr")
    first = {name: value for name, value in arguments.items() if name not in unused}
    return [
        Launch(chunk_squares_kernel, (chunks, squares, 1), dict(first, **made, num_reqs=num_reqs),
               before, threads=128),
        Launch(chunk_state_kernel, (num_reqs, heads, -(-width // columns)),
               dict(arguments, **made), after, num_stages=1, choice=_CHOICE[is_delta]),
    ]  # fmt: skip

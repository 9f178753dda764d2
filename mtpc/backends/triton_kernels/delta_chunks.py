"""The gated delta rule over chunks of positions, by matrix products, for steps of many rows.

Within a chunk, position i adds k_i d_i^T to the state, and d depends on what the positions before
it added: (I + L) d = beta (v - fade K S), where S is the state before the chunk, fade_i the product
of the decays up to i, and L_ij = beta_i (k_i . k_j) fade_i / fade_j for j < i. So one launch
inverts I + L of every chunk, all chunks in parallel. It inverts row by row and not by a sum of
powers, whose terms would cancel where keys are alike. It also computes the products of queries and
keys. The other launch goes through a request's chunks in order; a program has some columns of one
value head's state. (Yang et al.,
Parallelizing Linear Transformers with the Delta Rule, arXiv:2406.06484, section 3; with the gates
of arXiv:2412.06464.)

Positions are those that are replayed, then the step's rows. Sums are float32, as in the reference.
Products with the state are made of bfloat16 parts (`_dot`), because float32 products spill on
NVIDIA. A row with NaN spoils also the rows before it in its chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from mtpc.backends.triton_kernels.launch import Change, Choice, Launch, is_interpreted, power_of_two
from mtpc.backends.triton_kernels.recurrence import softplus
from mtpc.backends.triton_kernels.tiles import dot

CHUNK, _FEATURES, _COLUMNS = 32, 32, 16
"""Positions in a chunk; features of queries and keys in one product; columns of the state that a
program has. Larger ones spill on NVIDIA."""
_LEAST_ROWS = 4 * CHUNK
"""The fewest rows of a step that goes in chunks. On paper, a chunk costs about ten positions."""
_CHOICE = Choice((Change(threads=128),))


@triton.jit
def round_beta(b, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """sigmoid(b), rounded as rows are."""
    return (1 / (1 + tl.exp(-b.to(tl.float32)))).to(DTYPE).to(tl.float32)


@triton.jit
def log_decay(a, a_log, bias):  # type: ignore[no-untyped-def]
    """-exp(a_log) softplus(a + dt_bias)."""
    return -tl.exp(a_log.to(tl.float32)) * softplus(a.to(tl.float32) + bias.to(tl.float32))


@triton.jit
def _gates(  # type: ignore[no-untyped-def]
    new, old, now, live, a_log, bias, HEADS: tl.constexpr, DTYPE: tl.constexpr
):
    """beta, and the logarithm of the product of a chunk's decays up to each position. A position
    that is not live leaves the state as it is.

    `new` points to a row's b, `old` to its copy in the history; a comes HEADS numbers later.
    """
    is_old = live & (now == 0)
    is_new = live & now
    b = tl.load(new, mask=is_new, other=0.0) + tl.load(old, mask=is_old, other=0.0)
    a = tl.load(new + HEADS, mask=is_new, other=0.0) + tl.load(old + HEADS, mask=is_old, other=0.0)
    beta = tl.where(live, round_beta(b, DTYPE), 0.0)
    return beta, tl.cumsum(tl.where(live, log_decay(a, a_log, bias), 0.0), 0)


@triton.jit
def _dot(a, b, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """a @ b of float32, each operand as a sum of two bfloat16: a relative error of about 2^-16."""
    a1, b1 = a.to(tl.bfloat16), b.to(tl.bfloat16)
    a2, b2 = (a - a1.to(tl.float32)).to(tl.bfloat16), (b - b1.to(tl.float32)).to(tl.bfloat16)
    return dot(a1, b2, WIDEN) + dot(a2, b1, WIDEN) + dot(a1, b1, WIDEN)


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
def _after(  # type: ignore[no-untyped-def]
    state, keys, delta, decay, position, last, WIDEN: tl.constexpr
):
    """The state after a chunk's positions up to `last`; keys [D, CHUNK]."""
    end = tl.sum(tl.where(position == last, decay, 0.0))
    left = tl.exp(tl.where(position <= last, end - decay, float("-inf")))
    return tl.exp(end) * state + _dot(keys * left[None], delta, WIDEN)


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    first, length, committed, start, replays, CHUNK: tl.constexpr
):
    """A chunk's positions; whether each exists, and is a row of the step; its row; and its place in
    the terms."""
    position = first + tl.arange(0, CHUNK)
    now, row = position >= committed, (start + position - committed).to(tl.int64)
    return position, position < length, now, row, tl.where(now, row, replays + position)


@triton.jit
def delta_chunks_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, terms_ptr, a_log_ptr, bias_ptr, history_ptr, standing_ptr, slots_ptr, lens_ptr,
    starts_ptr, inverse_ptr, scores_ptr, num_tokens, num_reqs,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    KEYS: tl.constexpr, CHANNELS: tl.constexpr, KEPT: tl.constexpr, REPLAYED: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, R_PAD: tl.constexpr,
):  # fmt: skip
    """inverse, scores [chunks, HEADS, CHUNK, CHUNK]: (I + L)^-1, and (q_i . k_j) fade_i / fade_j
    for j <= i."""
    chunk, head, reqs = tl.program_id(0), tl.program_id(1), tl.arange(0, R_PAD)
    begins = tl.load(starts_ptr + reqs, mask=reqs < num_reqs, other=0).to(tl.int32)
    chunks = (begins + reqs * REPLAYED) // CHUNK + reqs  # The first of each request.
    request = tl.sum(((reqs < num_reqs) & (chunks <= chunk)).to(tl.int32)) - 1
    first = (chunk - tl.sum(tl.where(reqs == request, chunks, 0))) * CHUNK
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
    position, live, now, row, entry = _rows(stood + first, length, committed, start, replays, CHUNK)
    new = rows_ptr + row * (CHANNELS + 2 * HEADS) + CHANNELS + head
    old = history_ptr + (slot * KEPT + position % KEPT) * (CHANNELS + 2 * HEADS) + CHANNELS + head
    a_log, bias = tl.load(a_log_ptr + head), tl.load(bias_ptr + head)
    beta, decay = _gates(new, old, now, live, a_log, bias, HEADS, rows_ptr.dtype.element_ty)
    # Some features at a time: of whole rows, products spill on NVIDIA.
    alike = tl.zeros([CHUNK, CHUNK], tl.float32)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    at = terms_ptr + entry[:, None] * CHANNELS + head // GROUP * D
    for begin in range(0, D, BLOCK_K):
        d = begin + tl.arange(0, BLOCK_K)
        mask = live[:, None] & (d < D)[None]
        query = tl.load(at + d[None], mask=mask, other=0.0)
        key = tl.load(at + KEYS + d[None], mask=mask, other=0.0)
        keys = tl.trans(key)
        alike += tl.dot(key, keys, input_precision="ieee")
        scores += tl.dot(query, keys, input_precision="ieee")
    fade = tl.exp(tl.where(i[:, None] >= i[None], decay[:, None] - decay[None], float("-inf")))
    below = tl.where(i[:, None] > i[None], alike * fade * beta[:, None], 0.0)
    to = ((chunk.to(tl.int64) * HEADS + head) * CHUNK + i[:, None]) * CHUNK + i[None]
    tl.store(inverse_ptr + to, _invert(below, i, CHUNK))
    tl.store(scores_ptr + to, scores * fade)


@triton.jit
def delta_chunk_state_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, terms_ptr, a_log_ptr, bias_ptr, state_ptr, history_ptr, standing_ptr, slots_ptr,
    lens_ptr, starts_ptr, certain_ptr, inverse_ptr, scores_ptr, out_ptr, num_tokens,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    KEYS: tl.constexpr, CHANNELS: tl.constexpr, KEPT: tl.constexpr, REPLAYED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """As `delta_state_kernel`, but a chunk at a time."""
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
    a_log, bias = tl.load(a_log_ptr + head), tl.load(bias_ptr + head)
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
    for first in range(stood, length, CHUNK):
        position, live, now, row, entry = _rows(first, length, committed, start, replays, CHUNK)
        new = rows_ptr + row * (CHANNELS + 2 * HEADS) + CHANNELS + head
        old = history_ptr + (slot * KEPT + position % KEPT) * (CHANNELS + 2 * HEADS)
        old += CHANNELS + head
        beta, decay = _gates(new, old, now, live, a_log, bias, HEADS, rows_ptr.dtype.element_ty)
        # Loads stand where they are used, and keys are loaded twice, to save registers.
        terms, number = terms_ptr + entry[:, None] * CHANNELS, chunk + (first - stood) // CHUNK
        at, mask = terms + head // GROUP * D + d[None], live[:, None] & (d < D)[None]
        square = ((number.to(tl.int64) * HEADS + head) * CHUNK + i[:, None]) * CHUNK + i[None]
        fade, written = tl.exp(decay)[:, None], live[:, None] & (dv < DV)[None]
        found = _dot(tl.load(at + KEYS, mask=mask, other=0.0), state, WIDEN)
        value = tl.load(terms + 2 * KEYS + head * DV + dv[None], mask=written, other=0.0)
        delta = _dot(tl.load(inverse_ptr + square), beta[:, None] * (value - fade * found), WIDEN)
        out = fade * _dot(tl.load(at, mask=mask, other=0.0), state, WIDEN)
        out += _dot(tl.load(scores_ptr + square), delta, WIDEN)
        to = out_ptr + (row[:, None] * HEADS + head) * DV + dv[None]
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=written & now[:, None])
        keys = tl.trans(tl.load(at + KEYS, mask=mask, other=0.0))
        if (first < sure) & (sure <= first + CHUNK):
            kept = _after(state, keys, delta, decay, position, sure - 1, WIDEN)
            tl.store(cell, kept, mask=inside)
        state = _after(state, keys, delta, decay, position, first + CHUNK - 1, WIDEN)


def count_chunks(num_tokens: int, num_reqs: int, replayed: int) -> int:
    """The most chunks of a step; 0 where a step has few rows, as steps that verify drafts do.

    A request's chunks begin at index (rows before it + replayed * requests before it) // CHUNK +
    requests before it, which leaves room for any lengths; see `tiles`.
    """
    if num_tokens < _LEAST_ROWS or num_tokens <= num_reqs * (replayed + 1):
        return 0
    return (num_tokens + num_reqs * replayed) // CHUNK + num_reqs


def chunk_launches(
    arguments: Mapping[str, Any], constants: Mapping[str, Any], chunks: int, num_reqs: int
) -> list[Launch]:
    """The launches that replace `delta_state_kernel`.

    Args:
        arguments: the arguments of that kernel.
        constants: its constants.
        chunks: the result of `count_chunks`, above 0.
        num_reqs: R.
    """
    heads, terms = constants["HEADS"], arguments["terms_ptr"]
    squares = {
        name: terms.new_empty((chunks, heads, CHUNK, CHUNK), dtype=torch.float32)
        for name in ("inverse_ptr", "scores_ptr")
    }
    widths = {"BLOCK_D": power_of_two(constants["D"], 16), "BLOCK_V": _COLUMNS}
    sizes = {name: value for name, value in constants.items() if name not in widths}
    keys = heads // constants["GROUP"] * constants["D"]
    sizes |= dict(CHUNK=CHUNK, KEYS=keys, CHANNELS=2 * keys + heads * constants["DV"])
    before = {"R_PAD": power_of_two(num_reqs), "BLOCK_K": min(widths["BLOCK_D"], _FEATURES)}
    unused = ("state_ptr", "certain_ptr", "out_ptr")
    first = {name: value for name, value in arguments.items() if name not in unused}
    columns = -(-constants["DV"] // _COLUMNS)
    return [
        Launch(delta_chunks_kernel, (chunks, heads, 1), first | squares | {"num_reqs": num_reqs},
               sizes | before, threads=128),
        Launch(delta_chunk_state_kernel, (num_reqs, heads, columns), {**arguments, **squares},
               sizes | widths | {"WIDEN": is_interpreted(delta_chunk_state_kernel)}, num_stages=1,
               choice=_CHOICE),
    ]  # fmt: skip

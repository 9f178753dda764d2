"""The gated delta rule on state rows, in three launches (`recurrence`).

`delta_terms` convolves and norms all positions in parallel. `delta_state` goes through a request's
positions one by one. A step of many rows goes through chunks of positions instead, in
four launches.

Within a chunk, position i adds k_i d_i^T to the state, and d depends on what the positions before
it added: (I + L) d = beta (v - fade K S), where S is the state before the chunk, fade_i the product
of the decays up to i, and L_ij = beta_i (k_i . k_j) fade_i / fade_j for j < i. So one launch
inverts I + L of every chunk, all chunks in parallel. It inverts row by row and not by a sum of
powers, whose terms would cancel where keys are alike. It also computes the products of queries and
keys. The other launch goes through a request's chunks in order; a program has some columns of one
value head's state. (Yang et al., Parallelizing Linear Transformers with the Delta Rule,
arXiv:2406.06484, section 3; with the gates of arXiv:2412.06464.)

Sums are float32, as in the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Change, Choice, Launch, is_interpreted, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.recurrence import (
    BY_COLUMNS,
    COLUMNS,
    FEATURES,
    NO_END,
    Recurrence,
    convolve,
    count_chunks,
    dim_limit,
    dot2,
    position_of,
    request_of,
    request_of_chunk,
    rows_at,
    silu,
    softplus,
    squares,
    state_after,
)

_EPSILON: tl.constexpr = tl.constexpr(1e-6)
"""As in `mtpc.ops.gated_delta`."""
_COLUMNS = 16
"""Columns of the state that a program has. More spill on NVIDIA."""
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
def delta_terms_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, conv_ptr, history_ptr, standing_ptr, slots_ptr, lens_ptr, starts_ptr, terms_ptr,
    num_reqs, num_tokens,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    WIDTH: tl.constexpr, KEPT: tl.constexpr, REPLAYED: tl.constexpr, ROOT: tl.constexpr,
    BLOCK: tl.constexpr, R_PAD: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """terms [T + R REPLAYED, C]: unit queries and keys, values; float32.

    A program has one position and one head: of queries, keys or values, in this order.
    """
    entry, head, reqs = tl.program_id(0), tl.program_id(1), tl.arange(0, R_PAD)
    KEYS: tl.constexpr = 2 * KEY_HEADS * D
    CHANNELS: tl.constexpr = KEYS + HEADS * DV
    ends = tl.load(starts_ptr + 1 + reqs, mask=reqs < num_reqs, other=NO_END)
    request = request_of(entry, ends, num_tokens, REPLAYED)
    length = tl.load(lens_ptr + request, mask=request < num_reqs, other=0).to(tl.int32)
    if length <= 0:
        return
    start = tl.load(starts_ptr + request).to(tl.int32)
    committed = length - tl.load(starts_ptr + request + 1).to(tl.int32) + start
    slot = tl.load(slots_ptr + request).to(tl.int64)
    stood = tl.load(standing_ptr + slot, mask=committed > 0, other=0).to(tl.int32)
    position, exists = position_of(entry, start, committed, stood, num_tokens, REPLAYED)
    if exists:
        lane, is_value = tl.arange(0, BLOCK), head >= 2 * KEY_HEADS
        first = tl.where(is_value, KEYS + (head - 2 * KEY_HEADS) * DV, head * D)
        inside = lane < tl.where(is_value, DV, D)
        x = convolve(
            rows_ptr, history_ptr, conv_ptr, start, committed, slot, position, first + lane, inside,
            CHANNELS + 2 * HEADS, CHANNELS, WIDTH, KEPT, W_PAD,
        )  # fmt: skip
        x = silu(x, rows_ptr.dtype.element_ty)
        unit = x * tl.rsqrt(tl.sum(x * x, 0) + _EPSILON) * tl.where(head < KEY_HEADS, ROOT, 1.0)
        to = terms_ptr + entry.to(tl.int64) * CHANNELS + first + lane
        tl.store(to, tl.where(is_value, x, unit), mask=inside)


@triton.jit
def delta_state_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, terms_ptr, a_log_ptr, bias_ptr, state_ptr, history_ptr, standing_ptr, slots_ptr,
    lens_ptr, starts_ptr, certain_ptr, out_ptr, num_tokens,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    KEPT: tl.constexpr, REPLAYED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Rows of requests with a length above 0 -> out [T, HEADS, DV]; state [S, HEADS, D, DV]."""
    request, head = tl.program_id(0), tl.program_id(1)
    KEYS: tl.constexpr = HEADS // GROUP * D
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * DV
    length = tl.load(lens_ptr + request).to(tl.int32)
    if length <= 0:
        return
    start = tl.load(starts_ptr + request).to(tl.int32)
    committed = length - tl.load(starts_ptr + request + 1).to(tl.int32) + start
    slot = tl.load(slots_ptr + request).to(tl.int64)
    stood = tl.load(standing_ptr + slot, mask=committed > 0, other=0).to(tl.int32)
    sure = tl.minimum(committed + tl.load(certain_ptr + request).to(tl.int32), length)
    d, dv = tl.arange(0, BLOCK_D), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    key_at, value_at = head // GROUP * D + d, 2 * KEYS + head * DV + dv
    a_log, bias = tl.load(a_log_ptr + head), tl.load(bias_ptr + head)
    cell = state_ptr + ((slot * HEADS + head) * D + d[:, None]) * DV + dv[None]
    inside = (d < D)[:, None] & (dv < DV)[None]
    known = (d < tl.where(stood > 0, D, 0))[:, None] & (dv < DV)[None]
    state = tl.load(cell, mask=known, other=0.0)
    # Where no step ever has drafts, the state has seen all that is committed.
    position = stood if REPLAYED > 0 else committed
    if sure <= position:
        tl.store(cell, state, mask=inside)
    while position < length:
        now, row = position >= committed, start + position - committed
        entry = tl.where(now, row, num_tokens + request * REPLAYED + position - stood)
        terms = terms_ptr + entry.to(tl.int64) * CHANNELS
        q = tl.load(terms + key_at, mask=d < D, other=0.0)
        k = tl.load(terms + KEYS + key_at, mask=d < D, other=0.0)
        v = tl.load(terms + value_at, mask=dv < DV, other=0.0)
        # Two masked loads: Triton 3.6 cannot compile a load from a selected pointer for AMD.
        new = rows_ptr + row.to(tl.int64) * (CHANNELS + 2 * HEADS) + CHANNELS + head
        old = history_ptr + (slot * KEPT + position % KEPT) * (CHANNELS + 2 * HEADS)
        old += CHANNELS + head
        b = tl.load(new, mask=now, other=0.0) + tl.load(old, mask=now == 0, other=0.0)
        a = tl.load(new + HEADS, mask=now, other=0) + tl.load(old + HEADS, mask=now == 0, other=0)
        beta = round_beta(b, rows_ptr.dtype.element_ty)
        state *= tl.exp(log_decay(a, a_log, bias))
        delta = (v - tl.sum(state * k[:, None], 0)) * beta
        state += k[:, None] * delta[None]
        found = tl.sum(state * q[:, None], 0).to(out_ptr.dtype.element_ty)
        to = out_ptr + (row.to(tl.int64) * HEADS + head) * DV + dv
        tl.store(to, found, mask=dv < tl.where(now, DV, 0))
        position += 1
        if position == sure:
            tl.store(cell, state, mask=inside)


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
    position, live, now, row, entry = rows_at(
        stood + first, length, committed, start, replays, CHUNK
    )
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
        position, live, now, row, entry = rows_at(first, length, committed, start, replays, CHUNK)
        new = rows_ptr + row * (CHANNELS + 2 * HEADS) + CHANNELS + head
        old = history_ptr + (slot * KEPT + position % KEPT) * (CHANNELS + 2 * HEADS)
        old += CHANNELS + head
        beta, decay = _gates(new, old, now, live, a_log, bias, HEADS, rows_ptr.dtype.element_ty)
        # Loads stand where they are used, and keys are loaded twice, to save registers.
        terms, number = terms_ptr + entry[:, None] * CHANNELS, chunk + (first - stood) // CHUNK
        at, mask = terms + head // GROUP * D + d[None], live[:, None] & (d < D)[None]
        square = ((number.to(tl.int64) * HEADS + head) * CHUNK + i[:, None]) * CHUNK + i[None]
        fade, written = tl.exp(decay)[:, None], live[:, None] & (dv < DV)[None]
        found = dot2(tl.load(at + KEYS, mask=mask, other=0.0), state, WIDEN)
        value = tl.load(terms + 2 * KEYS + head * DV + dv[None], mask=written, other=0.0)
        delta = dot2(tl.load(inverse_ptr + square), beta[:, None] * (value - fade * found), WIDEN)
        out = fade * dot2(tl.load(at, mask=mask, other=0.0), state, WIDEN)
        out += dot2(tl.load(scores_ptr + square), delta, WIDEN)
        to = out_ptr + (row[:, None] * HEADS + head) * DV + dv[None]
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=written & now[:, None])
        keys = tl.trans(tl.load(at + KEYS, mask=mask, other=0.0))
        if (first < sure) & (sure <= first + CHUNK):
            kept = state_after(state, keys, delta, decay, position, sure - 1, WIDEN)
            tl.store(cell, kept, mask=inside)
        state = state_after(state, keys, delta, decay, position, first + CHUNK - 1, WIDEN)


def chunk_launches(values: dict[str, Any], chunks: int) -> list[Launch]:
    """The launches that replace `delta_state_kernel`.

    Args:
        values: of that kernel's parameters.
        chunks: the result of `count_chunks`, above 0.
    """
    heads, dim, width, terms = (values[name] for name in ("HEADS", "D", "DV", "terms_ptr"))
    keys, block = heads // values["GROUP"] * dim, power_of_two(dim, 16)
    inverse, scores = squares(terms, chunks, heads), squares(terms, chunks, heads)
    values = values | dict(
        inverse_ptr=inverse, scores_ptr=scores, CHUNK=scores.shape[-1], KEYS=keys,
        CHANNELS=2 * keys + heads * width, BLOCK_D=block, BLOCK_K=min(block, FEATURES),
        BLOCK_V=_COLUMNS, WIDEN=is_interpreted(delta_chunk_state_kernel),
    )  # fmt: skip
    state_grid = (values["num_reqs"], heads, -(-width // _COLUMNS))
    return [
        Launch(delta_chunks_kernel, (chunks, heads, 1), values, threads=128),
        Launch(delta_chunk_state_kernel, state_grid, values, num_stages=1, choice=_CHOICE),
    ]


@operator(limit=dim_limit("key head dim"))
def gated_delta_rule(
    rows: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor, recurrent: Tensor,
    history: Tensor, standing: Tensor, state_slots: Tensor, seq_lens: Tensor,
    query_start_loc: Tensor, certain_lens: Tensor, *, batch_invariant: bool = False,
) -> Plan:  # fmt: skip
    """Three launches, four where rows go in chunks; T > 0. Chunks round in another way than single
    positions, so there are none if results must not depend on how many rows a step has.

    Raises:
        BackendError: the state is not contiguous.
    """
    indices = (state_slots, seq_lens, query_start_loc, certain_lens)
    step = Recurrence.of(rows, conv_weight, (recurrent, history, standing), indices)
    (_, heads, dim, value_dim), channels = recurrent.shape, conv_weight.shape[0]
    key_heads = (channels - heads * value_dim) // (2 * dim)
    terms = rows.new_empty((step.entries, channels), dtype=torch.float32)
    first = dict(terms_ptr=terms, KEY_HEADS=key_heads, ROOT=dim**-0.5,
                 BLOCK=power_of_two(max(dim, value_dim)))  # fmt: skip
    second = step.values | dict(
        terms_ptr=terms, a_log_ptr=a_log.contiguous(), bias_ptr=dt_bias.contiguous(),
        GROUP=heads // key_heads, BLOCK_D=power_of_two(dim), BLOCK_V=COLUMNS,
    )  # fmt: skip
    chunks = 0 if batch_invariant else count_chunks(rows.shape[0], step.num_reqs, step.replayed)
    states = [Launch(delta_state_kernel, step.grid, second, threads=128, choice=BY_COLUMNS)]
    if chunks:
        states = chunk_launches(second, chunks)
    terms_launch = step.terms_launch(delta_terms_kernel, 2 * key_heads + heads, first)
    return [terms_launch, *states, step.remember_launch()], step.out

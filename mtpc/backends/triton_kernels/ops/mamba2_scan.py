"""Mamba-2's selective scan on state rows, in three launches (`recurrence`).

`scan_terms` convolves all positions in parallel, and makes their time steps. `scan_state` goes
through a request's positions one by one. A step of many rows goes through chunks of positions
instead, in four launches.

A position's output sums what the state before the chunk gives and what positions of the chunk up to
its own have added: out_i = fade_i c_i S + sum over j <= i of (fade_i / fade_j) (c_i . b_j) dt_j x_j
+ skip x_i, where fade_i is the product of the decays up to i. So one launch makes the products
c_i . b_j of every chunk, which all heads of a group share. The other goes through a request's
chunks in order. (Dao and Gu, Transformers are SSMs, arXiv:2405.21060, section 6.)

A quotient of fades is the exponential of a difference of sums, and is only made where j <= i, so
that it is at most 1. Sums are float32, as in the reference.
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

_FIELDS = 256
"""Inputs of one position that a program of `scan_terms_kernel` has, at most."""
_COLUMNS = 32
"""Columns of the state that a program has."""
_CHOICE = Choice((Change(threads=128, factors={"BLOCK_V": 0.5}),), {"BLOCK_V": (2, "DV")})
_FADED: tl.constexpr = tl.constexpr(-128.0)
"""Its exponential is 0. Larger ones of a chunk would cost the others their digits."""


@triton.jit
def scan_terms_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, conv_ptr, conv_bias_ptr, bias_ptr, history_ptr, standing_ptr, slots_ptr, lens_ptr,
    starts_ptr, terms_ptr, num_reqs, num_tokens,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, KEPT: tl.constexpr, REPLAYED: tl.constexpr,
    BLOCK: tl.constexpr, R_PAD: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """terms [T + R REPLAYED, C + HEADS]: x, b, c and time steps; float32.

    A program has one position and BLOCK of its inputs.
    """
    CHANNELS: tl.constexpr = HEADS * DV + 2 * GROUPS * D
    FIELDS: tl.constexpr = CHANNELS + HEADS
    entry, reqs = tl.program_id(0), tl.arange(0, R_PAD)
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
        field = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside, is_mixed = field < FIELDS, field < CHANNELS
        x = convolve(
            rows_ptr, history_ptr, conv_ptr, start, committed, slot, position, field, inside,
            FIELDS, CHANNELS, WIDTH, KEPT, W_PAD,
        )  # fmt: skip
        shift = tl.load(conv_bias_ptr + field, mask=is_mixed & HAS_BIAS, other=0.0).to(tl.float32)
        of_head = tl.load(bias_ptr + field - CHANNELS, mask=inside & (field >= CHANNELS), other=0.0)
        mixed = silu(x + shift, rows_ptr.dtype.element_ty)
        value = tl.where(is_mixed, mixed, softplus(x + of_head.to(tl.float32)))
        tl.store(terms_ptr + entry.to(tl.int64) * FIELDS + field, value, mask=inside)


@triton.jit
def scan_state_kernel(  # type: ignore[no-untyped-def]
    terms_ptr, a_log_ptr, skip_ptr, state_ptr, standing_ptr, slots_ptr, lens_ptr, starts_ptr,
    certain_ptr, out_ptr, num_tokens,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    REPLAYED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Rows of requests with a length above 0 -> out [T, HEADS, DV]; state [S, HEADS, D, DV]."""
    request, head = tl.program_id(0), tl.program_id(1)
    VALUES: tl.constexpr = HEADS * DV
    KEYS: tl.constexpr = GROUPS * D
    FIELDS: tl.constexpr = VALUES + 2 * KEYS + HEADS
    length = tl.load(lens_ptr + request).to(tl.int32)
    if length <= 0:
        return
    start = tl.load(starts_ptr + request).to(tl.int32)
    committed = length - tl.load(starts_ptr + request + 1).to(tl.int32) + start
    slot = tl.load(slots_ptr + request).to(tl.int64)
    stood = tl.load(standing_ptr + slot, mask=committed > 0, other=0).to(tl.int32)
    sure = tl.minimum(committed + tl.load(certain_ptr + request).to(tl.int32), length)
    d, dv = tl.arange(0, BLOCK_D), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    key_at, value_at = VALUES + head // (HEADS // GROUPS) * D + d, head * DV + dv
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    skip = tl.load(skip_ptr + head).to(tl.float32)
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
        terms = terms_ptr + entry.to(tl.int64) * FIELDS
        x = tl.load(terms + value_at, mask=dv < DV, other=0.0)
        b = tl.load(terms + key_at, mask=d < D, other=0.0)
        c = tl.load(terms + KEYS + key_at, mask=d < D, other=0.0)
        step = tl.load(terms + VALUES + 2 * KEYS + head)
        state = state * tl.exp(-rate * step) + b[:, None] * (x * step)[None]
        found = tl.sum(state * c[:, None], 0) + x * skip
        to = out_ptr + (row.to(tl.int64) * HEADS + head) * DV + dv
        tl.store(to, found.to(out_ptr.dtype.element_ty), mask=dv < tl.where(now, DV, 0))
        position += 1
        if position == sure:
            tl.store(cell, state, mask=inside)


@triton.jit
def scan_chunks_kernel(  # type: ignore[no-untyped-def]
    terms_ptr, standing_ptr, slots_ptr, lens_ptr, starts_ptr, scores_ptr, num_tokens, num_reqs,
    GROUPS: tl.constexpr, D: tl.constexpr, VALUES: tl.constexpr, FIELDS: tl.constexpr,
    REPLAYED: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, R_PAD: tl.constexpr,
):  # fmt: skip
    """scores [chunks, GROUPS, CHUNK, CHUNK]: c_i . b_j."""
    chunk, group, reqs = tl.program_id(0), tl.program_id(1), tl.arange(0, R_PAD)
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
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    at = terms_ptr + entry[:, None] * FIELDS + VALUES + group * D
    for begin in range(0, D, BLOCK_K):
        d = begin + tl.arange(0, BLOCK_K)
        mask = live[:, None] & (d < D)[None]
        b = tl.load(at + d[None], mask=mask, other=0.0)
        c = tl.load(at + GROUPS * D + d[None], mask=mask, other=0.0)
        scores += tl.dot(c, tl.trans(b), input_precision="ieee")
    to = ((chunk.to(tl.int64) * GROUPS + group) * CHUNK + i[:, None]) * CHUNK + i[None]
    tl.store(scores_ptr + to, scores)


@triton.jit
def scan_chunk_state_kernel(  # type: ignore[no-untyped-def]
    terms_ptr, a_log_ptr, skip_ptr, state_ptr, standing_ptr, slots_ptr, lens_ptr, starts_ptr,
    certain_ptr, scores_ptr, out_ptr, num_tokens,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    VALUES: tl.constexpr, FIELDS: tl.constexpr, REPLAYED: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """As `scan_state_kernel`, but a chunk at a time."""
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
    dv, group = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V), head // (HEADS // GROUPS)
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    skip = tl.load(skip_ptr + head).to(tl.float32)
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
        terms, number = terms_ptr + entry * FIELDS, chunk + (first - stood) // CHUNK
        step = tl.load(terms + VALUES + 2 * GROUPS * D + head, mask=live, other=0.0)
        # Of what is not live, 0: it leaves the state as it is. NaN stays NaN.
        decay = tl.cumsum(tl.where(-rate * step < _FADED, _FADED, -rate * step), 0)
        written = live[:, None] & (dv < DV)[None]
        x = tl.load(terms[:, None] + head * DV + dv[None], mask=written, other=0.0)
        added, at = x * step[:, None], terms[:, None] + VALUES + group * D + d[None]
        mask = live[:, None] & (d < D)[None]
        c = tl.load(at + GROUPS * D, mask=mask, other=0.0)
        out = tl.exp(decay)[:, None] * dot2(c, state, WIDEN) + x * skip
        square = ((number.to(tl.int64) * GROUPS + group) * CHUNK + i[:, None]) * CHUNK + i[None]
        fade = tl.exp(tl.where(i[:, None] >= i[None], decay[:, None] - decay[None], float("-inf")))
        out += dot2(tl.load(scores_ptr + square) * fade, added, WIDEN)
        to = out_ptr + (row[:, None] * HEADS + head) * DV + dv[None]
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=written & now[:, None])
        b = tl.trans(tl.load(at, mask=mask, other=0.0))
        if (first < sure) & (sure <= first + CHUNK):
            kept = state_after(state, b, added, decay, position, sure - 1, WIDEN)
            tl.store(cell, kept, mask=inside)
        state = state_after(state, b, added, decay, position, first + CHUNK - 1, WIDEN)


def chunk_launches(values: dict[str, Any], chunks: int) -> list[Launch]:
    """The launches that replace `scan_state_kernel`.

    Args:
        values: of that kernel's parameters.
        chunks: the result of `count_chunks`, above 0.
    """
    groups, heads, dim, width = (values[name] for name in ("GROUPS", "HEADS", "D", "DV"))
    terms, block = values["terms_ptr"], power_of_two(dim, 16)
    scores = squares(terms, chunks, groups)
    values = values | dict(
        scores_ptr=scores, VALUES=heads * width, FIELDS=terms.shape[1], CHUNK=scores.shape[-1],
        BLOCK_D=block, BLOCK_K=min(block, FEATURES), BLOCK_V=_COLUMNS,
        WIDEN=is_interpreted(scan_chunk_state_kernel),
    )  # fmt: skip
    state_grid = (values["num_reqs"], heads, -(-width // _COLUMNS))
    return [
        Launch(scan_chunks_kernel, (chunks, groups, 1), values, threads=128),
        Launch(scan_chunk_state_kernel, state_grid, values, num_stages=1, choice=_CHOICE),
    ]


@operator(limit=dim_limit("state dim"))
def mamba2_scan(
    rows: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, a_log: Tensor, skip: Tensor,
    dt_bias: Tensor, recurrent: Tensor, history: Tensor, standing: Tensor, state_slots: Tensor,
    seq_lens: Tensor, query_start_loc: Tensor, certain_lens: Tensor, groups: int, *,
    batch_invariant: bool = False,
) -> Plan:  # fmt: skip
    """Three launches, four where rows go in chunks; T > 0. With `batch_invariant` none do, as in
    `gated_delta_rule`.

    Raises:
        BackendError: the state is not contiguous.
    """
    indices = (state_slots, seq_lens, query_start_loc, certain_lens)
    step = Recurrence.of(rows, conv_weight, (recurrent, history, standing), indices)
    dim, fields = recurrent.shape[2], rows.shape[1]
    a_log, skip, bias = (t.contiguous() for t in (a_log, skip, dt_bias))
    terms = rows.new_empty((step.entries, fields), dtype=torch.float32)
    block = min(power_of_two(fields), _FIELDS)
    conv_bias = None if conv_bias is None else conv_bias.contiguous()
    first = dict(conv_bias_ptr=step.conv if conv_bias is None else conv_bias, bias_ptr=bias,
                 terms_ptr=terms, GROUPS=groups, HAS_BIAS=conv_bias is not None,
                 BLOCK=block)  # fmt: skip
    second = step.values | dict(
        terms_ptr=terms, a_log_ptr=a_log, skip_ptr=skip, GROUPS=groups, BLOCK_D=power_of_two(dim),
        BLOCK_V=COLUMNS,
    )  # fmt: skip
    chunks = 0 if batch_invariant else count_chunks(rows.shape[0], step.num_reqs, step.replayed)
    states = [Launch(scan_state_kernel, step.grid, second, threads=128, choice=BY_COLUMNS)]
    if chunks:
        states = chunk_launches(second, chunks)
    terms_launch = step.terms_launch(scan_terms_kernel, -(-fields // block), first)
    return [terms_launch, *states, step.remember_launch()], step.out

"""Mamba-2's selective scan on state rows, in three launches (`recurrence`).

`scan_terms` convolves all positions in parallel, and makes their time steps. `scan_state` goes
through a request's positions one by one. A step of many rows goes through chunks of positions
instead (`scan_chunks`), in four launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.chunks import count_chunks
from mtpc.backends.triton_kernels.launch import Launch, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.recurrence import (
    BY_COLUMNS,
    COLUMNS,
    NO_END,
    Recurrence,
    convolve,
    dim_limit,
    position_of,
    request_of,
    silu,
    softplus,
)
from mtpc.backends.triton_kernels.scan_chunks import chunk_launches

_FIELDS = 256
"""Inputs of one position that a program of `scan_terms_kernel` has, at most."""


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
    (_, heads, dim, value_dim), fields = recurrent.shape, rows.shape[1]
    a_log, skip, bias = (t.contiguous() for t in (a_log, skip, dt_bias))
    terms = rows.new_empty((step.entries, fields), dtype=torch.float32)
    block = min(power_of_two(fields), _FIELDS)
    conv_bias = None if conv_bias is None else conv_bias.contiguous()
    first = dict(conv_bias_ptr=step.conv if conv_bias is None else conv_bias, bias_ptr=bias,
                 terms_ptr=terms, GROUPS=groups, HAS_BIAS=conv_bias is not None,
                 BLOCK=block)  # fmt: skip
    second = {**step.requests, **step.results} | dict(
        terms_ptr=terms, a_log_ptr=a_log, skip_ptr=skip, HEADS=heads, D=dim, DV=value_dim,
        REPLAYED=step.replayed, GROUPS=groups, BLOCK_D=power_of_two(dim), BLOCK_V=COLUMNS,
    )  # fmt: skip
    chunks = 0 if batch_invariant else count_chunks(rows.shape[0], step.num_reqs, step.replayed)
    states = [Launch(scan_state_kernel, step.grid, second, threads=128, choice=BY_COLUMNS)]
    if chunks:
        states = chunk_launches(second, chunks, step.num_reqs)
    terms_launch = step.terms_launch(scan_terms_kernel, -(-fields // block), first)
    return [terms_launch, *states, step.remember_launch()], step.out

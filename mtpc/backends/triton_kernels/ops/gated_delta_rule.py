"""The gated delta rule on state rows, in three launches (`recurrence`).

`delta_terms` convolves and norms all positions in parallel. `delta_state` goes through a request's
positions one by one. A step of many rows goes through chunks of positions instead
(`delta_chunks`), in four launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.chunks import count_chunks
from mtpc.backends.triton_kernels.delta_chunks import chunk_launches, log_decay, round_beta
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
)

_EPSILON: tl.constexpr = tl.constexpr(1e-6)
"""As in `mtpc.ops.gated_delta`."""


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
    second = step.inputs | step.results | step.sizes | dict(
        terms_ptr=terms, a_log_ptr=a_log.contiguous(), bias_ptr=dt_bias.contiguous(),
        GROUP=heads // key_heads, BLOCK_D=power_of_two(dim), BLOCK_V=COLUMNS,
    )  # fmt: skip
    chunks = 0 if batch_invariant else count_chunks(rows.shape[0], step.num_reqs, step.replayed)
    states = [Launch(delta_state_kernel, step.grid, second, threads=128, choice=BY_COLUMNS)]
    if chunks:
        states = chunk_launches(second, chunks, step.num_reqs)
    terms_launch = step.terms_launch(delta_terms_kernel, 2 * key_heads + heads, first)
    return [terms_launch, *states, step.remember_launch()], step.out

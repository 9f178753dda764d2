"""The gated delta rule on state rows, in three launches.

`delta_terms` convolves and norms all positions in parallel: the step's rows, and accepted drafts of
the step before, whose inputs are in `history`. `delta_state` goes through a request's positions one
by one. A program has some columns of one value head's state in registers, and stores them once,
after the certain rows. `remember_rows` then updates the history that the others read. A step of
many rows goes through chunks of positions instead (`delta_chunks`), in four launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.delta_chunks import (
    chunk_launches,
    count_chunks,
    log_decay,
    round_beta,
)
from mtpc.backends.triton_kernels.launch import Change, Choice, Launch, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.errors import BackendError

_COLUMNS, _REMEMBERED = 32, 1024
"""Columns of the state in a program; inputs that a program of `remember_rows_kernel` copies."""
_MAX_KEY_DIM = 256
"""The most rows of a column of the state, which a program has in registers."""
_CHOICE = Choice(
    (Change(factors={"BLOCK_V": 0.5}), Change(threads=256, factors={"BLOCK_V": 2})),
    {"BLOCK_V": (2, "DV")},
)
_EPSILON: tl.constexpr = tl.constexpr(1e-6)
"""As in `mtpc.ops.gated_delta`."""


@triton.jit
def _silu(x, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounded before and after, as if the convolution were a module of its own."""
    x = x.to(DTYPE).to(tl.float32)
    return (x / (1 + tl.exp(-x))).to(DTYPE).to(tl.float32)


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
    FIELDS: tl.constexpr = KEYS + HEADS * (DV + 2)
    ends = tl.load(starts_ptr + 1 + reqs, mask=reqs < num_reqs, other=0)
    owner = tl.sum(((reqs < num_reqs) & (ends <= entry)).to(tl.int32))
    is_row, replay = entry < num_tokens, entry - num_tokens
    request = tl.where(is_row, owner, replay // REPLAYED)
    length = tl.load(lens_ptr + request, mask=request < num_reqs, other=0).to(tl.int32)
    if length <= 0:
        return
    start = tl.load(starts_ptr + request).to(tl.int32)
    committed = length - tl.load(starts_ptr + request + 1).to(tl.int32) + start
    slot = tl.load(slots_ptr + request).to(tl.int64)
    stood = tl.load(standing_ptr + slot, mask=committed > 0, other=0).to(tl.int32)
    position = tl.where(is_row, committed + entry - start, stood + replay % REPLAYED)
    if is_row | (position < committed):
        lane, is_value = tl.arange(0, BLOCK), head >= 2 * KEY_HEADS
        first = tl.where(is_value, KEYS + (head - 2 * KEY_HEADS) * DV, head * D)
        inside = lane < tl.where(is_value, DV, D)
        tap, channel = tl.arange(0, W_PAD)[:, None], (first + lane)[None]
        at, mask = position - WIDTH + 1 + tap, (tap < WIDTH) & inside[None]
        new = rows_ptr + (start + at - committed).to(tl.int64) * FIELDS + channel
        old = history_ptr + (slot * KEPT + at % KEPT) * FIELDS + channel
        x = tl.load(new, mask=mask & (at >= committed), other=0.0).to(tl.float32)
        older = mask & (at >= 0) & (at < committed)
        x += tl.load(old, mask=older, other=0.0).to(tl.float32)
        w = tl.load(conv_ptr + channel * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
        x = _silu(tl.sum(x * w, 0), rows_ptr.dtype.element_ty)
        unit = x * tl.rsqrt(tl.sum(x * x, 0) + _EPSILON) * tl.where(head < KEY_HEADS, ROOT, 1.0)
        to = terms_ptr + entry.to(tl.int64) * (FIELDS - 2 * HEADS) + first + lane
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
def remember_rows_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, history_ptr, standing_ptr, slots_ptr, lens_ptr, starts_ptr, certain_ptr, out_ptr,
    num_reqs, num_tokens,
    KEPT: tl.constexpr, FIELDS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
    R_PAD: tl.constexpr,
):  # fmt: skip
    """Programs 0 to T - 1 copy their row to history, or zero a row of out that has no request; the
    next R programs set standing."""
    token, reqs = tl.program_id(0), tl.arange(0, R_PAD)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ends = tl.load(starts_ptr + 1 + reqs, mask=reqs < num_reqs, other=0)
    owner = tl.sum(((reqs < num_reqs) & (ends <= token)).to(tl.int32))
    is_row = token < num_tokens
    request = tl.where(is_row, owner, token - num_tokens)
    length = tl.load(lens_ptr + request, mask=request < num_reqs, other=0).to(tl.int32)
    if length > 0:
        start = tl.load(starts_ptr + request).to(tl.int32)
        committed = length - tl.load(starts_ptr + request + 1).to(tl.int32) + start
        slot = tl.load(slots_ptr + request).to(tl.int64)
        position = committed + token - start
        if is_row & (position >= length - KEPT):
            row = tl.load(rows_ptr + token.to(tl.int64) * FIELDS + column, mask=column < FIELDS)
            to = history_ptr + (slot * KEPT + position % KEPT) * FIELDS + column
            tl.store(to, row, mask=column < FIELDS)
        sure = tl.minimum(committed + tl.load(certain_ptr + request).to(tl.int32), length)
        first = (is_row == 0) & (tl.program_id(1) == 0)
        tl.store(standing_ptr + slot, sure.to(standing_ptr.dtype.element_ty), mask=first)
    else:
        zeros = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
        to = out_ptr + token.to(tl.int64) * OUT + column
        tl.store(to, zeros, mask=column < tl.where(is_row, OUT, 0))


def _limit(call: Mapping[str, Any]) -> str | None:
    dim = call["recurrent"].shape[2]
    return f"key head dim {dim}; it takes up to {_MAX_KEY_DIM}" if dim > _MAX_KEY_DIM else None


@operator(limit=_limit)
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
    for tensor in (recurrent, history, standing):
        if not tensor.is_contiguous():
            raise BackendError(
                f"recurrent state with strides {tuple(tensor.stride())}; expected contiguous"
            )
    out = rows.new_empty((rows.shape[0], recurrent.shape[1], recurrent.shape[3]))
    rows, conv = rows.contiguous(), conv_weight.contiguous()
    a_log, bias = a_log.contiguous(), dt_bias.contiguous()
    indices = (state_slots, seq_lens, query_start_loc, certain_lens)
    slots, lens, starts, certain = (t.contiguous() for t in indices)
    heads, dim, value_dim = recurrent.shape[1:]
    (num_tokens, fields), num_reqs = rows.shape, slots.shape[0]
    width, kept = conv.shape[1], history.shape[1]
    key_heads = (conv.shape[0] - heads * value_dim) // (2 * dim)
    replayed = max(0, kept - width + 1)
    entries = num_tokens + num_reqs * replayed
    terms = rows.new_empty((entries, conv.shape[0]), dtype=torch.float32)
    held = dict(rows_ptr=rows, history_ptr=history, standing_ptr=standing, slots_ptr=slots,
                lens_ptr=lens, starts_ptr=starts, num_tokens=num_tokens)  # fmt: skip
    sizes = dict(HEADS=heads, D=dim, DV=value_dim, KEPT=kept, REPLAYED=replayed)
    first = dict(
        sizes | dict(REPLAYED=max(1, replayed)), KEY_HEADS=key_heads, WIDTH=width, ROOT=dim**-0.5,
        BLOCK=power_of_two(max(dim, value_dim)), R_PAD=power_of_two(num_reqs),
        W_PAD=power_of_two(width),
    )  # fmt: skip
    second = dict(sizes, GROUP=heads // key_heads, BLOCK_D=power_of_two(dim), BLOCK_V=_COLUMNS)
    block = min(power_of_two(fields), _REMEMBERED)
    third = dict(KEPT=kept, FIELDS=fields, OUT=heads * value_dim, BLOCK=block,
                 R_PAD=power_of_two(num_reqs))  # fmt: skip
    stepped = dict(held, terms_ptr=terms, a_log_ptr=a_log, bias_ptr=bias, state_ptr=recurrent,
                   certain_ptr=certain, out_ptr=out)  # fmt: skip
    chunks = 0 if batch_invariant else count_chunks(num_tokens, num_reqs, replayed)
    states = [Launch(delta_state_kernel, (num_reqs, heads, -(-value_dim // _COLUMNS)), stepped,
                     second, threads=128, choice=_CHOICE)]  # fmt: skip
    if chunks:
        states = chunk_launches(stepped, second, chunks, num_reqs)
    launches = [
        Launch(delta_terms_kernel, (entries, 2 * key_heads + heads, 1),
               dict(held, conv_ptr=conv, terms_ptr=terms, num_reqs=num_reqs), first, threads=64),
        *states,
        Launch(remember_rows_kernel, (num_tokens + num_reqs, -(-fields // block), 1),
               dict(held, certain_ptr=certain, out_ptr=out, num_reqs=num_reqs), third, threads=128),
    ]  # fmt: skip
    return launches, out

"""The gated delta rule on state rows: three launches of `recurrence`, four in chunks.

`delta_terms` convolves and norms all positions in parallel, and makes their gates.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.recurrence import (
    NO_END,
    Recurrence,
    convolve,
    dim_limit,
    position_of,
    request_of,
    silu,
    softplus,
    store_gate,
)

_EPSILON: tl.constexpr = tl.constexpr(1e-6)
"""As in `mtpc.ops.gated_delta`."""


@triton.jit
def delta_terms_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, conv_ptr, a_log_ptr, bias_ptr, history_ptr, standing_ptr, slots_ptr, lens_ptr,
    starts_ptr, terms_ptr, num_reqs, num_tokens,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    WIDTH: tl.constexpr, KEPT: tl.constexpr, REPLAYED: tl.constexpr, ROOT: tl.constexpr,
    BLOCK: tl.constexpr, R_PAD: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """terms [T + R REPLAYED, C + 2 HEADS]: unit queries and keys, values, beta, gates; float32.

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
        terms = terms_ptr + entry.to(tl.int64) * (CHANNELS + 2 * HEADS)
        tl.store(terms + first + lane, tl.where(is_value, x, unit), mask=inside)
        # Two masked loads: Triton 3.6 cannot compile a load from a selected pointer for AMD.
        of, is_new = head - 2 * KEY_HEADS, is_value & (position >= committed)
        is_old = is_value & (position < committed)
        new = rows_ptr + (start + position - committed).to(tl.int64) * (CHANNELS + 2 * HEADS)
        old = history_ptr + (slot * KEPT + position % KEPT) * (CHANNELS + 2 * HEADS)
        new, old = new + CHANNELS + of, old + CHANNELS + of
        b = tl.load(new, mask=is_new, other=0.0) + tl.load(old, mask=is_old, other=0.0)
        a = tl.load(new + HEADS, mask=is_new, other=0.0)
        a = (a + tl.load(old + HEADS, mask=is_old, other=0.0)).to(tl.float32)
        beta = (1 / (1 + tl.exp(-b.to(tl.float32)))).to(rows_ptr.dtype.element_ty).to(tl.float32)
        tl.store(terms + CHANNELS + of, beta, mask=is_value)
        rate = tl.exp(tl.load(a_log_ptr + of, mask=is_value, other=0.0).to(tl.float32))
        bias = tl.load(bias_ptr + of, mask=is_value, other=0.0).to(tl.float32)
        store_gate(terms + CHANNELS + HEADS + of, rate, softplus(a + bias), is_value)


@operator(limit=dim_limit("key head dim"))
def gated_delta_rule(
    rows: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor, recurrent: Tensor,
    history: Tensor, standing: Tensor, state_slots: Tensor, seq_lens: Tensor,
    query_start_loc: Tensor, certain_lens: Tensor, *, batch_invariant: bool = False,
) -> Plan:  # fmt: skip
    """Three launches, four where rows go in chunks; T > 0.

    Raises:
        BackendError: the state is not contiguous.
    """
    indices = (state_slots, seq_lens, query_start_loc, certain_lens)
    step = Recurrence.of(rows, conv_weight, (recurrent, history, standing), indices)
    (_, heads, dim, value_dim), channels = recurrent.shape, conv_weight.shape[0]
    key_heads = (channels - heads * value_dim) // (2 * dim)
    keys, programs = key_heads * dim, 2 * key_heads + heads
    given = dict(a_log_ptr=a_log.contiguous(), bias_ptr=dt_bias.contiguous())
    sizes = dict(KEY_HEADS=key_heads, ROOT=dim**-0.5, BLOCK=power_of_two(max(dim, value_dim)))
    places = dict(READS=0, WRITES=keys, VALUES=2 * keys, GROUP=heads // key_heads)
    launches = [
        step.terms_launch(delta_terms_kernel, programs, given, sizes),
        *step.state_launches(places, None, batch_invariant),
        step.remember_launch(),
    ]
    return launches, step.out

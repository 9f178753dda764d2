"""Mamba-2's selective scan on state rows: three launches of `recurrence`, four in chunks.

`scan_terms` convolves all positions in parallel, and makes their time steps and gates.
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

_FIELDS = 256
"""Inputs of one position that a program of `scan_terms_kernel` has, at most."""


@triton.jit
def scan_terms_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, conv_ptr, conv_bias_ptr, a_log_ptr, bias_ptr, history_ptr, standing_ptr, slots_ptr,
    lens_ptr, starts_ptr, terms_ptr, num_reqs, num_tokens,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, KEPT: tl.constexpr, REPLAYED: tl.constexpr,
    BLOCK: tl.constexpr, R_PAD: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """terms [T + R REPLAYED, C + 2 HEADS]: x, b, c, time steps and gates; float32.

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
        of, is_step = field - CHANNELS, inside & (field >= CHANNELS)
        bias = tl.load(bias_ptr + of, mask=is_step, other=0.0).to(tl.float32)
        mixed, step = silu(x + shift, rows_ptr.dtype.element_ty), softplus(x + bias)
        to = terms_ptr + entry.to(tl.int64) * (FIELDS + HEADS) + field
        tl.store(to, tl.where(is_mixed, mixed, step), mask=inside)
        rate = tl.exp(tl.load(a_log_ptr + of, mask=is_step, other=0.0).to(tl.float32))
        store_gate(to + HEADS, rate, step, is_step)


@operator(limit=dim_limit("state dim"))
def mamba2_scan(
    rows: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, a_log: Tensor, skip: Tensor,
    dt_bias: Tensor, recurrent: Tensor, history: Tensor, standing: Tensor, state_slots: Tensor,
    seq_lens: Tensor, query_start_loc: Tensor, certain_lens: Tensor, groups: int, *,
    batch_invariant: bool = False,
) -> Plan:  # fmt: skip
    """Three launches, four where rows go in chunks; T > 0.

    Raises:
        BackendError: the state is not contiguous.
    """
    indices = (state_slots, seq_lens, query_start_loc, certain_lens)
    step = Recurrence.of(rows, conv_weight, (recurrent, history, standing), indices)
    (_, heads, dim, value_dim), fields = recurrent.shape, rows.shape[1]
    block = min(power_of_two(fields), _FIELDS)
    conv_bias = step.conv if conv_bias is None else conv_bias.contiguous()
    given = dict(conv_bias_ptr=conv_bias, a_log_ptr=a_log.contiguous(),
                 bias_ptr=dt_bias.contiguous())  # fmt: skip
    sizes = dict(GROUPS=groups, HAS_BIAS=conv_bias is not step.conv, BLOCK=block)
    values, keys = heads * value_dim, groups * dim
    places = dict(READS=values + keys, WRITES=values, VALUES=0, GROUP=heads // groups)
    launches = [
        step.terms_launch(scan_terms_kernel, -(-fields // block), given, sizes),
        *step.state_launches(places, skip.contiguous(), batch_invariant),
        step.remember_launch(),
    ]
    return launches, step.out

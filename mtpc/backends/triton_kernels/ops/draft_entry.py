"""Two norms side by side: a program has a few rows of one of them; see `norms`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import await_launches, flat_rows
from mtpc.backends.triton_kernels.norms import block_of, norm_limit, normalise, row_launch
from mtpc.backends.triton_kernels.operator import Plan, operator


@triton.jit
def draft_entry_kernel(  # type: ignore[no-untyped-def]
    left_ptr, left_weight_ptr, right_ptr, right_weight_ptr, out_ptr, count, left_row, right_row,
    N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr,
    EPSILON: tl.constexpr, PLUS_ONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """left, right [count, N] with any row stride, a program of one of them; out [count, 2N]."""
    await_launches(EARLY)
    row, i, mask = block_of(count, N, N_PAD, BLOCK)
    half = tl.program_id(1)
    if half == 0:
        weight = tl.load(left_weight_ptr + i, mask=i < N, other=0.0)
        x = tl.load(left_ptr + row * left_row + i, mask=mask, other=0.0)
    else:
        weight = tl.load(right_weight_ptr + i, mask=i < N, other=0.0)
        x = tl.load(right_ptr + row * right_row + i, mask=mask, other=0.0)
    normed = normalise(x, weight, N, EPSILON, PLUS_ONE)
    tl.store(out_ptr + row * (2 * N) + half * N + i, normed, mask=mask)


@operator(limit=norm_limit)
def draft_entry(
    left: Tensor, left_weight: Tensor, right: Tensor, right_weight: Tensor, epsilon: float,
    plus_one: bool,
) -> Plan:  # fmt: skip
    """One launch."""
    out = left.new_empty((*left.shape[:-1], 2 * left.shape[-1]))
    first, second = flat_rows(left), flat_rows(right)
    values = dict(
        left_ptr=first, left_weight_ptr=left_weight.contiguous(), right_ptr=second,
        right_weight_ptr=right_weight.contiguous(), out_ptr=out, left_row=first.stride(0),
        right_row=second.stride(0), EPSILON=float(epsilon), PLUS_ONE=plus_one,
    )  # fmt: skip
    return [row_launch(draft_entry_kernel, first, values, halves=2)], out

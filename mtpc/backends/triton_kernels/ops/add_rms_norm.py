"""The residual sum and its root mean square norm: a program has a few rows; see `norms`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import await_launches, flat_rows
from mtpc.backends.triton_kernels.norms import block_of, norm_limit, normalise, row_launch
from mtpc.backends.triton_kernels.operator import Plan, operator


@triton.jit
def add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, added_ptr, weight_ptr, total_ptr, out_ptr, count, x_row, added_row,
    N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr,
    EPSILON: tl.constexpr, PLUS_ONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x, added [count, N] with any row stride; total, out [count, N]."""
    await_launches(EARLY)
    row, i, mask = block_of(count, N, N_PAD, BLOCK)
    weight = tl.load(weight_ptr + i, mask=i < N, other=0.0)
    x = tl.load(x_ptr + row * x_row + i, mask=mask, other=0.0)
    added = tl.load(added_ptr + row * added_row + i, mask=mask, other=0.0)
    # The norm is of the rounded sum.
    total = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + row * N + i, total, mask=mask)
    tl.store(out_ptr + row * N + i, normalise(total, weight, N, EPSILON, PLUS_ONE), mask=mask)


@operator(limit=norm_limit)
def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, epsilon: float, plus_one: bool) -> Plan:
    """One launch."""
    total, normed = out = (x.new_empty(x.shape), x.new_empty(x.shape))
    left, right = flat_rows(x), flat_rows(added)
    values = dict(
        x_ptr=left, added_ptr=right, weight_ptr=weight.contiguous(), total_ptr=total,
        out_ptr=normed, x_row=left.stride(0), added_row=right.stride(0),
        EPSILON=float(epsilon), PLUS_ONE=plus_one,
    )  # fmt: skip
    return [row_launch(add_rms_norm_kernel, left, values)], out

"""Root mean square norm: a program has a few rows; see `norms`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import await_launches, flat_rows
from mtpc.backends.triton_kernels.norms import block_of, norm_limit, normalise, row_launch
from mtpc.backends.triton_kernels.operator import Plan, operator


@triton.jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, count, x_row,
    N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr,
    EPSILON: tl.constexpr, PLUS_ONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x [count, N] with any row stride, out [count, N]."""
    await_launches(EARLY)
    row, i, mask = block_of(count, N, N_PAD, BLOCK)
    weight = tl.load(weight_ptr + i, mask=i < N, other=0.0)
    x = tl.load(x_ptr + row * x_row + i, mask=mask, other=0.0)
    tl.store(out_ptr + row * N + i, normalise(x, weight, N, EPSILON, PLUS_ONE), mask=mask)


@operator(limit=norm_limit)
def rms_norm(x: Tensor, weight: Tensor, epsilon: float, plus_one: bool) -> Plan:
    """One launch."""
    out, rows = x.new_empty(x.shape), flat_rows(x)
    values = dict(
        x_ptr=rows, weight_ptr=weight.contiguous(), out_ptr=out, x_row=rows.stride(0),
        EPSILON=float(epsilon), PLUS_ONE=plus_one,
    )  # fmt: skip
    return [row_launch(rms_norm_kernel, rows, values)], out

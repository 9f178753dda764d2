"""Sums of rows: a program has a few whole rows; their length says how many."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import flat_rows
from mtpc.backends.triton_kernels.norms import block_of, norm_limit, row_launch
from mtpc.backends.triton_kernels.operator import Plan, operator


@triton.jit(do_not_specialize=["count"])
def row_sum_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, count, x_row, N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr
):
    """x [count, N] with any row stride, out float32 [count]."""
    row, i, mask = block_of(count, N, N_PAD, BLOCK)
    x = tl.load(x_ptr + row * x_row + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(x, 1)[:, None], mask=row < count)


@operator(limit=norm_limit)
def row_sum(x: Tensor) -> Plan:
    """One launch."""
    out, rows = x.new_empty(x.shape[:-1], dtype=torch.float32), flat_rows(x)
    values = dict(x_ptr=rows, out_ptr=out, x_row=rows.stride(0))
    return [row_launch(row_sum_kernel, rows, values)], out

"""Root mean square norms, alone, of a residual sum and of two halves; sums of rows; and SwiGLU.

A program has a whole row, or a few where rows are short, so each row is read once and its sum does
not depend on other rows. Results are rounded where the reference rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, await_launches, flat_rows, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator

_ELEMENTS = 1024
"""Elements of a program whose rows are shorter than this: 8 heads of 128."""
_A_THREAD = 16
"""Elements of a thread, in programs of fewer than `_MOST_THREADS` threads."""
_MOST_THREADS = 512
_BLOCK = 1024
"""Elements of a program of `silu_and_mul`: of one row's gate, and the same of its up."""
_MAX_WIDTH = 16_384
"""The most elements of a row, which is normed in registers: 32 per thread."""


@triton.jit
def block_of(  # type: ignore[no-untyped-def]
    count, N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr
):
    """This program's rows [BLOCK, 1], columns [1, N_PAD], and the mask of those that exist."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    i = tl.arange(0, N_PAD)[None]
    return row, i, (row < count) & (i < N)


@triton.jit
def normalise(  # type: ignore[no-untyped-def]
    x, weight, N: tl.constexpr, EPSILON: tl.constexpr, PLUS_ONE: tl.constexpr
):
    """x [rows, N_PAD], zeros from N on, by its root mean square and weight [1, N_PAD]. Takes loaded
    values: see `tiles.locate`."""
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / N + EPSILON)
    normed = wide * inverse[:, None]
    if PLUS_ONE:
        scaled = normed * (1.0 + weight.to(tl.float32))
    else:
        scaled = normed.to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    return scaled.to(x.dtype)


def norm_limit(call: Mapping[str, Any]) -> str | None:
    """Why a row does not fit into a program's registers; None where it does."""
    width = next(iter(call.values())).shape[-1]
    return f"rows of {width}; it takes up to {_MAX_WIDTH}" if width > _MAX_WIDTH else None


def row_launch(kernel: Any, x: Tensor, values: dict[str, Any], halves: int = 1) -> Launch:
    """A launch whose programs have whole rows of x [rows, N]. Rows of a program depend on N only,
    so a row's sum has the same bits whatever other rows there are.

    Args:
        kernel: takes `values`, `count`, N, N_PAD and BLOCK.
        x: the rows.
        values: of its parameters but those four.
        halves: programs along the grid's second axis.
    """
    count, width = x.shape
    padded = power_of_two(width)
    block = max(1, _ELEMENTS // padded)
    sizes = dict(count=count, N=width, N_PAD=padded, BLOCK=block)
    threads = min(block * padded // _A_THREAD, _MOST_THREADS)
    return Launch(kernel, (-(-count // block), halves, 1), values | sizes, threads=threads)


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


@triton.jit
def silu_and_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr, out_ptr, gate_up_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """gate_up [rows, 2 WIDTH] with any row stride, gate first; out [rows, WIDTH]."""
    await_launches(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, mask = gate_up_ptr + row * gate_up_row + i, i < WIDTH
    gate = tl.load(at, mask=mask, other=0.0)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    active = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * WIDTH + i, (active.to(tl.float32) * up).to(gate.dtype), mask=mask)


@operator()
def silu_and_mul(gate_up: Tensor) -> Plan:
    """One launch."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    rows = flat_rows(gate_up)
    block = min(power_of_two(width), _BLOCK)
    values = dict(
        gate_up_ptr=rows, out_ptr=out, gate_up_row=rows.stride(0), WIDTH=width, BLOCK=block
    )
    grid = (rows.shape[0], -(-width // block), 1)
    return [Launch(silu_and_mul_kernel, grid, values, threads=128)], out

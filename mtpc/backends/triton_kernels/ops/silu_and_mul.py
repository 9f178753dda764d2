"""SwiGLU's activation: a program has a block of one row's gate and the same block of its up."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, await_launches, flat_rows, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator

_BLOCK = 1024


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

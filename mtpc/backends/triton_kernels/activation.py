"""SwiGLU's activation: a program has a block of one row's gate, and the same of its up."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, flat_rows, power_of_two

_BLOCK = 1024


@triton.jit
def silu_and_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr, out_ptr, gate_up_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """gate_up [rows, 2 WIDTH], gate first, of any distance between rows; out [rows, WIDTH]."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, mask = gate_up_ptr + row * gate_up_row + i, i < WIDTH
    gate = tl.load(at, mask=mask, other=0.0)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    active = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * WIDTH + i, (active.to(tl.float32) * up).to(gate.dtype), mask=mask)


def silu_and_mul_launches(gate_up: Tensor, out: Tensor) -> list[Launch]:
    """Launches of `mtpc::silu_and_mul`.

    Args:
        gate_up: [..., 2I], at least one row.
        out: [..., I], contiguous.
    """
    gate_up, width = flat_rows(gate_up), out.shape[-1]
    block = min(power_of_two(width), _BLOCK)
    arguments = dict(gate_up_ptr=gate_up, out_ptr=out, gate_up_row=gate_up.stride(0))
    constants = dict(WIDTH=width, BLOCK=block)
    grid = (gate_up.shape[0], -(-width // block), 1)
    return [Launch(silu_and_mul_kernel, grid, arguments, constants, threads=128)]

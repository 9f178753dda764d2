"""The largest number of a row, in two launches: of each of its blocks, then of these."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, await_launches, flat_rows, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.order import LEAST, first_largest, order_of

_BLOCK = 1024
"""Numbers of a program: a row of 100,000 logits then has a program for most processors of a GPU."""


@triton.jit
def block_max_kernel(  # type: ignore[no-untyped-def]
    x_ptr, peaks_ptr, firsts_ptr, x_row,
    N: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x [rows, N] with any row stride; peaks, of x's dtype, and firsts int32, [rows, BLOCKS]."""
    await_launches(EARLY)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + i, mask=i < N, other=0.0)
    _, first = first_largest(tl.where(i < N, order_of(x), LEAST), i, N)
    at = row * BLOCKS + block
    tl.store(firsts_ptr + at, first)
    tl.store(peaks_ptr + at + 0 * i, x, mask=i == first)


@triton.jit
def row_max_kernel(  # type: ignore[no-untyped-def]
    peaks_ptr, firsts_ptr, values_ptr, places_ptr,
    N: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """values, of the dtype of peaks, and places int64, [rows]."""
    await_launches(EARLY)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS_PAD)
    at, there = row * BLOCKS + block, block < BLOCKS
    peak = tl.load(peaks_ptr + at, mask=there, other=0.0)
    place = tl.load(firsts_ptr + at, mask=there, other=N)
    _, first = first_largest(tl.where(there, order_of(peak), LEAST), place, N)
    tl.store(places_ptr + row, first.to(tl.int64))
    tl.store(values_ptr + row + 0 * block, peak, mask=place == first)


@operator()
def row_max(x: Tensor) -> Plan:
    """Blocks, then rows."""
    shape, width = x.shape[:-1], x.shape[-1]
    values, places = x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
    rows, blocks = flat_rows(x), -(-width // _BLOCK)
    peaks = x.new_empty((rows.shape[0], blocks))
    firsts = x.new_empty((rows.shape[0], blocks), dtype=torch.int32)
    parts = dict(peaks_ptr=peaks, firsts_ptr=firsts, N=width, BLOCKS=blocks)
    of_blocks = dict(parts, x_ptr=rows, x_row=rows.stride(0), BLOCK=_BLOCK)
    of_rows = dict(parts, values_ptr=values, places_ptr=places, BLOCKS_PAD=power_of_two(blocks, 64))
    launches = [
        Launch(block_max_kernel, (len(rows), blocks, 1), of_blocks, threads=128),
        Launch(row_max_kernel, (len(rows), 1, 1), of_rows, threads=64),
    ]
    return launches, (values, places)

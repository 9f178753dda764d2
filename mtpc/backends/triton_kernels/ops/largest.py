"""The largest numbers of rows, by integers in the order of torch's `max` and `topk`: the largest of
these is found faster.

A program of one warp finds a router's choice in a row, one number after the other. The largest of
a row of logits takes two launches: of each of its blocks, then of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.gpu.ops.largest import TOPK_COUNT, TOPK_WIDTH
from mtpc.backends.triton_kernels.launch import Launch, await_launches, flat_rows, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.layout import dtype_name

LEAST: tl.constexpr = tl.constexpr(-(2**31))
"""Below the order of every number."""
_NAN: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def order_of(x):  # type: ignore[no-untyped-def]
    """int32 in the order of x, of any 16 or 32 bits: equal for equal numbers, as -0.0 and 0.0 are,
    and greatest for NaN."""
    wide = x.to(tl.float32)
    bits = tl.where(wide == 0, 0.0, wide).to(tl.int32, bitcast=True)
    return tl.where(wide != wide, _NAN, bits ^ ((bits >> 31) & _NAN))


@triton.jit
def number_of(order):  # type: ignore[no-untyped-def]
    """A float32 number of this order."""
    return (order ^ ((order >> 31) & _NAN)).to(tl.float32, bitcast=True)


@triton.jit
def first_largest(order, place, END: tl.constexpr):  # type: ignore[no-untyped-def]
    """The greatest of `order`, and the least place, below END, that has it."""
    best = tl.max(order, 0)
    return best, tl.min(tl.where(order == best, place, END), 0)


WARP = 32
"""Threads of a program: one warp compares the parts of a row without waiting for another."""


@triton.jit
def topk_kernel(  # type: ignore[no-untyped-def]
    x_ptr, values_ptr, places_ptr, x_row,
    N: tl.constexpr, N_PAD: tl.constexpr, COUNT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x [rows, N] with any row stride; values and places int64 [rows, COUNT]."""
    await_launches(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N_PAD)
    x = tl.load(x_ptr + row * x_row + i, mask=i < N, other=0.0)
    order = tl.where(i < N, order_of(x), LEAST)
    store_largest(x, order, i, values_ptr + row * COUNT, places_ptr + row * COUNT, N, COUNT)


@triton.jit
def store_largest(  # type: ignore[no-untyped-def]
    x, order, i, values_ptr, places_ptr, N: tl.constexpr, COUNT: tl.constexpr
):
    """The COUNT largest of a row of N numbers, of indices i: their values and places."""
    for k in tl.static_range(COUNT):
        _, place = first_largest(order, i, N)
        tl.store(places_ptr + k, place.to(tl.int64))
        tl.store(values_ptr + k + 0 * i, x, mask=i == place)
        order = tl.where(i == place, LEAST, order)


def topk_limit(call: Mapping[str, Any]) -> str | None:
    """Why a row is too wide, or a choice too long; None where neither is."""
    width, count = call["x"].shape[-1], call["count"]
    if width > TOPK_WIDTH or count > TOPK_COUNT:
        return f"{count} of {width}; it takes up to {TOPK_COUNT} of {TOPK_WIDTH}"
    return None


def choice_plan(kernel: Any, x: Tensor, count: int, constants: dict[str, int]) -> Plan:
    """One launch of a kernel as in this file, with a program for each row of x [..., N].

    Args:
        kernel: takes x, values, places and the row stride.
        x: the numbers to choose from.
        count: how many are chosen.
        constants: the kernel's constants beside N and COUNT.
    """
    shape, width = (*x.shape[:-1], count), x.shape[-1]
    values, places = x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
    rows = flat_rows(x)
    given = dict(x_ptr=rows, values_ptr=values, places_ptr=places, x_row=rows.stride(0))
    given |= dict(N=width, COUNT=count) | constants
    return [Launch(kernel, (rows.shape[0], 1, 1), given, threads=WARP)], (values, places)


@operator(limit=topk_limit)
def topk(x: Tensor, count: int) -> Plan:
    """One launch."""
    return choice_plan(topk_kernel, x, count, dict(N_PAD=power_of_two(x.shape[-1], 2 * WARP)))


@triton.jit
def group_topk_kernel(  # type: ignore[no-untyped-def]
    x_ptr, values_ptr, places_ptr, x_row,
    N: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, SIZE_PAD: tl.constexpr,
    KEPT: tl.constexpr, COUNT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `topk_kernel`, of GROUPS groups."""
    await_launches(EARLY)
    row = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = N // GROUPS
    group, place = tl.arange(0, GROUPS_PAD), tl.arange(0, SIZE_PAD)[None]
    there = (group[:, None] < GROUPS) & (place < size)
    i = tl.where(there, group[:, None] * size + place, N)
    x = tl.load(x_ptr + row * x_row + i, mask=there, other=0.0)
    order = tl.where(there, order_of(x), LEAST)
    best = tl.max(order, 1)
    first = tl.min(tl.where(order == best[:, None], i, N), 1)
    second = tl.max(tl.where(i == first[:, None], LEAST, order), 1)
    total = tl.where(group < GROUPS, order_of(number_of(best) + number_of(second)), LEAST)
    for _ in tl.static_range(KEPT):
        _, chosen = first_largest(total, group, GROUPS)
        total = tl.where(group == chosen, LEAST, total)
    x = tl.where((total == LEAST)[:, None], x, float("-inf"))
    order = tl.where(there, order_of(x), LEAST)
    flat: tl.constexpr = GROUPS_PAD * SIZE_PAD
    x, order, i = tl.reshape(x, [flat]), tl.reshape(order, [flat]), tl.reshape(i, [flat])
    store_largest(x, order, i, values_ptr + row * COUNT, places_ptr + row * COUNT, N, COUNT)


def _group_limit(call: Mapping[str, Any]) -> str | None:
    x, groups = call["x"], call["groups"]
    if x.dtype != torch.float32:
        return f"{dtype_name(x.dtype)}; it takes float32"
    size = x.shape[-1] // groups
    if power_of_two(groups) * power_of_two(size) > TOPK_WIDTH:
        return f"{groups} groups of {size}; rounded to powers of two, it takes up to {TOPK_WIDTH}"
    return topk_limit(call)


@operator(limit=_group_limit)
def group_topk(x: Tensor, count: int, groups: int, kept: int) -> Plan:
    """One launch."""
    pads = dict(GROUPS_PAD=power_of_two(groups), SIZE_PAD=power_of_two(x.shape[-1] // groups))
    return choice_plan(group_topk_kernel, x, count, dict(GROUPS=groups, KEPT=kept) | pads)


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

"""The largest numbers of a row, one after the other: a program, of one warp, has one row."""

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
from mtpc.backends.triton_kernels.order import LEAST, first_largest, order_of

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

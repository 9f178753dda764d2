"""The largest numbers of a row, one after the other: a program, of one warp, has one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, flat_rows, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.order import LEAST, first_largest, order_of
from mtpc.ops.largest import TOPK_COUNT, TOPK_WIDTH

_WARP = 32
"""Threads: a warp's parts of a row are compared without its waiting for another."""


@triton.jit
def topk_kernel(  # type: ignore[no-untyped-def]
    x_ptr, values_ptr, places_ptr, x_row,
    N: tl.constexpr, N_PAD: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """x [rows, N] of any distance between rows; values [rows, COUNT], places int64 alike."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N_PAD)
    x = tl.load(x_ptr + row * x_row + i, mask=i < N, other=0.0)
    order = tl.where(i < N, order_of(x), LEAST)
    for k in tl.static_range(COUNT):
        _, place = first_largest(order, i, N_PAD)
        tl.store(places_ptr + row * COUNT + k, place.to(tl.int64))
        tl.store(values_ptr + row * COUNT + k + 0 * i, x, mask=i == place)
        order = tl.where(i == place, LEAST, order)


def _limit(call: Mapping[str, Any]) -> str | None:
    width, count = call["x"].shape[-1], call["count"]
    if width > TOPK_WIDTH or count > TOPK_COUNT:
        return f"{count} of {width}; it takes up to {TOPK_COUNT} of {TOPK_WIDTH}"
    return None


@operator(limit=_limit)
def topk(x: Tensor, count: int) -> Plan:
    """One launch."""
    shape, width = (*x.shape[:-1], count), x.shape[-1]
    values, places = x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
    if values.numel() == 0:
        return [], (values, places)
    rows = flat_rows(x)
    arguments = dict(x_ptr=rows, values_ptr=values, places_ptr=places, x_row=rows.stride(0))
    constants = dict(N=width, N_PAD=power_of_two(width, 2 * _WARP), COUNT=count)
    grid = (rows.shape[0], 1, 1)
    return [Launch(topk_kernel, grid, arguments, constants, threads=_WARP)], (values, places)

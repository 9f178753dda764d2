"""A router's choice within the best groups of a row: a program of one warp has one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.gpu.ops.largest import TOPK_WIDTH
from mtpc.backends.triton_kernels.launch import await_launches, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.ops.topk import choice_plan, store_largest, topk_limit
from mtpc.backends.triton_kernels.order import LEAST, first_largest, number_of, order_of
from mtpc.layout import dtype_name


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


def _limit(call: Mapping[str, Any]) -> str | None:
    x, groups = call["x"], call["groups"]
    if x.dtype != torch.float32:
        return f"{dtype_name(x.dtype)}; it takes float32"
    size = x.shape[-1] // groups
    if power_of_two(groups) * power_of_two(size) > TOPK_WIDTH:
        return f"{groups} groups of {size}; rounded to powers of two, it takes up to {TOPK_WIDTH}"
    return topk_limit(call)


@operator(limit=_limit)
def group_topk(x: Tensor, count: int, groups: int, kept: int) -> Plan:
    """One launch."""
    pads = dict(GROUPS_PAD=power_of_two(groups), SIZE_PAD=power_of_two(x.shape[-1] // groups))
    return choice_plan(group_topk_kernel, x, count, dict(GROUPS=groups, KEPT=kept) | pads)

"""Experts for few rows: each chosen expert's weights are read once per tile of rows, no others'.

A program has one expert, one block of features and one tile of rows. It looks at all choices of its
rows to find those that chose its expert, and stops if there are none. So nothing is sorted, the
host counts nothing, and the grid depends on sizes only. Rows of other experts are zeros in its
products. That costs nothing while reading the weights takes the time. A kernel of its own sums a
row's experts, in the order of the experts, so that no atomics decide its rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import (
    Change,
    Choice,
    Launch,
    adjacent,
    power_of_two,
    widen,
)
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.tiles import dot

_TILE, _FEATURES, _DEPTH, _SUM_BLOCK = 64, 32, 128, 1024
"""Rows in a tile at most; output features of a program; inputs in one product; sums a program."""
_CHANGES = (
    Change(threads=64, factors={"BLOCK_F": 0.5}),
    Change(num_stages=3, factors={"BLOCK_K": 0.5}),
    Change(threads=256),
)


@triton.jit
def chosen(ids, choice, expert):  # type: ignore[no-untyped-def]
    """Which rows of ids [rows, choices] chose an expert, and as their how-manieth choice."""
    match = ids == expert
    return tl.max(match.to(tl.int32), 1) > 0, tl.max(tl.where(match, choice[None], 0), 1)


@triton.jit
def glu(  # type: ignore[no-untyped-def]
    gate, up, LIMIT: tl.constexpr, LIMIT_INPUT: tl.constexpr, GELU: tl.constexpr
):
    """silu(gate) * up or gelu(gate) * up, bounded as `mtpc::experts` says; selects, unlike minima,
    keep NaN."""
    if LIMIT > 0:
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        if LIMIT_INPUT:
            gate = tl.where(gate > LIMIT, LIMIT, gate)
    # The tanh form of GELU is x times the logistic function of this.
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    gate = gate / (1 + tl.exp(-inner))
    if LIMIT > 0 and not LIMIT_INPUT:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
    return gate * up


@triton.jit
def expert_gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, ids_ptr, hidden_ptr, num_tokens, x_stride,
    H: tl.constexpr, INNER: tl.constexpr, CHOICES: tl.constexpr, C_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
    LIMIT: tl.constexpr, LIMIT_INPUT: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """hidden[t, j] = silu(gate x) * (up x) of row t's expert j; weight [E, 2I, H]."""
    expert = tl.program_id(0)
    tokens = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    j = tl.arange(0, C_PAD)
    ids_mask = (tokens < num_tokens)[:, None] & (j < CHOICES)[None]
    ids = tl.load(ids_ptr + tokens[:, None] * CHOICES + j[None], mask=ids_mask, other=-1)
    hit, choice = chosen(ids, j, expert)
    if tl.max(hit.to(tl.int32), 0) == 0:
        return
    feature = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inner = feature < INNER
    base = weight_ptr + expert.to(tl.int64) * (2 * INNER * H)
    gate = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    up = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    for begin in range(0, H, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        x_mask = hit[:, None] & (k < H)[None]
        x = tl.load(x_ptr + tokens[:, None] * x_stride + k[None], mask=x_mask, other=0.0)
        at = base + feature[None] * H + k[:, None]
        mask = inner[None] & (k < H)[:, None]
        gate += dot(x, tl.load(at, mask=mask, other=0.0), WIDEN)
        up += dot(x, tl.load(at + INNER * H, mask=mask, other=0.0), WIDEN)
    value = glu(gate, up, LIMIT, LIMIT_INPUT, GELU)
    out = hidden_ptr + (tokens * CHOICES + choice)[:, None] * INNER + feature[None]
    tl.store(out, value.to(hidden_ptr.dtype.element_ty), mask=hit[:, None] & inner[None])


@triton.jit
def expert_down_kernel(  # type: ignore[no-untyped-def]
    hidden_ptr, weight_ptr, ids_ptr, scale_ptr, part_ptr, num_tokens,
    H: tl.constexpr, INNER: tl.constexpr, CHOICES: tl.constexpr, C_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """part[t, j] = (down hidden[t, j]) * scale[t, j], float32; weight [E, H, I]."""
    expert = tl.program_id(0)
    tokens = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    j = tl.arange(0, C_PAD)
    ids_mask = (tokens < num_tokens)[:, None] & (j < CHOICES)[None]
    ids = tl.load(ids_ptr + tokens[:, None] * CHOICES + j[None], mask=ids_mask, other=-1)
    hit, choice = chosen(ids, j, expert)
    if tl.max(hit.to(tl.int32), 0) == 0:
        return
    feature = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    base = weight_ptr + expert.to(tl.int64) * (H * INNER)
    rows = tokens * CHOICES + choice
    acc = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    for begin in range(0, INNER, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        mask = hit[:, None] & (k < INNER)[None]
        x = tl.load(hidden_ptr + rows[:, None] * INNER + k[None], mask=mask, other=0.0)
        w_mask = (feature < H)[None] & (k < INNER)[:, None]
        weight = tl.load(base + feature[None] * INNER + k[:, None], mask=w_mask, other=0.0)
        acc += dot(x, weight, WIDEN)
    scale = tl.load(scale_ptr + rows, mask=hit, other=0.0).to(tl.float32)
    out = part_ptr + rows.to(tl.int64)[:, None] * H + feature[None]
    tl.store(out, acc * scale[:, None], mask=hit[:, None] & (feature < H)[None])


@triton.jit
def expert_sum_kernel(  # type: ignore[no-untyped-def]
    part_ptr, ids_ptr, out_ptr, num_experts,
    H: tl.constexpr, CHOICES: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = sum of part[t, j] over j in the order of the experts."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, C_PAD)
    ids = tl.load(ids_ptr + token * CHOICES + j, mask=j < CHOICES, other=2147483647)
    ties = (ids[None] == ids[:, None]) & (j[None] < j[:, None])
    rank = tl.sum(((ids[None] < ids[:, None]) | ties).to(tl.int32), 1)
    acc = tl.zeros([BLOCK], tl.float32)
    for place in range(CHOICES):
        here = rank == place
        choice = tl.sum(tl.where(here, j, 0), 0)
        expert = tl.sum(tl.where(here, ids, 0), 0)
        width = tl.where((expert >= 0) & (expert < num_experts), H, 0)
        at = (token * CHOICES + choice).to(tl.int64) * H + column
        acc += tl.load(part_ptr + at, mask=column < width, other=0.0)
    out = out_ptr + token * H + column
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=column < H)


@operator()
def experts(
    x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor,
    limit: float, limit_input: bool, gelu: bool,
) -> Plan:  # fmt: skip
    """Gate and up with the activation, the way down, and the sum over experts.

    Raises:
        BackendError: elements of a weight's row are not adjacent in memory.
    """
    out = x.new_empty(x.shape)
    if x.shape[0] == 0:
        return [], out
    gate_up, down = (adjacent(w, "expert weights").contiguous() for w in (gate_up, down))
    ids, scales = expert_ids.contiguous(), expert_weights.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    (num_tokens, width), (count, _, inner) = x.shape, down.shape
    picks = ids.shape[1]
    hidden = x.new_empty((num_tokens, picks, inner))
    part = x.new_empty((num_tokens, picks, width), dtype=torch.float32)
    tile = power_of_two(min(num_tokens, _TILE), 16)
    row_tiles = -(-num_tokens // tile)
    sizes = dict(H=width, CHOICES=picks, C_PAD=power_of_two(picks))
    shared = dict(sizes, INNER=inner, BLOCK_T=tile, BLOCK_F=_FEATURES,
                  BLOCK_K=_DEPTH if x.dtype.itemsize == 2 else _DEPTH // 2,
                  WIDEN=widen(expert_down_kernel, x))  # fmt: skip
    bounded = dict(shared, LIMIT=float(limit), LIMIT_INPUT=limit_input, GELU=gelu)
    first = dict(x_ptr=x, weight_ptr=gate_up, ids_ptr=ids, hidden_ptr=hidden,
                 num_tokens=num_tokens, x_stride=x.stride(0))  # fmt: skip
    second = dict(hidden_ptr=hidden, weight_ptr=down, ids_ptr=ids, scale_ptr=scales, part_ptr=part,
                  num_tokens=num_tokens)  # fmt: skip
    grid_up = (count, -(-inner // _FEATURES), row_tiles)
    grid_down = (count, -(-width // _FEATURES), row_tiles)
    by_inner, by_width = (Choice(_CHANGES, {"BLOCK_F": (1, cut)}) for cut in ("INNER", "H"))
    launches = [
        Launch(expert_gate_up_kernel, grid_up, first, bounded, threads=128, choice=by_inner),
        Launch(expert_down_kernel, grid_down, second, shared, threads=128, choice=by_width),
        expert_sum_launch(part, ids, out, count),
    ]
    return launches, out


def expert_sum_launch(part: Tensor, ids: Tensor, out: Tensor, num_experts: int) -> Launch:
    """The sum of each row's experts.

    Args:
        part: float32 [T, k, H], what each chosen expert adds.
        ids: int64 [T, k], contiguous; others than experts add nothing.
        out: [T, H], contiguous.
        num_experts: E.
    """
    num_tokens, picks, width = part.shape
    block = min(power_of_two(width), _SUM_BLOCK)
    arguments = dict(part_ptr=part, ids_ptr=ids, out_ptr=out, num_experts=num_experts)
    constants = dict(H=width, CHOICES=picks, C_PAD=power_of_two(picks), BLOCK=block)
    grid = (num_tokens, -(-width // block), 1)
    return Launch(expert_sum_kernel, grid, arguments, constants, threads=128)

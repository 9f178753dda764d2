"""Experts on codes of 4 or 8 bits with scales of groups; see `triton_kernels.grouped`.

Programs share the work as in `experts`. Launches round rows, compute gate and up with the
activation in float32, round its rows, compute the down projection, and sum over experts. With
float8 they round nothing. Experts with biases, as gpt-oss has them, have the features of gate and
up in turns: a tile has half as many of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.grouped import (
    CHOICE,
    TILE_ROWS,
    add_group,
    add_products,
    form_constants,
    limit_group,
    prepare_rows,
    weight_arguments,
)
from mtpc.backends.triton_kernels.launch import Launch
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.ops.experts import expert_sum_launch, glu, sort_choices
from mtpc.weights.grouped import form_of
from mtpc.weights.packing import TILE

_TILE: tl.constexpr = tl.constexpr(TILE)


@triton.jit
def _clamped(both, LIMIT: tl.constexpr, ALPHA: tl.constexpr):  # type: ignore[no-untyped-def]
    """(up + 1) gate sigmoid(alpha gate) of [rows, TILE] in turns, bounded as `mtpc::biased_experts`
    says. It uses `where`, because minima would drop NaN."""
    gate, up = tl.split(tl.reshape(both, [both.shape[0], _TILE // 2, 2]))
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return (up + 1) * (gate / (1 + tl.exp(-ALPHA * gate)))


@triton.jit
def grouped_gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, steps_ptr, sums_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, experts_ptr,
    picks_ptr, hidden_ptr,
    H: tl.constexpr, INNER: tl.constexpr, CHOICES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    BITS: tl.constexpr, POINTS: tl.constexpr, WIDEN: tl.constexpr,
    LIMIT: tl.constexpr, LIMIT_INPUT: tl.constexpr, GELU: tl.constexpr,
    TURNS: tl.constexpr, ALPHA: tl.constexpr,
):  # fmt: skip
    """hidden[t, j] = silu(gate x) * (up x) of row t's expert j.

    A program has a tile of gate's features and the same of up's. TURNS: one tile, of both, and
    biases [E, 2I].
    """
    expert = tl.load(experts_ptr + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    pick = tl.load(picks_ptr + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    live, row = pick >= 0, pick // CHOICES
    groups: tl.constexpr = H // GROUP
    size: tl.constexpr = _TILE // 2 if BITS == 4 else _TILE
    lane, column = tl.arange(0, BLOCK_K * size), tl.arange(0, _TILE)
    tile, further = expert * (2 * INNER // _TILE) + tl.program_id(1), INNER // _TILE
    stream = codes_ptr + tile * (H * size)
    gate = tl.zeros([BLOCK_T, _TILE], tl.float32)
    up = tl.zeros([BLOCK_T, _TILE], tl.float32)
    for group in range(0, groups):
        gates = tl.zeros([BLOCK_T, _TILE], tl.float32 if BITS == 0 else tl.int32)
        ups = tl.zeros([BLOCK_T, _TILE], tl.float32 if BITS == 0 else tl.int32)
        for begin in range(0, GROUP, BLOCK_K):
            i = begin + tl.arange(0, BLOCK_K)
            at = x_ptr + row[:, None] * H + (group * GROUP + i)[None]
            x = tl.load(at, mask=live[:, None] & (i < GROUP)[None], other=0)
            at = stream + (group * GROUP + begin) * size + lane
            is_code = lane < (GROUP - begin) * size
            packed = tl.load(at, mask=is_code, other=0)
            gates = add_products(gates, x, packed, BLOCK_K, BITS, WIDEN)
            if not TURNS:
                packed = tl.load(at + further * (H * size), mask=is_code, other=0)
                ups = add_products(ups, x, packed, BLOCK_K, BITS, WIDEN)
        steps = tl.load(steps_ptr + row * groups + group, mask=live, other=0)
        inputs = tl.load(sums_ptr + row * groups + group, mask=live, other=0)
        at = (tile * groups + group) * _TILE + column
        scales, points = tl.load(scales_ptr + at), tl.load(zeros_ptr + at)
        gate = add_group(gate, gates, steps, inputs, scales, points, BITS, POINTS)
        if not TURNS:
            at += further * (groups * _TILE)
            scales, points = tl.load(scales_ptr + at), tl.load(zeros_ptr + at)
            up = add_group(up, ups, steps, inputs, scales, points, BITS, POINTS)
    if TURNS:
        bias = tl.load(bias_ptr + tile * _TILE + column).to(tl.float32)
        value = _clamped(gate + bias[None], LIMIT, ALPHA)
        feature = tl.program_id(1) * (_TILE // 2) + tl.arange(0, _TILE // 2)
    else:
        value = glu(gate, up, LIMIT, LIMIT_INPUT, GELU)
        feature = tl.program_id(1) * _TILE + column
    out = hidden_ptr + pick[:, None] * INNER + feature[None]
    tl.store(out, value, mask=live[:, None] & (feature < INNER)[None])


@triton.jit
def grouped_down_kernel(  # type: ignore[no-untyped-def]
    x_ptr, steps_ptr, sums_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, experts_ptr,
    picks_ptr, share_ptr, part_ptr,
    H: tl.constexpr, INNER: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    BITS: tl.constexpr, POINTS: tl.constexpr, WIDEN: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """part[t, j] = (down x[t, j]) * share[t, j], float32. TURNS: with biases [E, H]."""
    expert = tl.load(experts_ptr + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(picks_ptr + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    live = row >= 0
    groups: tl.constexpr = INNER // GROUP
    size: tl.constexpr = _TILE // 2 if BITS == 4 else _TILE
    lane, column = tl.arange(0, BLOCK_K * size), tl.arange(0, _TILE)
    tile = expert * tl.num_programs(1) + tl.program_id(1)
    stream = codes_ptr + tile * (INNER * size)
    total = tl.zeros([BLOCK_T, _TILE], tl.float32)
    for group in range(0, groups):
        sums = tl.zeros([BLOCK_T, _TILE], tl.float32 if BITS == 0 else tl.int32)
        for begin in range(0, GROUP, BLOCK_K):
            i = begin + tl.arange(0, BLOCK_K)
            at = x_ptr + row[:, None] * INNER + (group * GROUP + i)[None]
            x = tl.load(at, mask=live[:, None] & (i < GROUP)[None], other=0)
            at = stream + (group * GROUP + begin) * size + lane
            packed = tl.load(at, mask=lane < (GROUP - begin) * size, other=0)
            sums = add_products(sums, x, packed, BLOCK_K, BITS, WIDEN)
        steps = tl.load(steps_ptr + row * groups + group, mask=live, other=0)
        inputs = tl.load(sums_ptr + row * groups + group, mask=live, other=0)
        at = (tile * groups + group) * _TILE + column
        scales, points = tl.load(scales_ptr + at), tl.load(zeros_ptr + at)
        total = add_group(total, sums, steps, inputs, scales, points, BITS, POINTS)
    share = tl.load(share_ptr + row, mask=live, other=0.0).to(tl.float32)
    feature = tl.program_id(1) * _TILE + column
    if TURNS:
        bias = tl.load(bias_ptr + expert * H + feature, mask=feature < H, other=0.0)
        total += bias.to(tl.float32)[None]
    out = part_ptr + row[:, None] * H + feature[None]
    tl.store(out, total * share[:, None], mask=live[:, None] & (feature < H)[None])


def _limit(call: Mapping[str, Any]) -> str | None:
    wide, narrow = (
        [call[name], call[f"{name}_scales"], call.get(f"{name}_zeros")]
        for name in ("gate_up", "down")
    )
    inner = call["gate_up"].shape[1] * TILE // 2
    return limit_group(call["x"].shape[-1], *wide) or limit_group(inner, *narrow)


@operator(limit=_limit, codes=True)
def grouped_experts(
    x: Tensor, gate_up: Tensor, gate_up_scales: Tensor, gate_up_zeros: Tensor | None,
    down: Tensor, down_scales: Tensor, down_zeros: Tensor | None,
    expert_ids: Tensor, expert_weights: Tensor, limit: float, limit_input: bool,
    gelu: bool, *, batch_invariant: bool = False,
) -> Plan:  # fmt: skip
    """Six launches, four with float8."""
    weights = (gate_up, gate_up_scales, gate_up_zeros), (down, down_scales, down_zeros)
    form = dict(LIMIT=float(limit), LIMIT_INPUT=limit_input, GELU=gelu, TURNS=False, ALPHA=0.0)
    biases = (gate_up_scales, down_scales)  # Not read.
    return _plan(x, weights, biases, (expert_ids, expert_weights), form, batch_invariant)


@operator(limit=_limit, codes=True)
def grouped_biased_experts(
    x: Tensor, gate_up: Tensor, gate_up_scales: Tensor, gate_up_bias: Tensor,
    down: Tensor, down_scales: Tensor, down_bias: Tensor,
    expert_ids: Tensor, expert_weights: Tensor, limit: float, alpha: float, *,
    batch_invariant: bool = False,
) -> Plan:  # fmt: skip
    """Six launches, four with float8."""
    weights = (gate_up, gate_up_scales, None), (down, down_scales, None)
    form = dict(LIMIT=float(limit), LIMIT_INPUT=True, GELU=False, TURNS=True, ALPHA=float(alpha))
    biases = (gate_up_bias.contiguous(), down_bias.contiguous())
    return _plan(x, weights, biases, (expert_ids, expert_weights), form, batch_invariant)


_Weight = tuple[Tensor, Tensor, Tensor | None]
"""Codes, scales, and zero points or minima of a stack."""


def _plan(
    x: Tensor, weights: tuple[_Weight, _Weight], biases: tuple[Tensor, Tensor],
    choices: tuple[Tensor, Tensor], form: dict[str, Any], batch_invariant: bool,
) -> Plan:  # fmt: skip
    """The plan of experts with an activation: `form`, as constants of `grouped_gate_up_kernel`;
    `choices` are ids and weights [T, k]."""
    out = x.new_empty(x.shape)
    if x.shape[0] == 0:
        return [], out
    wide, narrow = weights
    ids, shares = (each.contiguous() for each in choices)
    (num_tokens, width), picks, features = x.shape, ids.shape[1], wide[0].shape[1] * TILE
    inner = features // 2
    hidden = x.new_empty((num_tokens * picks, inner), dtype=torch.float32)
    part = x.new_empty((num_tokens, picks, width), dtype=torch.float32)
    wide_form, narrow_form = form_of(width, *wide), form_of(inner, *narrow)
    rows, inner_rows = prepare_rows(x, wide_form), prepare_rows(hidden, narrow_form)
    tiles = sort_choices(ids, narrow[0].shape[0], TILE_ROWS, batch_invariant)
    shared = dict(tiles.arguments(), H=width, INNER=inner, BLOCK_T=tiles.tile, **form)
    first = shared | rows.arguments() | weight_arguments(*wide)
    first |= form_constants(grouped_gate_up_kernel, rows.x, wide_form)
    first |= dict(bias_ptr=biases[0], hidden_ptr=hidden, CHOICES=picks)
    second = shared | inner_rows.arguments() | weight_arguments(*narrow)
    second |= form_constants(grouped_down_kernel, inner_rows.x, narrow_form)
    second |= dict(bias_ptr=biases[1], share_ptr=shares, part_ptr=part)
    in_turn = features if form["TURNS"] else inner
    grid_up, grid_down = ((tiles.num_tiles, -(-n // TILE), 1) for n in (in_turn, width))
    launches = [
        tiles.launch,
        *rows.launches,
        Launch(grouped_gate_up_kernel, grid_up, first, threads=128, choice=CHOICE),
        *inner_rows.launches,
        Launch(grouped_down_kernel, grid_down, second, threads=128, choice=CHOICE),
        expert_sum_launch(part, ids, out, narrow[0].shape[0]),
    ]
    return launches, out

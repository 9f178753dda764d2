"""Experts on int8 weights: rows are rounded before each product, then multiplied as integers.

Which program has what is as in `experts`, how weights lie and what is exact as in `quantised`. Five
launches: rows are rounded; gate and up, with the activation in float32; its rows are rounded; the
way down; and the sum over experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.experts import chosen, expert_sum_launch, glu
from mtpc.backends.triton_kernels.launch import Launch, power_of_two
from mtpc.backends.triton_kernels.quantised import round_rows_launch, unpack_bytes
from mtpc.weights.packing import TILE, ZERO

_TILE_ROWS, _DEPTH = 64, 128
"""Rows in a tile at most; inputs in one product."""
_ZERO: tl.constexpr = tl.constexpr(ZERO)
_TILE: tl.constexpr = tl.constexpr(TILE)


@triton.jit
def int8_gate_up_kernel(  # type: ignore[no-untyped-def]
    integers_ptr, row_scales_ptr, weight_ptr, scales_ptr, ids_ptr, hidden_ptr, num_tokens,
    H: tl.constexpr, INNER: tl.constexpr, CHOICES: tl.constexpr, C_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    LIMIT: tl.constexpr, LIMIT_INPUT: tl.constexpr,
):  # fmt: skip
    """hidden[t, j] = silu(gate x) * (up x) of row t's expert j; weight [E, 2I / TILE, H / 4, ...].

    A program has a tile of gate's features and the same of up's.
    """
    expert = tl.program_id(0)
    tokens = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    j = tl.arange(0, C_PAD)
    ids_mask = (tokens < num_tokens)[:, None] & (j < CHOICES)[None]
    ids = tl.load(ids_ptr + tokens[:, None] * CHOICES + j[None], mask=ids_mask, other=-1)
    hit, choice = chosen(ids, j, expert)
    if tl.max(hit.to(tl.int32), 0) == 0:
        return
    feature = tl.program_id(1) * _TILE + tl.arange(0, _TILE)
    # Tiles of TILE features lie one after the other, so a matrix of N of them has N * H bytes.
    gates = weight_ptr + (expert.to(tl.int64) * 2 * INNER + tl.program_id(1) * _TILE) * H
    lane = tl.arange(0, BLOCK_K * _TILE)
    gate = tl.zeros([BLOCK_T, _TILE], tl.int32)
    up = tl.zeros([BLOCK_T, _TILE], tl.int32)
    for begin in range(0, H, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        at = integers_ptr + tokens.to(tl.int64)[:, None] * H + k[None]
        x = tl.load(at, mask=hit[:, None] & (k < H)[None], other=0)
        there = lane < (H - begin) * _TILE
        packed = tl.load(gates + begin * _TILE + lane, mask=there, other=_ZERO)
        gate = tl.dot(x, unpack_bytes(packed, BLOCK_K), gate, out_dtype=tl.int32)
        packed = tl.load(gates + INNER * H + begin * _TILE + lane, mask=there, other=_ZERO)
        up = tl.dot(x, unpack_bytes(packed, BLOCK_K), up, out_dtype=tl.int32)
    rows = tl.load(row_scales_ptr + tokens, mask=hit, other=0.0)[:, None]
    scales = scales_ptr + expert.to(tl.int64) * (2 * INNER) + feature
    gate_value = gate.to(tl.float32) * (rows * tl.load(scales)[None])
    up_value = up.to(tl.float32) * (rows * tl.load(scales + INNER)[None])
    value = glu(gate_value, up_value, LIMIT, LIMIT_INPUT)
    out = hidden_ptr + (tokens * CHOICES + choice).to(tl.int64)[:, None] * INNER + feature[None]
    tl.store(out, value, mask=hit[:, None] & (feature < INNER)[None])


@triton.jit
def int8_down_kernel(  # type: ignore[no-untyped-def]
    integers_ptr, row_scales_ptr, weight_ptr, scales_ptr, ids_ptr, share_ptr, part_ptr, num_tokens,
    H: tl.constexpr, INNER: tl.constexpr, CHOICES: tl.constexpr, C_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """part[t, j] = (down integers[t, j]) * share[t, j]; weight [E, ceil(H / TILE), I / 4, ...]."""
    expert = tl.program_id(0)
    tokens = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    j = tl.arange(0, C_PAD)
    ids_mask = (tokens < num_tokens)[:, None] & (j < CHOICES)[None]
    ids = tl.load(ids_ptr + tokens[:, None] * CHOICES + j[None], mask=ids_mask, other=-1)
    hit, choice = chosen(ids, j, expert)
    if tl.max(hit.to(tl.int32), 0) == 0:
        return
    feature = tl.program_id(1) * _TILE + tl.arange(0, _TILE)
    tile = expert.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    stream = weight_ptr + tile * (_TILE * INNER)
    rows = (tokens * CHOICES + choice).to(tl.int64)
    lane = tl.arange(0, BLOCK_K * _TILE)
    total = tl.zeros([BLOCK_T, _TILE], tl.int32)
    for begin in range(0, INNER, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        at = integers_ptr + rows[:, None] * INNER + k[None]
        x = tl.load(at, mask=hit[:, None] & (k < INNER)[None], other=0)
        there = lane < (INNER - begin) * _TILE
        packed = tl.load(stream + begin * _TILE + lane, mask=there, other=_ZERO)
        total = tl.dot(x, unpack_bytes(packed, BLOCK_K), total, out_dtype=tl.int32)
    row_scales = tl.load(row_scales_ptr + rows, mask=hit, other=0.0)
    scales_at = scales_ptr + expert.to(tl.int64) * H + feature
    scales = tl.load(scales_at, mask=feature < H, other=0.0)
    value = total.to(tl.float32) * (row_scales[:, None] * scales[None])
    share = tl.load(share_ptr + rows, mask=hit, other=0.0).to(tl.float32)
    out = part_ptr + rows[:, None] * H + feature[None]
    tl.store(out, value * share[:, None], mask=hit[:, None] & (feature < H)[None])


def quantised_expert_launches(
    x: Tensor,
    gate_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    choices: tuple[Tensor, Tensor],
    out: Tensor,
    limit: tuple[float, bool] = (0.0, False),
) -> list[Launch]:
    """Launches of `mtpc::quantised_experts`.

    Args:
        x: [T, H], T > 0.
        gate_up: uint8 [E, 2I / 32, H / 4, 32, 4] and scales, float32 [E, 2I].
        down: uint8 [E, ceil(H / 32), I / 4, 32, 4] and scales, float32 [E, H].
        choices: expert_ids int64 [T, k], distinct per row, and expert_weights [T, k].
        out: [T, H], contiguous.
        limit: of the activations, and whether it bounds what goes into silu.
    """
    ids, shares = (t.contiguous() for t in choices)
    wide, wide_scales = (t.contiguous() for t in gate_up)
    narrow, narrow_scales = (t.contiguous() for t in down)
    (num_tokens, width), picks = x.shape, ids.shape[1]
    count, inner = wide.shape[0], wide_scales.shape[1] // 2
    hidden = x.new_empty((num_tokens * picks, inner), dtype=torch.float32)
    part = x.new_empty((num_tokens, picks, width), dtype=torch.float32)
    rounding, integers, row_scales = round_rows_launch(x)
    rounding_again, inner_integers, inner_scales = round_rows_launch(hidden)
    tile = power_of_two(min(num_tokens, _TILE_ROWS), 16)
    constants = dict(H=width, INNER=inner, CHOICES=picks, C_PAD=power_of_two(picks),
                     BLOCK_T=tile, BLOCK_K=_DEPTH)  # fmt: skip
    bounded = dict(constants, LIMIT=float(limit[0]), LIMIT_INPUT=limit[1])
    first = dict(integers_ptr=integers, row_scales_ptr=row_scales, weight_ptr=wide,
                 scales_ptr=wide_scales, ids_ptr=ids, hidden_ptr=hidden,
                 num_tokens=num_tokens)  # fmt: skip
    second = dict(integers_ptr=inner_integers, row_scales_ptr=inner_scales, weight_ptr=narrow,
                  scales_ptr=narrow_scales, ids_ptr=ids, share_ptr=shares, part_ptr=part,
                  num_tokens=num_tokens)  # fmt: skip
    row_tiles = -(-num_tokens // tile)
    grid_up, grid_down = (count, inner // TILE, row_tiles), (count, -(-width // TILE), row_tiles)
    return [
        rounding,
        Launch(int8_gate_up_kernel, grid_up, first, bounded, threads=128),
        rounding_again,
        Launch(int8_down_kernel, grid_down, second, constants, threads=128),
        expert_sum_launch(part, ids, out, count),
    ]

"""Linear layers on int8 weights: rows are rounded once, then multiplied as integers.

Two launches: `round_rows` finds each row's scale and its int8 form, which every program of
`int8_linear` would otherwise have to find again. Sums of products are exact, so no order of adding
them shows in the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, power_of_two
from mtpc.weights.packing import LARGEST, TILE, ZERO

_TILE_ROWS, _DEPTH, _ROUND_BLOCK = 64, 128, 1024
"""Rows in a tile at most; inputs in one product; elements that are rounded at a time."""
# Adding and taking away 1.5 * 2^23 leaves the nearest integer, of two equally near the even one.
_ROUNDING: tl.constexpr = tl.constexpr(12582912.0)
_LARGEST: tl.constexpr = tl.constexpr(float(LARGEST))
_ZERO: tl.constexpr = tl.constexpr(ZERO)
_TILE: tl.constexpr = tl.constexpr(TILE)


@triton.jit
def round_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, integers_ptr, scales_ptr, x_stride, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """integers[t] = x[t] over its scale, int8; scales[t] = largest magnitude / 127."""
    token = tl.program_id(0)
    row, to = x_ptr + token.to(tl.int64) * x_stride, integers_ptr + token.to(tl.int64) * K
    lane = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    finite = tl.full([BLOCK], 1, tl.int32)
    for begin in range(0, K, BLOCK):
        size = tl.abs(tl.load(row + begin + lane, mask=begin + lane < K, other=0.0).to(tl.float32))
        finite = finite & (size < float("inf")).to(tl.int32)  # Not of NaN, either.
        largest = tl.maximum(largest, size)
    peak, sound = tl.max(largest, 0), tl.min(finite, 0) == 1
    # Divided as the reference does, rounded to nearest: a hair less and an integer changes.
    inverse = tl.where(peak > 0, tl.div_rn(_LARGEST, tl.where(peak > 0, peak, 1.0)), 0.0)
    scale = tl.div_rn(peak, _LARGEST)
    tl.store(scales_ptr + token, tl.where(sound, scale, float("nan")))
    inverse = tl.where(sound, inverse, 0.0)
    for begin in range(0, K, BLOCK):
        mask = begin + lane < K
        value = tl.load(row + begin + lane, mask=mask, other=0.0).to(tl.float32)
        scaled = tl.where(sound, value, 0.0) * inverse
        tl.store(to + begin + lane, ((scaled + _ROUNDING) - _ROUNDING).to(tl.int8), mask=mask)


@triton.jit
def unpack_bytes(packed, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes [BLOCK_K / 4 * TILE * 4] of a tile's stream as int8 weights [BLOCK_K, TILE]."""
    # A byte less 128 is the same byte with its top bit turned over, read as signed.
    signed = (packed ^ _ZERO).to(tl.int8, bitcast=True)
    groups = tl.reshape(signed, [BLOCK_K // 4, _TILE, 4])
    return tl.reshape(tl.permute(groups, (0, 2, 1)), [BLOCK_K, _TILE])


@triton.jit
def int8_linear_kernel(  # type: ignore[no-untyped-def]
    integers_ptr, row_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr,
    num_tokens, num_features,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """out[t, n] = integers[t] weight[n] * row_scales[t] * scales[n] + bias[n].

    A program has one tile of TILE features, which lies in memory as one stream: [K / 4, TILE, 4].
    """
    feature = tl.program_id(0) * _TILE + tl.arange(0, _TILE)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    stream = weight_ptr + tl.program_id(0).to(tl.int64) * (K * _TILE)
    lane = tl.arange(0, BLOCK_K * _TILE)
    total = tl.zeros([BLOCK_T, _TILE], tl.int32)
    for begin in range(0, K, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        there = lane < (K - begin) * _TILE
        packed = tl.load(stream + begin * _TILE + lane, mask=there, other=_ZERO)
        at = integers_ptr + token.to(tl.int64)[:, None] * K + k[None]
        x = tl.load(at, mask=(token < num_tokens)[:, None] & (k < K)[None], other=0)
        total = tl.dot(x, unpack_bytes(packed, BLOCK_K), total, out_dtype=tl.int32)
    rows = tl.load(row_scales_ptr + token, mask=token < num_tokens, other=0.0)
    columns = tl.load(scales_ptr + feature, mask=feature < num_features, other=0.0)
    out = total.to(tl.float32) * (rows[:, None] * columns[None])
    if HAS_BIAS:
        bias = tl.load(bias_ptr + feature, mask=feature < num_features, other=0.0)
        out += bias.to(tl.float32)[None]
    at = out_ptr + token.to(tl.int64)[:, None] * num_features + feature[None]
    mask = (token < num_tokens)[:, None] & (feature < num_features)[None]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask)


def quantised_linear_launches(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor
) -> list[Launch]:
    """Launches of `mtpc::quantised_linear`.

    Args:
        x: [T, K], T > 0.
        weight: uint8 [ceil(N / 32), K / 4, 32, 4].
        scales: float32 [N].
        bias: [N] or None.
        out: [T, N], contiguous.
    """
    weight, scales = weight.contiguous(), scales.contiguous()
    (num_tokens, inputs), num_features = x.shape, scales.shape[0]
    rounding, integers, row_scales = round_rows_launch(x)
    arguments = dict(
        integers_ptr=integers, row_scales_ptr=row_scales, weight_ptr=weight, scales_ptr=scales,
        bias_ptr=scales if bias is None else bias.contiguous(), out_ptr=out,
        num_tokens=num_tokens, num_features=num_features,
    )  # fmt: skip
    tile = power_of_two(min(num_tokens, _TILE_ROWS), 16)
    constants = dict(K=inputs, BLOCK_T=tile, BLOCK_K=_DEPTH, HAS_BIAS=bias is not None)
    grid = (-(-num_features // TILE), -(-num_tokens // tile), 1)
    products = Launch(int8_linear_kernel, grid, arguments, constants, threads=128, num_stages=4)
    return [rounding, products]


def round_rows_launch(x: Tensor) -> tuple[Launch, Tensor, Tensor]:
    """What rounds x [T, K]; its integers, int8 [T, K]; and their scales, float32 [T]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    integers = x.new_empty(x.shape, dtype=torch.int8)
    scales = x.new_empty((x.shape[0],), dtype=torch.float32)
    arguments = dict(x_ptr=x, integers_ptr=integers, scales_ptr=scales, x_stride=x.stride(0))
    constants = dict(K=x.shape[1], BLOCK=min(power_of_two(x.shape[1]), _ROUND_BLOCK))
    return Launch(round_rows_kernel, (x.shape[0], 1, 1), arguments, constants), integers, scales

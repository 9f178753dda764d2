"""Linear layers on codes of 4 or 8 bits with scales of groups; see `triton_kernels.grouped`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from mtpc.backends.triton_kernels.launch import Launch, flat_rows, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.ops.norms import silu_and_mul
from mtpc.weights.grouped import form_of
from mtpc.weights.packing import TILE

_TILE: tl.constexpr = tl.constexpr(TILE)


@triton.jit
def grouped_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr, steps_ptr, sums_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr,
    num_tokens, num_features,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    BITS: tl.constexpr, POINTS: tl.constexpr, WIDEN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """out[t, n] = x[t] weight[n] + bias[n]; a program has one tile of features."""
    tile = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    feature = tl.program_id(0) * _TILE + tl.arange(0, _TILE)
    there = row < num_tokens
    groups: tl.constexpr = K // GROUP
    size: tl.constexpr = _TILE // 2 if BITS == 4 else _TILE
    lane, column = tl.arange(0, BLOCK_K * size), tl.arange(0, _TILE)
    stream = codes_ptr + tile * (K * size)
    out = tl.zeros([BLOCK_T, _TILE], tl.float32)
    for group in range(0, groups):
        sums = tl.zeros([BLOCK_T, _TILE], tl.float32 if BITS == 0 else tl.int32)
        for begin in range(0, GROUP, BLOCK_K):
            i = begin + tl.arange(0, BLOCK_K)
            at = x_ptr + row[:, None] * K + (group * GROUP + i)[None]
            x = tl.load(at, mask=there[:, None] & (i < GROUP)[None], other=0)
            at = stream + (group * GROUP + begin) * size + lane
            packed = tl.load(at, mask=lane < (GROUP - begin) * size, other=0)
            sums = add_products(sums, x, packed, BLOCK_K, BITS, WIDEN)
        steps = tl.load(steps_ptr + row * groups + group, mask=there, other=0)
        inputs = tl.load(sums_ptr + row * groups + group, mask=there, other=0)
        at = (tile * groups + group) * _TILE + column
        scales, points = tl.load(scales_ptr + at), tl.load(zeros_ptr + at)
        out = add_group(out, sums, steps, inputs, scales, points, BITS, POINTS)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + feature, mask=feature < num_features, other=0.0)
        out += bias.to(tl.float32)[None]
    at = out_ptr + row[:, None] * num_features + feature[None]
    mask = there[:, None] & (feature < num_features)[None]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask)


def limit_linear(call: Mapping[str, Any]) -> str | None:
    """Why these kernels cannot take a call; None where they can."""
    return limit_group(call["x"].shape[-1], call["codes"], call["scales"], call.get("zeros"))


@operator(limit=limit_linear, codes=True)
def grouped_linear(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, features: int,
    bias: Tensor | None, *, batch_invariant: bool = False,
) -> Plan:  # fmt: skip
    """Rounding, unless codes are float8; then the products."""
    out = x.new_empty((*x.shape[:-1], features))
    rows = flat_rows(x)
    num_tokens, inputs = rows.shape
    form = form_of(inputs, codes, scales, zeros)
    ready, weight = prepare_rows(rows, form), weight_arguments(codes, scales, zeros)
    added = weight["scales_ptr"] if bias is None else bias.contiguous()
    tile = TILE_ROWS if batch_invariant else power_of_two(min(num_tokens, TILE_ROWS), 16)
    values = ready.arguments() | weight | form_constants(grouped_linear_kernel, rows, form) | dict(
        bias_ptr=added, out_ptr=out, num_tokens=num_tokens, num_features=features, K=inputs,
        BLOCK_T=tile, HAS_BIAS=bias is not None,
    )  # fmt: skip
    grid = (-(-features // TILE), -(-num_tokens // tile), 1)
    products = Launch(grouped_linear_kernel, grid, values, 128, num_stages=4, choice=CHOICE)
    return [*ready.launches, products], out


@operator(limit=limit_linear, codes=True)
def grouped_gated_linear(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, features: int, *,
    batch_invariant: bool = False,
) -> Plan:  # fmt: skip
    """SwiGLU's two linear layers, and its activation after them: the launches of both."""
    given = (x, codes, scales, zeros, features, None)
    products, both = grouped_linear.function(*given, batch_invariant=batch_invariant)
    assert isinstance(both, Tensor)
    activation, out = silu_and_mul.function(both)
    return [*products, *activation], out

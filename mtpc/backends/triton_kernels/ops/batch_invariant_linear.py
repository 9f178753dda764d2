"""Linear layers whose rows have the same bits whatever other rows there are.

Tiles and the split of the inputs follow from the weight alone, and any number of rows runs the same
code. A program has 64 rows and some features. With fewer rows the unneeded products cost no time:
on paper, products of 64 rows take a quarter of the time in which an H100 reads a weight. Weights
with few features are split along the inputs; a second launch adds the splits, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, flat_rows, widen
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.tiles import dot


@dataclass(frozen=True)
class Tile:
    """The tile of a program.

    Attributes:
        rows: rows of x and of the result.
        features: features of the weight.
        inputs: inputs of one product.
        stages: depth of the pipeline that fetches operands; it fits on every target.
        splits: parts into which the inputs are cut.
    """

    rows: int
    features: int
    inputs: int
    stages: int
    splits: int = 1


_TILES = {
    2: (Tile(64, 128, 64, 3), Tile(64, 64, 64, 4), Tile(64, 32, 64, 6), Tile(64, 16, 128, 4)),
    4: (Tile(16, 32, 32, 3), Tile(16, 16, 32, 3)),
}
"""By bytes of an element; the most features first."""
_PARTS = {2: Tile(64, 64, 64, 4), 4: Tile(16, 32, 32, 3)}
"""By bytes of an element, for weights of several parts, each of which is small."""
_PROGRAMS, _LEAST_PROGRAMS, _LEAST_INPUTS = 128, 64, 512
"""Programs of a weight, about as many as compute units; the fewest, which splits of inputs aim at;
and the fewest inputs of a split. All are chosen on paper, not measured."""
_ADDED = 1024
"""Results of a program of `add_splits_kernel`."""


def tile_for(features: int, inputs: int, itemsize: int) -> Tile:
    """The tile of a weight [features, inputs] of elements of so many bytes."""
    tiles = _TILES[itemsize]
    tile = next((t for t in tiles if features >= _PROGRAMS * t.features), tiles[-1])
    wanted = _LEAST_PROGRAMS // -(-features // tile.features)
    splits = max(1, min(wanted, inputs // _LEAST_INPUTS))
    return Tile(tile.rows, tile.features, tile.inputs, tile.stages, splits)


@triton.jit(do_not_specialize=["num_rows"])
def batch_invariant_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, x_part, x_row, w_part, w_row, w_input,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """x [parts, num_rows, K]; weight [parts, N, K]; out [parts, num_rows, N], or where there are
    splits float32 [SPLITS, parts, num_rows, N], of inputs split * SPLIT_K and following."""
    # Programs of one tile of the weight are adjacent, so that it is read from memory once.
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part, split = (tl.program_id(2) // SPLITS).to(tl.int64), tl.program_id(2) % SPLITS
    parts = tl.num_programs(2) // SPLITS
    x_at = x_ptr + part * x_part + row[:, None] * x_row
    w_at = weight_ptr + part * w_part + n.to(tl.int64)[None] * w_row
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for begin in range(0, SPLIT_K, BLOCK_K):
        k = split * SPLIT_K + begin + tl.arange(0, BLOCK_K)
        there = k < K
        x = tl.load(x_at + k[None], mask=(row < num_rows)[:, None] & there[None], other=0.0)
        w_mask = (n < N)[None] & there[:, None]
        weight = tl.load(w_at + k[:, None] * w_input, mask=w_mask, other=0.0)
        acc += dot(x, weight, WIDEN)
    if HAS_BIAS and SPLITS == 1:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None]
    at = ((split * parts + part) * num_rows + row)[:, None] * N + n[None]
    mask = (row < num_rows)[:, None] & (n < N)[None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def add_splits_kernel(  # type: ignore[no-untyped-def]
    sums_ptr, bias_ptr, out_ptr, count,
    N: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums float32 [SPLITS, count] -> out [count], rows of N."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(sums_ptr + split * count.to(tl.int64) + i, mask=i < count, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + i % N, mask=i < count, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=i < count)


def _limit(call: Mapping[str, Any]) -> str | None:
    x, weight = call["x"], call["weight"]
    if weight.dtype != x.dtype:
        return f"a weight of {weight.dtype} with rows of {x.dtype}; it takes one dtype"
    return None


@operator(limit=_limit)
def batch_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Plan:
    """One launch, two where inputs are split."""
    features, inputs = weight.shape[-2:]
    out = x.new_empty((*x.shape[:-1], features))
    rows = x if weight.dim() == 3 else flat_rows(x).unsqueeze(0)
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    held = weight if weight.dim() == 3 else weight.unsqueeze(0)
    bias = None if bias is None else bias.contiguous()
    parts, num_rows, _ = rows.shape
    itemsize = x.dtype.itemsize
    tile = _PARTS[itemsize] if weight.dim() == 3 else tile_for(features, inputs, itemsize)
    splits, has_bias = tile.splits, bias is not None
    split = -(-inputs // (splits * tile.inputs)) * tile.inputs
    sums = out
    if splits > 1:
        sums = x.new_empty((splits, num_rows, features), dtype=torch.float32)
    values = dict(
        x_ptr=rows, weight_ptr=held, bias_ptr=held if bias is None else bias, out_ptr=sums,
        num_rows=num_rows, x_part=rows.stride(0), x_row=rows.stride(1), w_part=held.stride(0),
        w_row=held.stride(1), w_input=held.stride(2),
        N=features, K=inputs, SPLITS=splits, SPLIT_K=split, BLOCK_T=tile.rows,
        BLOCK_N=tile.features, BLOCK_K=tile.inputs, HAS_BIAS=has_bias,
        WIDEN=widen(batch_invariant_linear_kernel, rows),
    )  # fmt: skip
    grid = (-(-num_rows // tile.rows), -(-features // tile.features), parts * splits)
    products = Launch(batch_invariant_linear_kernel, grid, values, 128, num_stages=tile.stages)
    if splits == 1:
        return [products], out
    added = dict(
        sums_ptr=sums, bias_ptr=sums if bias is None else bias, out_ptr=out, count=out.numel(),
        N=features, SPLITS=splits, HAS_BIAS=has_bias, BLOCK=_ADDED,
    )  # fmt: skip
    grid = (-(-out.numel() // _ADDED), 1, 1)
    return [products, Launch(add_splits_kernel, grid, added, threads=128)], out

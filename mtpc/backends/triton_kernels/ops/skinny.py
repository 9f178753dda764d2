"""Linear layers of a few rows: a program has a few rows of the weight, and reads each once.

Tensor cores are not used: with so few rows, reading the weight takes longer than the arithmetic.
The inputs are in the device's cache, so each program computes the norm anew. A launch that begins
early reads its first weights, which are often all of them, while it waits for the launch before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.gpu.ops.skinny import MOST_ROWS, WIDTH_MULTIPLE
from mtpc.backends.triton_kernels.launch import (
    Launch,
    adjacent,
    await_launches,
    flat_rows,
    power_of_two,
)
from mtpc.backends.triton_kernels.operator import Plan, operator

_THREADS = 128
_WEIGHTS = 2048
"""Elements of the weight that a program has at once, 16 a thread; more if those of one feature are
more."""
_TILES = {1: (4096, 3), 2: (4096, 3), 4: (512, 4)}
"""Rows -> inputs and stages of a program's loop: the fastest of dozens on an H100, at the sizes of
a 0.5B and an 8B model. They decide the features of a program; a gated one has half as many."""


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    weight, up_weight, sums, up_sums, squares, x_ptr, added_ptr, norm_ptr, total_ptr, x_row,
    added_row, row, i, ROWS: tl.constexpr, K: tl.constexpr, HAS_NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The sums with the inputs i of all rows, by the loaded weights."""
    mask = (row < ROWS) & (i < K)
    x = tl.load(x_ptr + row * x_row + i, mask=mask, other=0.0)
    if HAS_NORM:
        added = tl.load(added_ptr + row * added_row + i, mask=mask, other=0.0)
        # The norm is of the rounded sum.
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        if tl.program_id(0) == 0:
            tl.store(total_ptr + row * K + i, x, mask=mask)
    wide = x.to(tl.float32)
    if HAS_NORM:
        squares += wide * wide
        scale = tl.load(norm_ptr + i, mask=i < K, other=0.0).to(tl.float32)
        wide *= 1.0 + scale if PLUS_ONE else scale
    sums += weight.to(tl.float32) * wide
    if GATED:
        up_sums += up_weight.to(tl.float32) * wide
    return sums, up_sums, squares


@triton.jit
def skinny_kernel(  # type: ignore[no-untyped-def]
    x_ptr, added_ptr, norm_ptr, weight_ptr, bias_ptr, total_ptr, out_ptr, x_row, added_row,
    ROWS: tl.constexpr, ROWS_PAD: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
    EPSILON: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """x, added [ROWS, K] with any row stride; weight [N, K], of gate and up if GATED;
    total [ROWS, K]; out [ROWS, N]. K is a multiple of 8."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS_PAD)[:, None, None]
    at = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[None, :, None] * K
    i = tl.arange(0, BLOCK_K)[None, None]
    sums = tl.zeros((ROWS_PAD, BLOCK_N, BLOCK_K), tl.float32)
    up_sums = tl.zeros((ROWS_PAD, BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((ROWS_PAD, 1, BLOCK_K), tl.float32)
    # An early launch reads its first weights while it waits.
    FIRST: tl.constexpr = BLOCK_K if EARLY or BLOCK_K >= K else 0
    if FIRST:
        weight = tl.load(at + i, mask=i < K, other=0.0)
        up_weight = weight
        if GATED:
            up_weight = tl.load(at + N * K + i, mask=i < K, other=0.0)
    await_launches(EARLY)
    if FIRST:
        sums, up_sums, squares = _add(
            weight, up_weight, sums, up_sums, squares, x_ptr, added_ptr, norm_ptr, total_ptr,
            x_row, added_row, row, i, ROWS, K, HAS_NORM, PLUS_ONE, GATED,
        )  # fmt: skip
    for start in tl.range(FIRST, K, BLOCK_K, num_stages=STAGES):
        j = start + i
        weight = tl.load(at + j, mask=j < K, other=0.0)
        up_weight = weight
        if GATED:
            up_weight = tl.load(at + N * K + j, mask=j < K, other=0.0)
        sums, up_sums, squares = _add(
            weight, up_weight, sums, up_sums, squares, x_ptr, added_ptr, norm_ptr, total_ptr,
            x_row, added_row, row, j, ROWS, K, HAS_NORM, PLUS_ONE, GATED,
        )  # fmt: skip
    out = tl.sum(sums, 2)
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(squares, 2) / K + EPSILON)
        out *= inverse
    if HAS_BIAS:
        out += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None]
    if GATED:
        up = tl.sum(up_sums, 2)
        if HAS_NORM:
            up *= inverse
        out = out / (1 + tl.exp(-out)) * up
    target = tl.arange(0, ROWS_PAD)[:, None]
    mask = (target < ROWS) & (n < N)[None]
    tl.store(out_ptr + target * N + n[None], out.to(out_ptr.dtype.element_ty), mask=mask)


def skinny_limit(call: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot take a call; None where it can."""
    x, weight = call["x"], call["weight"]
    rows, width = x.numel() // max(1, x.shape[-1]), x.shape[-1]
    if rows > MOST_ROWS:
        return f"{rows} rows; it takes up to {MOST_ROWS}"
    if width % WIDTH_MULTIPLE or not weight.is_contiguous():
        return (
            f"a weight {tuple(weight.shape)} by {tuple(weight.stride())}; it takes adjacent rows "
            f"of a multiple of {WIDTH_MULTIPLE}"
        )
    return None


def skinny_launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, gated: bool = False,
    norm: tuple[Tensor, Tensor, Tensor, float, bool] | None = None,
) -> Launch:  # fmt: skip
    """The launch of the kernel.

    Args:
        x: [rows, K].
        weight: [N, K], or [2N, K] if gated.
        bias: [N] or None.
        out: [rows, N]; gets the result.
        gated: whether silu(gate) * up follows.
        norm: the tensor that is added to x, the norm's weight, the tensor that gets the sum,
            epsilon and `plus_one`; None: there is no norm.
    """
    (rows, width), features = x.shape, weight.shape[0] // (2 if gated else 1)
    added, scale, total, epsilon, plus_one = norm or (x, x, x, 0.0, False)
    padded = power_of_two(rows)
    inputs, stages = _TILES[padded]
    block_k = min(inputs, power_of_two(width))
    block_n = max(1, _WEIGHTS // (block_k * (2 if gated else 1)))
    values = dict(
        x_ptr=x, added_ptr=added, norm_ptr=scale, weight_ptr=weight,
        bias_ptr=weight if bias is None else bias, total_ptr=total, out_ptr=out,
        x_row=x.stride(0), added_row=added.stride(0),
        ROWS=rows, ROWS_PAD=padded, N=features, K=width, BLOCK_N=block_n, BLOCK_K=block_k,
        HAS_NORM=norm is not None, PLUS_ONE=plus_one, EPSILON=float(epsilon),
        HAS_BIAS=bias is not None, GATED=gated, STAGES=stages,
    )  # fmt: skip
    return Launch(skinny_kernel, (-(-features // block_n), 1, 1), values, threads=_THREADS)


@operator(limit=skinny_limit, row_bound="its tiles depend on the rows")
def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Plan:
    """One launch."""
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if x.numel() == 0:
        return [], out
    return [skinny_launch(flat_rows(x), adjacent(weight, "a weight"), bias, out)], out


@operator(limit=skinny_limit, row_bound="its tiles depend on the rows")
def norm_linear(
    x: Tensor, added: Tensor, norm_weight: Tensor, epsilon: float, plus_one: bool, weight: Tensor,
    bias: Tensor | None, gated: bool,
) -> Plan:  # fmt: skip
    """One launch."""
    features = weight.shape[0] // (2 if gated else 1)
    total, out = results = x.new_empty(x.shape), x.new_empty((*x.shape[:-1], features))
    if x.numel() == 0:
        return [], results
    norm = (flat_rows(added), norm_weight.contiguous(), total, epsilon, plus_one)
    weight = adjacent(weight, "a weight")
    return [skinny_launch(flat_rows(x), weight, bias, out, gated, norm)], results

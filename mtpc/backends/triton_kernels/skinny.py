"""Linear layers of a few rows: a program has a few rows of the weight, and reads each once.

What a program reads of the inputs is in the device's cache, so each program computes the norm anew.
With one or two rows no tensor core is used: the arithmetic is hidden behind the weight's bytes.
With more, behind a norm, each warp multiplies a part of the inputs by instructions of 16 features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.early import await_launches
from mtpc.backends.triton_kernels.launch import Change, Choice, Launch, power_of_two, widen
from mtpc.backends.triton_kernels.tiles import dot
from mtpc.ops.skinny import MOST_NORM_ROWS, MOST_ROWS, MOST_WIDE_ROWS, WIDTH_MULTIPLE

_THREADS = 128
_TILES = {1: (4, 1024, 3), 2: (4, 1024, 3), 4: (4, 512, 4)}
"""Features of a program, inputs and stages of its loop, by rows: the fastest of a dozen on an H100,
at the sizes of a 0.5B and an 8B model. A gated program has half as many features."""
_LINE: tl.constexpr = tl.constexpr(64)
"""Numbers of a line of the caches."""
_AHEAD_BYTES = 16 << 20
"""Bytes of the weight that a launch asks for before it begins; caches hold several times that."""
_PRODUCT_THREADS, _PRODUCT_STAGES, _PROGRAMS = 128, 4, 128
_FEW, _MANY = (16, 64), (32, 32)
"""Features of a program with products, and inputs of one warp in a step of its loop. Many features
where x has more than eight rows, which every program reads, if that leaves so many programs. All
this, and the other configurations, were chosen on paper."""
_OF_FEW = (
    Change(num_stages=6, factors={"BLOCK_K": 0.5}),
    Change(factors={"BLOCK_N": 2, "BLOCK_K": 0.5}),
    Change(num_stages=3),
)
_OF_MANY = (Change(factors={"BLOCK_N": 0.5, "BLOCK_K": 2}), Change(num_stages=3))


@triton.jit
def _fetch(addresses):  # type: ignore[no-untyped-def]
    """Bring lines into the second-level cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def skinny_kernel(  # type: ignore[no-untyped-def]
    x_ptr, added_ptr, norm_ptr, weight_ptr, bias_ptr, total_ptr, out_ptr, x_row, added_row,
    ROWS: tl.constexpr, ROWS_PAD: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
    EPSILON: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x, added [ROWS, K] of any distance between rows; weight [N, K], of gate and up if GATED;
    total [ROWS, K]; out [ROWS, N]. K is a multiple of 8."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS_PAD)[:, None, None]
    at = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[None, :, None] * K
    if EARLY:
        lines = at + tl.minimum(tl.arange(0, AHEAD) * _LINE, K - 1)[None, None]
        _fetch(lines.to(tl.int64))
        if GATED:
            _fetch((lines + N * K).to(tl.int64))
    await_launches(EARLY)
    sums = tl.zeros((ROWS_PAD, BLOCK_N, BLOCK_K), tl.float32)
    up_sums = tl.zeros((ROWS_PAD, BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((ROWS_PAD, 1, BLOCK_K), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        i = start + tl.arange(0, BLOCK_K)[None, None]
        mask = (row < ROWS) & (i < K)
        weight = tl.load(at + i, mask=i < K, other=0.0)
        if GATED:
            up_weight = tl.load(at + N * K + i, mask=i < K, other=0.0)
        x = tl.load(x_ptr + row * x_row + i, mask=mask, other=0.0)
        if HAS_NORM:
            added = tl.load(added_ptr + row * added_row + i, mask=mask, other=0.0)
            # The norm is that of the sum as it is kept: rounded.
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


@triton.jit
def skinny_product_kernel(  # type: ignore[no-untyped-def]
    x_ptr, added_ptr, norm_ptr, weight_ptr, bias_ptr, total_ptr, out_ptr, x_row, added_row,
    ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr, BLOCK_K: tl.constexpr, PLUS_ONE: tl.constexpr,
    EPSILON: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, WIDEN: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `skinny_kernel` with a norm. A step of the loop takes PARTS * BLOCK_K inputs as a batch of
    products, one for each warp; parts are added at the end. All there is of bfloat16."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_T)[None, None]
    part = tl.arange(0, PARTS)[:, None, None] * BLOCK_K
    at = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[None, :, None] * K
    if EARLY:
        lines = at + tl.minimum(tl.arange(0, AHEAD) * _LINE, K - 1)[None, None]
        _fetch(lines.to(tl.int64))
        if GATED:
            _fetch((lines + N * K).to(tl.int64))
    await_launches(EARLY)
    sums = tl.zeros((PARTS, BLOCK_N, BLOCK_T), tl.float32)
    up_sums = tl.zeros((PARTS, BLOCK_N, BLOCK_T), tl.float32)
    squares = tl.zeros((PARTS, BLOCK_K // 8, BLOCK_T), tl.float32)
    for start in range(0, K, PARTS * BLOCK_K):
        i = start + part + tl.arange(0, BLOCK_K)[None, None]
        weight = tl.load(at + i, mask=i < K, other=0.0)
        k = start + part + tl.arange(0, BLOCK_K)[None, :, None]
        mask = (row < ROWS) & (k < K)
        x = tl.load(x_ptr + row * x_row + k, mask=mask, other=0.0)
        added = tl.load(added_ptr + row * added_row + k, mask=mask, other=0.0)
        # The norm is that of the sum as it is kept: rounded.
        total = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        # Programs share the work of storing it.
        turn = start // (PARTS * BLOCK_K) % tl.num_programs(0)
        kept = tl.where(tl.program_id(0) == turn, ROWS, 0)
        tl.store(total_ptr + row * K + k, total, mask=(row < kept) & (k < K))
        wide = total.to(tl.float32)
        # Eight side by side are of one thread.
        eights = tl.reshape(wide * wide, (PARTS, BLOCK_K // 8, 8, BLOCK_T))
        squares += tl.sum(eights, 2)
        scale = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        # Rounded before the inverse is known: bfloat16 has float32's range.
        scaled = (wide * (1.0 + scale if PLUS_ONE else scale)).to(x.dtype)
        sums += dot(weight, scaled, WIDEN)
        if GATED:
            up_weight = tl.load(at + N * K + i, mask=i < K, other=0.0)
            up_sums += dot(up_weight, scaled, WIDEN)
    inverse = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + EPSILON)[None]
    out = tl.sum(sums, 0) * inverse
    if HAS_BIAS:
        out += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        out = out / (1 + tl.exp(-out)) * (tl.sum(up_sums, 0) * inverse)
    target = tl.arange(0, BLOCK_T)[None]
    mask = (target < ROWS) & (n < N)[:, None]
    tl.store(out_ptr + target * N + n[:, None], out.to(out_ptr.dtype.element_ty), mask=mask)


def skinny_limit(call: Mapping[str, Any]) -> str | None:
    """Why a call is none for this kernel; None where it is."""
    x, weight = call["x"], call["weight"]
    rows, width = x.numel() // max(1, x.shape[-1]), x.shape[-1]
    most = MOST_NORM_ROWS if "norm_weight" in call and _multiplies(x) else MOST_ROWS
    if rows > most:
        return f"{rows} rows; it takes up to {most}"
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
        out: [rows, N], gets the result.
        gated: whether silu(gate) * up follows.
        norm: what is added to x, the norm's weight, where the sum goes, epsilon and `plus_one`.
    """
    (rows, width), features = x.shape, weight.shape[0] // (2 if gated else 1)
    added, scale, total, epsilon, plus_one = norm or (x, x, x, 0.0, False)
    arguments = dict(
        x_ptr=x, added_ptr=added, norm_ptr=scale, weight_ptr=weight,
        bias_ptr=weight if bias is None else bias, total_ptr=total, out_ptr=out,
        x_row=x.stride(0), added_row=added.stride(0),
    )  # fmt: skip
    ahead = max(1, min(width, _AHEAD_BYTES // (weight.shape[0] * weight.itemsize)) // _LINE.value)
    constants = dict(
        ROWS=rows, N=features, K=width, PLUS_ONE=plus_one, EPSILON=float(epsilon),
        HAS_BIAS=bias is not None, GATED=gated, AHEAD=power_of_two(ahead),
    )  # fmt: skip
    if norm is not None and rows > MOST_WIDE_ROWS and _multiplies(x):
        return _product_launch(arguments, constants)
    padded = power_of_two(rows)
    block_n, block_k, stages = _TILES[padded]
    block_n, block_k = block_n // (2 if gated else 1), min(block_k, power_of_two(width))
    constants |= dict(
        ROWS_PAD=padded, BLOCK_N=block_n, BLOCK_K=block_k, HAS_NORM=norm is not None, STAGES=stages
    )
    grid = (-(-features // block_n), 1, 1)
    return Launch(skinny_kernel, grid, arguments, constants, threads=_THREADS)


def _product_launch(arguments: dict[str, Any], constants: dict[str, Any]) -> Launch:
    block_t, features = power_of_two(constants["ROWS"], 8), constants["N"]
    are_many = block_t > 8 and features >= _PROGRAMS * _MANY[0]
    block_n, block_k = _MANY if are_many else _FEW
    constants |= dict(
        BLOCK_T=block_t, BLOCK_N=block_n, PARTS=_PRODUCT_THREADS // 32, BLOCK_K=block_k,
        WIDEN=widen(skinny_product_kernel, arguments["x_ptr"]),
    )  # fmt: skip
    choice = Choice(_OF_MANY if are_many else _OF_FEW, {"BLOCK_N": (0, "N")})
    return Launch(
        skinny_product_kernel, (-(-features // block_n), 1, 1), arguments, constants,
        threads=_PRODUCT_THREADS, num_stages=_PRODUCT_STAGES, choice=choice,
    )  # fmt: skip


def _multiplies(x: Tensor) -> bool:
    """Whether products take such rows: they are multiplied by the norm's weight before the norm is
    known, which could leave the range of float16."""
    return x.dtype == torch.bfloat16

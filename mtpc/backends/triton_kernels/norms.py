"""Root mean square norms: alone, with the residual sum before them, and both of a draft's entry.

A program has a whole row, or a few where rows are short, so each row is read once and its sum does
not depend on other rows. Results are rounded where the reference rounds.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, flat_rows, power_of_two

_ELEMENTS = 1024
"""Of a program whose rows are shorter: 8 heads of 128."""
_A_THREAD = 16
"""Elements, until a program has as many threads as it may."""
_MOST_THREADS = 512


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    count, N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr
):
    """This program's rows [BLOCK, 1], columns [1, N_PAD], and which of both there are."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    i = tl.arange(0, N_PAD)[None]
    return row, i, (row < count) & (i < N)


@triton.jit
def _normalise(  # type: ignore[no-untyped-def]
    x, weight, N: tl.constexpr, EPSILON: tl.constexpr, PLUS_ONE: tl.constexpr
):
    """x [rows, N_PAD], zeros from N on, by its root mean square and weight [1, N_PAD]. Takes loaded
    values: see `tiles.locate`."""
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / N + EPSILON)
    normed = wide * inverse[:, None]
    if PLUS_ONE:
        scaled = normed * (1.0 + weight.to(tl.float32))
    else:
        scaled = normed.to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    return scaled.to(x.dtype)


@triton.jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, count, x_row,
    N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr,
    EPSILON: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """x [count, N] of any distance between rows, out [count, N]."""
    row, i, mask = _block(count, N, N_PAD, BLOCK)
    weight = tl.load(weight_ptr + i, mask=i < N, other=0.0)
    x = tl.load(x_ptr + row * x_row + i, mask=mask, other=0.0)
    tl.store(out_ptr + row * N + i, _normalise(x, weight, N, EPSILON, PLUS_ONE), mask=mask)


@triton.jit
def add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, added_ptr, weight_ptr, total_ptr, out_ptr, count, x_row, added_row,
    N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr,
    EPSILON: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """x, added [count, N] of any distance between rows; total, out [count, N]."""
    row, i, mask = _block(count, N, N_PAD, BLOCK)
    weight = tl.load(weight_ptr + i, mask=i < N, other=0.0)
    x = tl.load(x_ptr + row * x_row + i, mask=mask, other=0.0)
    added = tl.load(added_ptr + row * added_row + i, mask=mask, other=0.0)
    # The norm is that of the sum as it is kept: rounded.
    total = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + row * N + i, total, mask=mask)
    tl.store(out_ptr + row * N + i, _normalise(total, weight, N, EPSILON, PLUS_ONE), mask=mask)


@triton.jit
def draft_entry_kernel(  # type: ignore[no-untyped-def]
    left_ptr, left_weight_ptr, right_ptr, right_weight_ptr, out_ptr, count, left_row, right_row,
    N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr,
    EPSILON: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """left, right [count, N] of any distance between rows, a program of one of them; out
    [count, 2N]."""
    row, i, mask = _block(count, N, N_PAD, BLOCK)
    half = tl.program_id(1)
    if half == 0:
        weight = tl.load(left_weight_ptr + i, mask=i < N, other=0.0)
        x = tl.load(left_ptr + row * left_row + i, mask=mask, other=0.0)
    else:
        weight = tl.load(right_weight_ptr + i, mask=i < N, other=0.0)
        x = tl.load(right_ptr + row * right_row + i, mask=mask, other=0.0)
    normed = _normalise(x, weight, N, EPSILON, PLUS_ONE)
    tl.store(out_ptr + row * (2 * N) + half * N + i, normed, mask=mask)


def rms_norm_launches(
    x: Tensor, weight: Tensor, epsilon: float, plus_one: bool, out: Tensor
) -> list[Launch]:
    """Launches of `mtpc::rms_norm`.

    Args:
        x: [..., N], at least one row.
        weight: [N].
        epsilon: of the op, and plus_one too.
        plus_one: scale by 1 + weight.
        out: as x, contiguous.
    """
    rows = flat_rows(x)
    arguments = dict(
        x_ptr=rows, weight_ptr=weight.contiguous(), out_ptr=out, x_row=rows.stride(0)
    )  # fmt: skip
    return [_launch(rms_norm_kernel, rows, arguments, epsilon, plus_one)]


def add_rms_norm_launches(
    summands: tuple[Tensor, Tensor], weight: Tensor, epsilon: float, plus_one: bool,
    results: tuple[Tensor, Tensor],
) -> list[Launch]:  # fmt: skip
    """Launches of `mtpc::add_rms_norm`.

    Args:
        summands: x and added, [..., N] both, at least one row.
        weight: [N].
        epsilon: of the op, and plus_one too.
        plus_one: scale by 1 + weight.
        results: total and its norm, as x, contiguous.
    """
    x, added = map(flat_rows, summands)
    arguments = dict(
        x_ptr=x, added_ptr=added, weight_ptr=weight.contiguous(),
        total_ptr=results[0], out_ptr=results[1], x_row=x.stride(0), added_row=added.stride(0),
    )  # fmt: skip
    return [_launch(add_rms_norm_kernel, x, arguments, epsilon, plus_one)]


def draft_entry_launches(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], epsilon: float, plus_one: bool,
    out: Tensor,
) -> list[Launch]:  # fmt: skip
    """Launches of `mtpc::draft_entry`.

    Args:
        left: what is normed, [..., N], at least one row, and its weight [N].
        right: as left, of the second half.
        epsilon: of the op, and plus_one too.
        plus_one: scale by 1 + weight.
        out: [..., 2N], contiguous.
    """
    first, second = flat_rows(left[0]), flat_rows(right[0])
    arguments = dict(
        left_ptr=first, left_weight_ptr=left[1].contiguous(),
        right_ptr=second, right_weight_ptr=right[1].contiguous(),
        out_ptr=out, left_row=first.stride(0), right_row=second.stride(0),
    )  # fmt: skip
    return [_launch(draft_entry_kernel, first, arguments, epsilon, plus_one, halves=2)]


def _launch(
    kernel: Any, x: Tensor, arguments: dict[str, Any], epsilon: float, plus_one: bool,
    halves: int = 1,
) -> Launch:  # fmt: skip
    """Of rows like x [rows, N]."""
    count, width = x.shape
    padded = power_of_two(width)
    block = max(1, _ELEMENTS // padded)
    constants = dict(
        N=width, N_PAD=padded, BLOCK=block, EPSILON=float(epsilon), PLUS_ONE=plus_one
    )  # fmt: skip
    threads = min(block * padded // _A_THREAD, _MOST_THREADS)
    grid = (-(-count // block), halves, 1)
    return Launch(kernel, grid, {**arguments, "count": count}, constants, threads=threads)

"""Device functions and launches of the operators with root mean square norms.

A program has a whole row, or a few where rows are short, so each row is read once and its sum does
not depend on other rows. Results are rounded where the reference rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, power_of_two

_ELEMENTS = 1024
"""Elements of a program whose rows are shorter than this: 8 heads of 128."""
_A_THREAD = 16
"""Elements of a thread, in programs of fewer than `_MOST_THREADS` threads."""
_MOST_THREADS = 512
_MAX_WIDTH = 16_384
"""The most elements of a row, which is normed in registers: 32 per thread."""


@triton.jit
def block_of(  # type: ignore[no-untyped-def]
    count, N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr
):
    """This program's rows [BLOCK, 1], columns [1, N_PAD], and the mask of those that exist."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    i = tl.arange(0, N_PAD)[None]
    return row, i, (row < count) & (i < N)


@triton.jit
def normalise(  # type: ignore[no-untyped-def]
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


def norm_limit(call: Mapping[str, Any]) -> str | None:
    """Why a row does not fit into a program's registers; None where it does."""
    width = next(iter(call.values())).shape[-1]
    return f"rows of {width}; it takes up to {_MAX_WIDTH}" if width > _MAX_WIDTH else None


def row_launch(kernel: Any, x: Tensor, values: dict[str, Any], halves: int = 1) -> Launch:
    """A launch whose programs have whole rows of x [rows, N]. Rows of a program depend on N only,
    so a row's sum has the same bits whatever other rows there are.

    Args:
        kernel: takes `values`, `count`, N, N_PAD and BLOCK.
        x: the rows.
        values: of its parameters but those four.
        halves: programs along the grid's second axis.
    """
    count, width = x.shape
    padded = power_of_two(width)
    block = max(1, _ELEMENTS // padded)
    sizes = dict(count=count, N=width, N_PAD=padded, BLOCK=block)
    threads = min(block * padded // _A_THREAD, _MOST_THREADS)
    return Launch(kernel, (-(-count // block), halves, 1), values | sizes, threads=threads)

"""Integers in the order of torch's `max` and `topk` of numbers; the largest is found faster."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST: tl.constexpr = tl.constexpr(-(2**31))
"""Below the order of every number."""
_NAN: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def order_of(x):  # type: ignore[no-untyped-def]
    """int32 in the order of x, of any 16 or 32 bits: equal for equal numbers, as -0.0 and 0.0 are,
    and greatest for NaN."""
    wide = x.to(tl.float32)
    bits = tl.where(wide == 0, 0.0, wide).to(tl.int32, bitcast=True)
    return tl.where(wide != wide, _NAN, bits ^ ((bits >> 31) & _NAN))


@triton.jit
def number_of(order):  # type: ignore[no-untyped-def]
    """A float32 number of this order."""
    return (order ^ ((order >> 31) & _NAN)).to(tl.float32, bitcast=True)


@triton.jit
def first_largest(order, place, END: tl.constexpr):  # type: ignore[no-untyped-def]
    """The greatest of `order`, and the least place, below END, that has it."""
    best = tl.max(order, 0)
    return best, tl.min(tl.where(order == best, place, END), 0)

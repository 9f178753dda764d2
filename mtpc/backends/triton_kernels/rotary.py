"""What the operators with rotary embedding share: a program has a few heads of one token."""

from __future__ import annotations

import triton
import triton.language as tl

from mtpc.backends.triton_kernels.launch import power_of_two

HEADS = 8
"""The most heads of a program: 8 heads of 128 are a few registers a thread."""


@triton.jit
def turn(a, b, cos_a, cos_b, sin_a, sin_b):  # type: ignore[no-untyped-def]
    """Both halves of heads, turned. Each product and the sum are rounded, as the operators that
    this replaces round them. Takes loaded values: see `tiles.locate`."""
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    along_a = (wide_a * cos_a.to(tl.float32)).to(a.dtype).to(tl.float32)
    along_b = (wide_b * cos_b.to(tl.float32)).to(a.dtype).to(tl.float32)
    across_a = (wide_b * sin_a.to(tl.float32)).to(a.dtype).to(tl.float32)
    across_b = (wide_a * sin_b.to(tl.float32)).to(a.dtype).to(tl.float32)
    return (along_a - across_a).to(a.dtype), (along_b + across_b).to(a.dtype)


def pads(width: int, turned: int) -> dict[str, int]:
    """The padded sizes of half the features that are turned, and of those that stay."""
    rest = max(width - turned, 1)
    return {"HALF_PAD": power_of_two(turned // 2), "REST_PAD": power_of_two(rest)}

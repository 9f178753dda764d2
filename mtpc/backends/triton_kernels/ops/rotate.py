"""Rotary embedding of heads that no cache write follows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, await_launches, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, attention_limit, operator

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


@triton.jit
def rotate_kernel(  # type: ignore[no-untyped-def]
    x_ptr, cos_ptr, sin_ptr, out_ptr, x_token, x_head, cos_token, sin_token,
    N: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_launches(EARLY)
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = C // 2
    i, rest = tl.arange(0, HALF_PAD), C + tl.arange(0, REST_PAD)
    cos_at, sin_at = cos_ptr + token * cos_token + i, sin_ptr + token * sin_token + i
    cos_a = tl.load(cos_at, mask=i < HALF, other=0.0)[None]
    cos_b = tl.load(cos_at + HALF, mask=i < HALF, other=0.0)[None]
    sin_a = tl.load(sin_at, mask=i < HALF, other=0.0)[None]
    sin_b = tl.load(sin_at + HALF, mask=i < HALF, other=0.0)[None]
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    mask = (head < N) & (i < HALF)[None]
    at, to = x_ptr + token * x_token + head * x_head, out_ptr + (token * N + head) * D
    a = tl.load(at + i[None], mask=mask, other=0.0)
    b = tl.load(at + HALF + i[None], mask=mask, other=0.0)
    a, b = turn(a, b, cos_a, cos_b, sin_a, sin_b)
    tl.store(to + i[None], a, mask=mask)
    tl.store(to + HALF + i[None], b, mask=mask)
    if D > C:
        beyond = (head < N) & (rest < D)[None]
        tl.store(to + rest[None], tl.load(at + rest[None], mask=beyond), mask=beyond)


@operator(limit=attention_limit)
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Plan:
    """One launch."""
    out = x.new_empty(x.shape)
    x, cos, sin = (part if part.stride(-1) == 1 else part.contiguous() for part in (x, cos, sin))
    tokens, heads, width = x.shape
    block = min(power_of_two(heads), HEADS)
    values = dict(
        x_ptr=x, cos_ptr=cos, sin_ptr=sin, out_ptr=out, x_token=x.stride(0), x_head=x.stride(1),
        cos_token=cos.stride(0), sin_token=sin.stride(0),
        N=heads, D=width, C=cos.shape[1], BLOCK=block, **pads(width, cos.shape[1]),
    )  # fmt: skip
    return [Launch(rotate_kernel, (tokens, -(-heads // block), 1), values, threads=128)], out

"""Rotary embedding and cache writes, apart and, before attention, in one launch.

A program has one token and a few of its heads: of queries, of keys or of values; or one row of a
cache without codes. Where there is a slot to write, and it is -1 or beyond the cache, the program
reads the slot and does nothing else. Caches may hold codes; those of int8, which are of whole rows
spread, take a launch for each part.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.codes import as_codes, codes_of, magnitudes, scales_of, spread
from mtpc.backends.triton_kernels.launch import Launch, await_launches, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, attention_limit, operator
from mtpc.errors import BackendError

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


_BLOCK = 1024


@triton.jit
def write_cache_kernel(  # type: ignore[no-untyped-def]
    cache_ptr, rows_ptr, slots_ptr, row_stride, num_slots,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_launches(EARLY)
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):  # A wild slot must not write into other memory.
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < WIDTH
        value = tl.load(rows_ptr + token * row_stride + column, mask=mask)
        target = cache_ptr + slot * WIDTH + column
        tl.store(target, value.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_codes_kernel(  # type: ignore[no-untyped-def]
    cache_ptr, scale_ptr, rows_ptr, slots_ptr, row_token, row_head, num_slots,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, D_PAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_launches(EARLY)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):  # A wild slot must not write into other memory.
        code: tl.constexpr = cache_ptr.dtype.element_ty
        head, d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D_PAD)
        mask = (head < H)[:, None] & (d < D)[None]
        at = rows_ptr + token * row_token + head[:, None] * row_head + d[None]
        value = tl.load(at, mask=mask, other=0.0)
        value = spread(value.to(tl.float32), D) if tl.int8 == code else value
        scales = scales_of(tl.max(magnitudes(value), 1), code)
        target = slot * H + head
        tl.store(scale_ptr + target, scales, mask=head < H)
        to = cache_ptr + target[:, None] * D + d[None]
        tl.store(to, codes_of(value, scales, code), mask=mask)


def _write_codes(cache: Tensor, rows: Tensor, slots: Tensor, scales: Tensor) -> list[Launch]:
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    tokens, heads, width = rows.shape
    block = min(power_of_two(heads), HEADS)
    values = dict(
        cache_ptr=as_codes(cache, scales, "cache"), scale_ptr=scales, rows_ptr=rows,
        slots_ptr=slots.contiguous(), row_token=rows.stride(0), row_head=rows.stride(1),
        num_slots=cache.shape[0] * cache.shape[1], H=heads, D=width, BLOCK=block,
        D_PAD=power_of_two(width),
    )  # fmt: skip
    return [Launch(write_codes_kernel, (tokens, -(-heads // block), 1), values, threads=128)]


def _write_limit(call: Mapping[str, Any]) -> str | None:
    """A head whose codes are made is held in registers."""
    return None if call["scales"] is None else attention_limit({"rows": call["rows"]})


@operator(limit=_write_limit, codes=True)
def write_cache(cache: Tensor, rows: Tensor, slot_mapping: Tensor, scales: Tensor | None) -> Plan:
    """One launch.

    Raises:
        BackendError: the cache is not contiguous, or scales are not as `as_codes` takes them.
    """
    if not cache.is_contiguous():
        raise BackendError(f"write_cache into strides {tuple(cache.stride())}; expected contiguous")
    if scales is not None:
        return _write_codes(cache, rows, slot_mapping, scales), None
    rows = rows.reshape(rows.shape[0], -1)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    width = rows.shape[1]
    block = min(power_of_two(width), _BLOCK)
    values = dict(
        cache_ptr=cache, rows_ptr=rows, slots_ptr=slot_mapping.contiguous(),
        row_stride=rows.stride(0), num_slots=cache.shape[0] * cache.shape[1],
        WIDTH=width, BLOCK=block,
    )  # fmt: skip
    grid = (rows.shape[0], -(-width // block), 1)
    return [Launch(write_cache_kernel, grid, values, threads=64)], None


@triton.jit
def _write_keys(  # type: ignore[no-untyped-def]
    to, scale_at, a, b, c, head, i, rest,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Heads whose features are those of a and b, which are turned, and of c."""
    HALF: tl.constexpr = C // 2
    mask, beyond = (head < H) & (i < HALF)[None], (head < H) & (rest < D)[None]
    if CODED:
        code: tl.constexpr = to.dtype.element_ty
        turned = tl.maximum(tl.max(magnitudes(a), 1), tl.max(magnitudes(b), 1))
        scales = scales_of(tl.maximum(turned, tl.max(magnitudes(c), 1)), code)
        tl.store(scale_at, scales[:, None], mask=head < H)
        a, b = codes_of(a, scales, code), codes_of(b, scales, code)
        c = codes_of(c, scales, code)
    tl.store(to + i[None], a, mask=mask)
    tl.store(to + HALF + i[None], b, mask=mask)
    if D > C:
        tl.store(to + rest[None], c, mask=beyond)


@triton.jit
def _write_values(  # type: ignore[no-untyped-def]
    to, scale_at, values, held, head, H: tl.constexpr, CODED: tl.constexpr
):
    if CODED:
        code: tl.constexpr = to.dtype.element_ty
        scales = scales_of(tl.max(magnitudes(values), 1), code)
        tl.store(scale_at, scales[:, None], mask=head < H)
        values = codes_of(values, scales, code)
    tl.store(to, values, mask=held)


@triton.jit
def rotate_and_write_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, slots_ptr, out_ptr, k_cache_ptr, v_cache_ptr,
    k_scale_ptr, v_scale_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, cos_token, sin_token, num_slots,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    CODED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_launches(EARLY)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    KV_BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    HALF: tl.constexpr = C // 2
    i, rest = tl.arange(0, HALF_PAD), C + tl.arange(0, REST_PAD)
    cos_at, sin_at = cos_ptr + token * cos_token + i, sin_ptr + token * sin_token + i
    cos_a = tl.load(cos_at, mask=i < HALF, other=0.0)[None]
    cos_b = tl.load(cos_at + HALF, mask=i < HALF, other=0.0)[None]
    sin_a = tl.load(sin_at, mask=i < HALF, other=0.0)[None]
    sin_b = tl.load(sin_at + HALF, mask=i < HALF, other=0.0)[None]
    slot = tl.load(slots_ptr + token).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)  # A wild slot must not write into other memory.
    if block < Q_BLOCKS:
        head = (block * BLOCK + tl.arange(0, BLOCK))[:, None]
        mask = (head < N) & (i < HALF)[None]
        at, to = q_ptr + token * q_token + head * q_head, out_ptr + (token * N + head) * D
        a = tl.load(at + i[None], mask=mask, other=0.0)
        b = tl.load(at + HALF + i[None], mask=mask, other=0.0)
        a, b = turn(a, b, cos_a, cos_b, sin_a, sin_b)
        tl.store(to + i[None], a, mask=mask)
        tl.store(to + HALF + i[None], b, mask=mask)
        if D > C:
            beyond = (head < N) & (rest < D)[None]
            tl.store(to + rest[None], tl.load(at + rest[None], mask=beyond), mask=beyond)
    elif live:
        part = block - Q_BLOCKS
        head = (part % KV_BLOCKS * BLOCK + tl.arange(0, BLOCK))[:, None]
        if part < KV_BLOCKS:
            mask = (head < H) & (i < HALF)[None]
            at, to = k_ptr + token * k_token + head * k_head, k_cache_ptr + (slot * H + head) * D
            a = tl.load(at + i[None], mask=mask, other=0.0)
            b = tl.load(at + HALF + i[None], mask=mask, other=0.0)
            a, b = turn(a, b, cos_a, cos_b, sin_a, sin_b)
            c = tl.load(at + rest[None], mask=(head < H) & (rest < D)[None], other=0.0)
            scale_at = k_scale_ptr + slot * H + head
            _write_keys(to, scale_at, a, b, c, head, i, rest, H, D, C, CODED)
        else:
            j = tl.arange(0, DV_PAD)[None]
            held = (head < H) & (j < DV)
            value = tl.load(v_ptr + token * v_token + head * v_head + j, mask=held, other=0.0)
            v_to = v_cache_ptr + (slot * H + head) * DV + j
            _write_values(v_to, v_scale_ptr + slot * H + head, value, held, head, H, CODED)


@operator(codes=True)
def rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
    slot_mapping: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
) -> Plan:  # fmt: skip
    """One launch; four where caches hold int8.

    Raises:
        BackendError: a cache is not contiguous, or scales are not as `as_codes` takes them.
    """
    if k_cache.dtype == torch.int8:
        (first, queries), (second, keys) = rotate.plan(q, cos, sin), rotate.plan(k, cos, sin)
        writes = (
            write_cache.plan(*each, slot_mapping, scales)[0]
            for each, scales in (((k_cache, keys), k_scale), ((v_cache, v), v_scale))
        )
        return [*first, *second, *chain.from_iterable(writes)], queries
    for cache in (k_cache, v_cache):
        if not cache.is_contiguous():
            strides = tuple(cache.stride())
            raise BackendError(f"rotate_and_write into strides {strides}; expected contiguous")
    k_codes, v_codes = as_codes(k_cache, k_scale, "k_cache"), as_codes(v_cache, v_scale, "v_cache")
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    cos, sin = (x if x.stride(1) == 1 else x.contiguous() for x in (cos, sin))
    heads, kv_heads, width, turned = q.shape[1], k.shape[1], q.shape[2], cos.shape[1]
    block, out = min(power_of_two(kv_heads), HEADS), q.new_empty(q.shape)
    values = dict(
        q_ptr=q, k_ptr=k, v_ptr=v, cos_ptr=cos, sin_ptr=sin, slots_ptr=slot_mapping.contiguous(),
        out_ptr=out, k_cache_ptr=k_codes, v_cache_ptr=v_codes,
        k_scale_ptr=k_cache if k_scale is None else k_scale,
        v_scale_ptr=v_cache if v_scale is None else v_scale,
        q_token=q.stride(0), q_head=q.stride(1), k_token=k.stride(0), k_head=k.stride(1),
        v_token=v.stride(0), v_head=v.stride(1), cos_token=cos.stride(0), sin_token=sin.stride(0),
        num_slots=k_cache.shape[0] * k_cache.shape[1],
        N=heads, H=kv_heads, D=width, DV=v.shape[2], C=turned, BLOCK=block,
        DV_PAD=power_of_two(v.shape[2]), CODED=k_scale is not None, **pads(width, turned),
    )  # fmt: skip
    grid = (q.shape[0], -(-heads // block) + 2 * -(-kv_heads // block), 1)
    return [Launch(rotate_and_write_kernel, grid, values, threads=128)], out

"""Rotary embedding of queries and keys, and both cache writes: one launch before attention.

A program has one token and a few of its heads, of queries, of keys or of values. For keys and
values with slot -1, or a slot beyond the cache, it does nothing. Caches may hold codes; those of
int8, which are of whole rows spread, take a launch for each part.
"""

from __future__ import annotations

from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.codes import as_codes, codes_of, magnitudes, scales_of
from mtpc.backends.triton_kernels.launch import Launch, await_launches, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.ops.rotate import HEADS, pads, rotate, turn
from mtpc.backends.triton_kernels.ops.write_cache import write_cache
from mtpc.errors import BackendError


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

"""Cache write: a program has one row, or a few heads of one that become codes. For slot -1 it reads
the slot and does nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.codes import as_codes, codes_of, magnitudes, scales_of, spread
from mtpc.backends.triton_kernels.launch import Launch, await_launches, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, attention_limit, operator
from mtpc.backends.triton_kernels.ops.rotate import HEADS
from mtpc.errors import BackendError

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


def _limit(call: Mapping[str, Any]) -> str | None:
    """A head whose codes are made is held in registers."""
    return None if call["scales"] is None else attention_limit({"rows": call["rows"]})


@operator(limit=_limit, codes=True)
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

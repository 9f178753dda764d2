"""Cache write: a program has one row. For slot -1 it reads the slot and does nothing else."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, await_launches, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator
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


@operator()
def write_cache(cache: Tensor, rows: Tensor, slot_mapping: Tensor, scales: None) -> Plan:
    """One launch.

    Raises:
        BackendError: the cache is not contiguous.
    """
    if not cache.is_contiguous():
        raise BackendError(f"write_cache into strides {tuple(cache.stride())}; expected contiguous")
    rows = rows.reshape(rows.shape[0], -1)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    width = rows.shape[1]
    block = min(power_of_two(width), _BLOCK)
    arguments = dict(
        cache_ptr=cache, rows_ptr=rows, slots_ptr=slot_mapping.contiguous(),
        row_stride=rows.stride(0), num_slots=cache.shape[0] * cache.shape[1],
    )  # fmt: skip
    grid = (rows.shape[0], -(-width // block), 1)
    constants = dict(WIDTH=width, BLOCK=block)
    return [Launch(write_cache_kernel, grid, arguments, constants, threads=64)], None

"""Caches of codes, for the kernel tests of every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from helpers.batches import Batch
from mtpc.models.caches import CODE_DTYPES
from mtpc.ops.attention import quantise_rows

CODES = [dtype for dtype in CODE_DTYPES.values() if dtype is not None]


def rows_of_all_kinds(dtype: torch.dtype, width: int, heads: int = 3) -> Tensor:
    """[9, heads, width]: small and large ones, zeros, NaN, infinities, and ties of codes; the last
    row's scales are subnormal numbers of float32, or its elements those of float16."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(9, heads, width, generator=generator)
    most = 4 if dtype == torch.float16 else 12
    rows[:8] *= torch.logspace(-most, most, 8)[:, None, None]
    rows[1, 0], rows[2, heads // 2, -1], rows[3, heads - 1, 0] = 0, torch.nan, -torch.inf
    rows[4, 0] = torch.arange(width) % 2 + 0.5
    rows[4, 0, 0] = 127
    # The interpreter reads no subnormal numbers of bfloat16.
    small = {torch.float16: 1e-6, torch.bfloat16: 1e-37}.get(dtype, 1e-40)
    rows[8] = (rows[8].sign() + rows[8]) * small
    return rows.to(dtype)


def hadamard(size: int) -> Tensor:
    """float64 [size, size] by its definition: -1 where two places share an odd number of bits."""
    odd = [[(i & j).bit_count() % 2 for j in range(size)] for i in range(size)]
    return 1 - 2 * torch.tensor(odd, dtype=torch.float64)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def coded(batch: Batch, codes: torch.dtype) -> tuple[Batch, dict[str, Tensor]]:
    """A batch whose caches hold codes, and the scales; what is in no slot is NaN."""
    found: dict[str, Tensor] = {}
    made: dict[str, Tensor] = {}
    for name in ("k", "v"):
        rows = getattr(batch, name).float()
        is_held = rows.isfinite().all(-1)
        read, scales = quantise_rows(rows.flatten(0, 1), codes)
        wild = torch.full((), 0x7F, dtype=torch.uint8)
        read = torch.where(is_held[..., None], bits(read).view(rows.shape), wild).view(codes)
        made[name] = read
        found[f"{name}_scale"] = torch.where(is_held, scales.view(is_held.shape), torch.nan)
    return replace(batch, **made), found


def paged(ops: Any, batch: Batch, scales: dict[str, Tensor], configs: str = "") -> Tensor:
    indices = (batch.table, batch.seq_lens, batch.starts)
    options = (batch.scale, batch.window, batch.softcap, batch.sinks)
    chosen = {"configs": configs} if configs else {}
    arguments = (batch.q, batch.k, batch.v, *indices, *options)
    out: Tensor = ops.paged_attention(*arguments, **scales, **chosen)
    return out

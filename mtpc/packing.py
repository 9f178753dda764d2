"""Weights in the order in which the cpu kernels read them.

A packed [N, K] weight is [ceil(N / 32), K / 2, 32, 2]: tiles of 32 output features, in each the
features' pairs of adjacent inputs side by side. A kernel reads a tile as one stream, whatever the
number of rows it multiplies, and a pair is what one lane of a bfloat16 dot product takes. Stacked
weights [E, N, K] are packed one by one.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

TILE = 32
"""Output features in a tile."""
_HUGE_PAGE = 2 << 20


def can_pack(weight: Tensor) -> bool:
    """Whether a weight has a packed form: bfloat16 matrices with an even number of inputs."""
    return weight.dtype == torch.bfloat16 and weight.dim() in (2, 3) and weight.shape[-1] % 2 == 0


def pack(weight: Tensor) -> Tensor:
    """The packed copy of a weight; features beyond its last are zeros.

    Args:
        weight: bfloat16 [..., N, K], K even.

    Returns:
        bfloat16 [..., ceil(N / 32), K / 2, 32, 2], in huge pages where the system has them:
        reading 2 MB a page instead of 4 KB was worth a third of the bandwidth on the machine of
        docs/performance.md.
    """
    packed = allocate_packed(weight.shape, weight.dtype)
    fill_packed(weight, packed)
    return packed


def allocate_packed(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for the packed copy of a weight of that shape, uninitialised."""
    *stack, features, inputs = shape
    return allocate((*stack, count_tiles(features), inputs // 2, TILE, 2), dtype)


def count_tiles(features: int) -> int:
    """Tiles that hold that many output features."""
    return -(-features // TILE)


def fill_packed(weight: Tensor, packed: Tensor) -> None:
    """What `pack` does, into memory at hand. The cpu kernel of this meaning is faster."""
    *stack, features, inputs = weight.shape
    whole, rest = divmod(features, TILE)
    pairs, to = _pairs(weight), packed.flatten(-2).view(torch.int32)
    tiles = pairs[..., : whole * TILE, :].reshape(*stack, whole, TILE, inputs // 2)
    to[..., :whole, :, :].copy_(tiles.transpose(-2, -1))
    if rest:
        to[..., whole, :, :].zero_()
        to[..., whole, :, :rest].copy_(pairs[..., whole * TILE :, :].transpose(-2, -1))


def _pairs(weight: Tensor) -> Tensor:
    """[..., N, K] as [..., N, K / 2] pairs, which are moved as one: six times as fast."""
    dense = weight.contiguous()
    if dense.storage_offset() % 2:
        dense = dense.clone()
    return dense.view(torch.int32)


def unpack(packed: Tensor, features: int) -> Tensor:
    """The weight that `pack` was given, [..., features, K]."""
    *stack, tiles, pairs, _, _ = packed.shape
    flat = packed.transpose(-3, -2).reshape(*stack, tiles * TILE, pairs * 2)
    return flat[..., :features, :]


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory, in huge pages from 2 MB on."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < _HUGE_PAGE or sys.platform != "linux":
        return torch.empty(shape, dtype=dtype)
    # Private: shared memory, which is what mmap gives otherwise, has a switch of its own for huge
    # pages, and it is off as a rule.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A kernel built without huge pages; small ones serve.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)

"""Weights in the order in which the cpu kernels read them.

A packed [N, K] weight is tiles of 32 output features; in a tile, groups of adjacent inputs that
fill four bytes, the 32 features' side by side: [ceil(N / 32), K / g, 32, g], with g = 2 for
bfloat16 and 4 for int8. A kernel reads a tile as one stream, whatever the number of rows it
multiplies, and a group is what one lane of a dot-product instruction takes. Stacked weights
[E, N, K] are packed one by one.

int8 weights have one scale an output feature, the largest magnitude of its row over 127, and are
stored plus 128 in uint8: dot-product instructions take one operand without a sign.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TILE = 32
"""Output features in a tile."""
LARGEST, ZERO = 127, 128
"""The largest magnitude of an int8 weight, and what stands for zero."""
_GROUP_BYTES = 4
_HUGE_PAGE = 2 << 20

Fill = Callable[[Tensor, Tensor], None]
"""Packs a weight into memory at hand: `fill_packed`, or a kernel of that meaning."""


def can_pack(weight: Tensor) -> bool:
    """Whether a weight has a packed form: bfloat16 matrices with an even number of inputs."""
    return weight.dtype == torch.bfloat16 and weight.dim() in (2, 3) and weight.shape[-1] % 2 == 0


def can_quantise(weight: Tensor) -> bool:
    """Whether a weight has an int8 form: matrices with a multiple of four inputs, and stacks."""
    is_matrix = weight.dim() in (2, 3) and weight.shape[-1] % _GROUP_BYTES == 0
    return weight.is_floating_point() and is_matrix


def pack(weight: Tensor) -> Tensor:
    """The packed copy of a weight; features beyond its last are zero bytes.

    Args:
        weight: bfloat16 or uint8 [..., N, K], K a multiple of g.

    Returns:
        [..., ceil(N / 32), K / g, 32, g], in huge pages where the system has them: reading 2 MB a
        page instead of 4 KB is worth a good deal of the bandwidth, see docs/performance.md.
    """
    packed = allocate_packed(weight.shape, weight.dtype)
    fill_packed(weight, packed)
    return packed


def allocate_packed(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for the packed copy of a weight of that shape, uninitialised."""
    *stack, features, inputs = shape
    group = _GROUP_BYTES // dtype.itemsize
    return allocate((*stack, count_tiles(features), inputs // group, TILE, group), dtype)


def count_tiles(features: int) -> int:
    """Tiles that hold that many output features."""
    return -(-features // TILE)


def fill_packed(weight: Tensor, packed: Tensor) -> None:
    """What `pack` does, into memory at hand. The cpu kernel of this meaning is faster."""
    *stack, features, _ = weight.shape
    whole, rest = divmod(features, TILE)
    groups, to = _groups(weight), packed.flatten(-2).view(torch.int32)
    tiles = groups[..., : whole * TILE, :].reshape(*stack, whole, TILE, groups.shape[-1])
    to[..., :whole, :, :].copy_(tiles.transpose(-2, -1))
    if rest:
        to[..., whole, :, :].zero_()
        to[..., whole, :, :rest].copy_(groups[..., whole * TILE :, :].transpose(-2, -1))


def _groups(weight: Tensor) -> Tensor:
    """[..., N, K] as [..., N, K / g] groups, which are moved as one: six times as fast."""
    dense = weight.contiguous()
    if dense.storage_offset() * dense.itemsize % _GROUP_BYTES:
        dense = dense.clone()
    return dense.view(torch.int32)


def row_scales(weight: Tensor) -> Tensor:
    """One step of each row's int8 form: float32 [..., N] of a weight [..., N, K]; 0 for rows of
    zeros."""
    return weight.abs().amax(-1).float() / LARGEST


def quantise(weight: Tensor) -> Tensor:
    """The int8 form of a weight [..., N, K]: uint8, 128 more than the nearest multiple of its
    row's scale."""
    scales = row_scales(weight)[..., None]
    return torch.where(scales == 0, 0, weight.float() / scales).round_().add_(ZERO).to(torch.uint8)


def unpack(packed: Tensor, features: int) -> Tensor:
    """The weight that `pack` was given, [..., features, K]."""
    *stack, tiles, groups, _, group = packed.shape
    flat = packed.transpose(-3, -2).reshape(*stack, tiles * TILE, groups * group)
    return flat[..., :features, :]


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory; from 2 MB on in huge pages, and beginning with one.

    A mapping as long as the tensor would lie anywhere, so that both its ends, up to 2 MB each,
    shared a huge page's place with its neighbours and were small pages: of a projection of 3 MB
    most, which was read at half the speed. What is rounded up here is under 2 MB a tensor.
    """
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < _HUGE_PAGE or sys.platform != "linux":
        return torch.empty(shape, dtype=dtype)
    whole = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    # Private: shared memory, which is what mmap gives otherwise, has a switch of its own for huge
    # pages, and it is off as a rule. What is skipped to begin with a page is never touched.
    memory = mmap.mmap(-1, whole + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A kernel built without huge pages; small ones serve.
        memory.madvise(mmap.MADV_HUGEPAGE)
    skipped = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    flat = torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=skipped)
    return flat.view(shape)

"""Packed weights: weights in the order in which the cpu kernels read them.

A packed weight [N, K] consists of tiles of 32 output features. A tile holds groups of g adjacent
inputs that fill four bytes: g = 2 for bfloat16, g = 4 for codes of 8 bits. Groups of the 32
features lie side by side. So the shape is [ceil(N / 32), K / g, 32, g]. A kernel reads a tile as
one stream for any number of rows, and one lane of a dot-product instruction takes one group. In a
stack [E, N, K] each weight is packed by itself.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mtpc.weights.block_rows import BlockRows

TILE = 32
"""Output features in a tile."""
_GROUP_BYTES = 4
_HUGE_PAGE, _LINE = 2 << 20, 64
_MAPPED_BYTES = 1 << 17
"""From so many bytes on, zeros are pages of their own."""
_CHUNK_BYTES = 64 << 20
"""Memory that small weights share. What is never touched of it takes none."""
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's flag of that name, which Python knows since 3.13; this is its value on x86 and ARM."""


Allocate: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""(shape, dtype) -> memory without contents."""


class Fill(Protocol):
    """Packs a weight into given memory: `fill_packed`, or a kernel that does it."""

    def __call__(self, weight: Tensor, packed: Tensor, finite: Tensor | None = None) -> None:
        """See `fill_packed`."""


def can_pack(weight: Tensor) -> bool:
    """Whether a weight can be packed: a bfloat16 matrix or stack with an even number of inputs."""
    return weight.dtype == torch.bfloat16 and weight.dim() in (2, 3) and weight.shape[-1] % 2 == 0


def pack(weight: Tensor) -> Tensor:
    """A packed copy of a weight. Features that fill the last tile are zero bytes.

    Args:
        weight: bfloat16 or uint8 [..., N, K], K a multiple of g.

    Returns:
        [..., ceil(N / 32), K / g, 32, g] in huge pages, if the system has them. Pages of 2 MB are
        read faster than pages of 4 KB.
    """
    packed = allocate(packed_shape(weight.shape, weight.dtype), weight.dtype)
    fill_packed(weight, packed)
    return packed


def packed_shape(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of the packed copy of a weight of this shape and dtype."""
    *stack, features, inputs = shape
    group = _GROUP_BYTES // dtype.itemsize
    return (*stack, count_tiles(features), inputs // group, TILE, group)


def count_tiles(features: int) -> int:
    return -(-features // TILE)


def fill_packed(weight: Tensor, packed: Tensor, finite: Tensor | None = None) -> None:
    """Pack a weight into memory of the shape that `pack` gives. A cpu kernel does the same faster.
    `finite`, bool [1], becomes False if the weight holds NaN or infinity: a kernel that packs has
    every value at hand."""
    if finite is not None:
        finite.logical_and_(weight.isfinite().all())
    dense = weight.contiguous()
    if dense.storage_offset() * dense.itemsize % _GROUP_BYTES:
        dense = dense.clone()
    # Moving whole groups is six times as fast as moving their elements.
    fill_tiles(dense.view(torch.int32), packed.flatten(-2).view(torch.int32))


def fill_tiles(rows: Tensor, tiles: Tensor) -> None:
    """Put rows [..., N, G] into tiles [..., ceil(N / 32), G, 32]; zeros fill the last one."""
    whole, rest = divmod(rows.shape[-2], TILE)
    full = rows[..., : whole * TILE, :].unflatten(-2, (whole, TILE))
    tiles[..., :whole, :, :] = full.transpose(-2, -1)
    if rest:
        tiles[..., whole, :, :] = 0
        tiles[..., whole, :, :rest] = rows[..., whole * TILE :, :].transpose(-2, -1)


def unpack(packed: Tensor, features: int) -> Tensor:
    """The weight [..., features, K] from its packed copy; the inverse of `pack`."""
    *stack, tiles, groups, _, group = packed.shape
    flat = packed.transpose(-3, -2).reshape(*stack, tiles * TILE, groups * group)
    return flat[..., :features, :]


def held_bytes(nbytes: int) -> int:
    """Bytes of memory that `allocate` takes on Linux for a tensor of so many."""
    return nbytes if nbytes < _HUGE_PAGE else -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory. Tensors of at least 2 MB get huge pages and begin with one.

    A mapping of exactly the tensor's size may begin anywhere, so up to 2 MB at both ends would be
    small pages. That is most of a projection of 3 MB, which was then read at half the speed.
    Rounding up to whole huge pages costs less than 2 MB of memory per tensor.
    """
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < _HUGE_PAGE or sys.platform != "linux":
        return torch.empty(shape, dtype=dtype)
    # Bytes before the first huge page are never touched.
    memory = map_memory(held_bytes(nbytes) + _HUGE_PAGE)
    skipped = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    flat = torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=skipped)
    return flat.view(shape)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of zeros. What is never written of a large tensor takes none."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < _MAPPED_BYTES or sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


class SharedPages:
    """Huge pages that weights share: small pages are read at half the speed, and a weight with
    pages of its own wastes a part of the last one."""

    early = 0

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def give_back(self) -> None:
        """Give back what `mtpc.weights.early_pages` has taken and nothing used."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As the function of that name; tensors of less than a chunk share pages."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if not _LINE <= nbytes < _CHUNK_BYTES:
            return allocate(shape, dtype)
        if self._used + nbytes > len(self._chunk):
            self._chunk, self._used = allocate((_CHUNK_BYTES,), torch.uint8), 0
        flat = self._chunk[self._used :][:nbytes]
        self._used += -(-nbytes // _LINE) * _LINE
        return flat.view(dtype).view(shape)

    def take(self, tensor: Tensor) -> Tensor:
        """A copy in shared pages; the tensor itself if it is large, or not dense on the CPU."""
        is_dense = tensor.device.type == "cpu" and tensor.is_contiguous()
        if not (is_dense and _LINE <= tensor.nbytes < _HUGE_PAGE):
            return tensor
        return self.allocate(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def map_memory(nbytes: int) -> mmap.mmap:
    """New memory of Linux, in huge pages where possible; it may begin with small pages.

    The mapping is private: shared memory, mmap's default, gets huge pages only by a separate switch
    of Linux that is usually off. Nothing is reserved for it, because a build never fills it and may
    ask for more than the machine has.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    memory = mmap.mmap(-1, nbytes, flags=flags)
    with contextlib.suppress(OSError):  # Without huge pages in the kernel, small pages serve.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


Piece = Literal["codes", "scales", "zeros"]
PackedWeight = dict[Piece, Tensor]
"""The tensors of a grouped weight in the kernels' order."""
FillBlocks: TypeAlias = "Callable[[BlockRows, PackedWeight], None]"
"""Packs rows as a file has them into given memory."""


@dataclass(frozen=True)
class Packer:
    """How weights are packed: `fill` packs a weight, or codes; `fill_blocks` rows as a file has
    them, or is None if they are decoded first; `allocate` makes memory of a shape and a dtype for
    them."""

    fill: Fill = fill_packed
    fill_blocks: FillBlocks | None = None
    allocate: Allocate = allocate


PACKER = Packer()
"""Packs without a kernel, into memory of each weight's own."""

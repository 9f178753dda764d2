"""The null device's memory: what no tensor is on any more is used again, as in a graph's pool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from mtpc.backends.memory import GRANULE


@dataclass(frozen=True)
class Place:
    """A tensor on a block, without a reference that would keep the block in use.

    Attributes:
        block: uint8 [bytes].
        like: a tensor of the same dtype, sizes, strides and offset, on the device "meta".
    """

    block: Tensor
    like: Tensor

    def tensor(self) -> Tensor:
        """A tensor at this place."""
        like, out = self.like, torch.empty(0, dtype=self.like.dtype)
        storage = self.block.untyped_storage()
        return out.set_(storage, like.storage_offset(), like.shape, like.stride())


@dataclass(frozen=True)
class _Use:
    """A block in use.

    Attributes:
        block: the block.
        nbytes: number of bytes that were asked for.
        storage: a weak reference to the storage that tensors on the block share.
    """

    block: Tensor
    nbytes: int
    storage: StorageWeakRef


class Pool:
    """Blocks of memory for the temporaries of recorded runs.

    A block is free once no tensor of the program is on it, and the next temporary that fits takes
    it. A program that goes on using such memory reads what the next temporary wrote, as it would on
    a device. All runs on one stream share the pool.

    Attributes:
        nbytes: bytes of all blocks.
        peak: most bytes that were in use at one time, without rounding.
    """

    def __init__(self) -> None:
        self.nbytes = self.peak = 0
        self._free: list[Tensor] = []
        self._uses: dict[int, _Use] = {}

    def adopt(self, result: Any, given: Iterable[Tensor]) -> Any:
        """Move an operator's new tensors to blocks; views of what it was given stay as they are."""
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        moved: dict[int, torch.UntypedStorage] = {}

        def move(tensor: Tensor) -> Tensor:
            old = tensor.untyped_storage()
            if old.nbytes() == 0 or old.data_ptr() in known:
                return tensor
            if old.data_ptr() not in moved:
                moved[old.data_ptr()] = self._take(old.nbytes())
                moved[old.data_ptr()].copy_(old)
            out = torch.empty(0, dtype=tensor.dtype)
            return out.set_(
                moved[old.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride()
            )

        return tree_map_only(Tensor, move, result)

    def place(self, tensor: Tensor) -> Tensor | Place:
        """Where a tensor is on a block; the tensor itself if it is on none."""
        use = self._uses.get(tensor.untyped_storage().data_ptr())
        if use is None:
            return tensor
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        like = meta.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return Place(use.block, like)

    def _take(self, nbytes: int) -> torch.UntypedStorage:
        """A storage of its own on the smallest free block that is large enough, or on a new one."""
        self._release()
        fits = [block for block in self._free if block.numel() >= nbytes]
        if fits:
            block = min(fits, key=Tensor.numel)
            self._free = [other for other in self._free if other is not block]
        else:
            block = torch.empty(-(-nbytes // GRANULE) * GRANULE, dtype=torch.uint8)
            self.nbytes += block.numel()
        storage = torch.from_numpy(block.numpy()[:nbytes]).untyped_storage()
        self._uses[storage.data_ptr()] = _Use(block, nbytes, StorageWeakRef(storage))
        self.peak = max(self.peak, sum(use.nbytes for use in self._uses.values()))
        return storage

    def _release(self) -> None:
        """Free each block that no tensor is on any more."""
        for pointer, use in list(self._uses.items()):
            if use.storage.expired():
                self._free.append(use.block)
                del self._uses[pointer]

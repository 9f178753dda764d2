"""A step's results side by side in one memory, so that one copy brings them to the host.

Results are the buffers with `BufferSpec.is_result`. They are packed if steps stay in the process
that compiled them. Packages are bound to separate buffers instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from mtpc.capture.graph import StepGraph, set_tensor

_ALIGNMENT = 16
"""Bytes that kernels read or write at once, from the beginning of a tensor."""


def pack_results(graph: StepGraph) -> None:
    """Move the results of a step, which has not been lowered yet, to one memory."""
    buffers = graph.buffers()
    held = {name: buffers[name] for name in graph.layout.results}
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in held.values()]
    memory = next(iter(held.values())).new_empty(sum(sizes), dtype=torch.uint8)
    for (name, tensor), part in zip(held.items(), memory.split(sizes), strict=True):
        packed = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        packed.copy_(tensor)
        set_tensor(graph.module, name, packed)


class HostCopies:
    """The results of a step in the host's memory, which is pinned if they come from a device.

    There are two copies, taken in turns: with `async_scheduling` the host reads a step's results
    after the launch of the next step, and before the launch of the one after that.

    Args:
        results: a step's, by name. If they are packed, one copy takes them all.
    """

    def __init__(self, results: Mapping[str, Tensor]):
        held = list(results.values())
        is_packed = len({tensor.untyped_storage().data_ptr() for tensor in held}) == 1
        self._sources = [_whole(held[0])] if is_packed else held
        self._turns = itertools.cycle([self._place(results, is_packed) for _ in range(2)])

    def _place(
        self, results: Mapping[str, Tensor], is_packed: bool
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """New memory for a copy of every source; and the results in it."""
        copies = [
            torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
            for source in self._sources
        ]
        if not is_packed:
            return copies, dict(zip(results, copies, strict=True))
        return copies, {name: _like(tensor, copies[0]) for name, tensor in results.items()}

    def take(self) -> Mapping[str, Tensor]:
        """Copy the results behind the work that is launched already; the host does not wait.

        Returns:
            The results by name. The call after the next one overwrites them.
        """
        copies, results = next(self._turns)
        for copy, source in zip(copies, self._sources, strict=True):
            copy.copy_(source, non_blocking=True)
        return results


def _whole(tensor: Tensor) -> Tensor:
    """All the memory that a tensor is a part of, as bytes."""
    return tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _like(tensor: Tensor, packed: Tensor) -> Tensor:
    """The part of the packed bytes that holds a result."""
    begin = tensor.storage_offset() * tensor.itemsize
    return packed[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

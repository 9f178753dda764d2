"""A step's results side by side in one memory, so that one copy brings them to the host.

Results are the buffers with `BufferSpec.is_result`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mtpc.layout import Layout

_ALIGNMENT = 16
"""Bytes that kernels read or write at once, from the beginning of a tensor."""


def allocate_results(
    layout: Layout, names: Iterable[str], device: torch.device
) -> dict[str, Tensor]:
    """Buffers that are side by side in one memory, filled with their padding, by name."""
    held = {name: layout.allocate(name, device) for name in names}
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in held.values()]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    return {
        name: part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        for (name, tensor), part in zip(held.items(), memory.split(sizes), strict=True)
    }


class HostCopies:
    """The results of a step in the host's memory, which is pinned if they come from a device.

    There are two copies, taken in turns: with `async_scheduling` the host reads a step's results
    after the launch of the next step, and before the launch of the one after that.

    Args:
        results: a step's, by name, side by side as `allocate_results` has them.
    """

    def __init__(self, results: Mapping[str, Tensor]):
        self._source = _whole(next(iter(results.values())))
        self._turns = itertools.cycle([self._place(results) for _ in range(2)])

    def _place(self, results: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """New memory for a copy; and the results in it."""
        source = self._source
        copy = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
        return copy, {name: _like(tensor, copy) for name, tensor in results.items()}

    def take(self) -> Mapping[str, Tensor]:
        """Copy the results behind the work that is launched already; the host does not wait.

        Returns:
            The results by name. The call after the next one overwrites them.
        """
        copy, results = next(self._turns)
        copy.copy_(self._source, non_blocking=True)
        return results


def _whole(tensor: Tensor) -> Tensor:
    """All the memory that a tensor is a part of, as bytes."""
    return tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _like(tensor: Tensor, packed: Tensor) -> Tensor:
    """The part of the packed bytes that holds a result."""
    begin = tensor.storage_offset() * tensor.itemsize
    return packed[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

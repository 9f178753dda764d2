"""A step's results side by side in one memory, so that one copy brings them to the host.

Results are the buffers with `BufferSpec.is_result`. They are packed if steps stay in the process
that compiled them. Packages are bound to separate buffers instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


def copy_results(buffers: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Results on the CPU, when the work before this call is done: by one copy if they are packed.

    From a device the copies go to pinned memory, and the host does not wait for them.
    """
    held = {name: buffers[name] for name in names}
    if len({tensor.untyped_storage().data_ptr() for tensor in held.values()}) > 1:
        return {name: _to_host(tensor) for name, tensor in held.items()}
    first = next(iter(held.values()))
    whole = first.new_empty(0, dtype=torch.uint8).set_(first.untyped_storage())
    packed = _to_host(whole)
    return {name: _like(tensor, packed) for name, tensor in held.items()}


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", non_blocking=True, copy=True)


def _like(tensor: Tensor, packed: Tensor) -> Tensor:
    """The part of the packed bytes that holds a result."""
    begin = tensor.storage_offset() * tensor.itemsize
    return packed[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

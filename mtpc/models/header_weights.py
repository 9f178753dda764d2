"""A checkpoint's weights by their headers alone, so that building a step reads no weight.

transformers loads such weights as it loads tensors: it renames, checks, stacks and joins them, on
the meta device. Then each parameter gets memory of its own, which nothing fills or reads. Tracing,
passes and lowering see its dtype, shape and strides.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.packing import allocate

_SHARD = ".shard_"
"""A tensor `X.weight` may be stored in shards of rows, `X.shard_0.weight` and so on."""


def whole_name(name: str) -> str:
    """The name of the tensor that a stored one is a shard of; its own name if it is none."""
    stem, _, part = name.rpartition(".")
    whole, _, number = stem.rpartition(_SHARD)
    return f"{whole}.{part}" if whole and number.isdecimal() else name


def shards_of(name: str, stored: Container[str]) -> tuple[str, ...]:
    """The shards of a tensor among stored ones, in the order of their rows."""
    stem, _, part = name.rpartition(".")
    numbered = (f"{stem}{_SHARD}{number}.{part}" for number in count())
    return tuple(takewhile(stored.__contains__, numbered))


class HeaderWeights:
    """The weights of one checkpoint, while a model is loaded from its headers, which say dtypes and
    shapes."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self._stored: dict[int, tuple[Tensor, str]] = {}
        self._reserved: dict[int, tuple[Tensor, Tensor]] = {}
        self._origins: dict[int, str] = {}

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The stored tensor on the meta device, cast to a dtype."""
        made = self._checkpoint.meta_tensor(name).to(dtype)
        self._stored[made.untyped_storage()._cdata] = (made, name)
        return made

    def slices(self, names: Iterable[str]) -> dict[str, Any]:
        """Stored tensors by name, in the form of safetensors slices, as transformers takes them.

        Shards of rows are one tensor. What transformers joins of them it moves to a device, which a
        meta tensor cannot.
        """
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(whole_name(name), []).append(name)
        return {name: _HeaderSlice(self, tuple(parts)) for name, parts in found.items()}

    def reserve(self, roots: Iterable[nn.Module]) -> None:
        """Give every meta tensor of these modules memory; tied ones stay tied."""
        modules = {id(m): m for root in roots for m in root.modules()}
        for module in modules.values():
            tables: list[dict[str, Any]] = [module._parameters, module._buffers]
            for held in tables:
                for name, tensor in held.items():
                    if tensor is not None and tensor.is_meta:
                        held[name] = self._memory_of(tensor)

    def origin(self, tensor: Tensor) -> str | None:
        """The name of the stored tensor that a reserved tensor equals, up to its dtype.

        None if it is made from several stored tensors, or in another way.
        """
        return self._origins.get(id(tensor))

    def _memory_of(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self._reserved:
            return self._reserved[id(tensor)][1]
        made = allocate(tuple(tensor.shape), tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        self._reserved[id(tensor)] = (tensor, made)
        stored = self._stored.get(tensor.untyped_storage()._cdata)
        layout = (tensor.shape, tensor.stride(), tensor.storage_offset())
        if stored is not None and layout == (stored[0].shape, stored[0].stride(), 0):
            self._origins[id(made)] = stored[1]  # It is all of the stored one, in the same order.
        return made


@dataclass(frozen=True)
class _HeaderSlice:
    """What transformers reads by `slice[...].to(device, dtype)`; the device stays meta."""

    weights: HeaderWeights
    parts: tuple[str, ...]

    def __getitem__(self, index: Any) -> _HeaderSlice:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor, of this dtype."""
        first, *more = (self.weights.tensor(name, dtype) for name in self.parts)
        return torch.cat([first, *more]) if more else first

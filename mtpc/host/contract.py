"""The contract with hosts: what each buffer holds and what writes it (docs/embedding.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpc.layout import Layout, Writer


@dataclass(frozen=True)
class HostBuffer:
    """A tensor that the host provides: contiguous, of exactly this shape and dtype.

    Attributes:
        name: as in the contract, docs/embedding.md.
        shape: sizes.
        dtype: element type.
        pad: the value of unused rows, and the value before anything is written.
        needs_pad: whether unused rows must hold `pad`; without that they may hold anything.
        by: what writes it.
        meaning: what it holds, and when it is written.
        is_paged: whether its rows are pages that the block table names: the host's own pool, or a
            part of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pad: int
    needs_pad: bool
    by: tuple[Writer, ...]
    meaning: str
    is_paged: bool

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of a contiguous tensor of this shape, in elements."""
        return torch.empty(self.shape, device="meta").stride()

    def allocate(self, device: torch.device | str = "cpu") -> Tensor:
        """A new tensor for this buffer, filled with `pad`."""
        return torch.full(self.shape, self.pad, dtype=self.dtype, device=device)


def host_buffers(layout: Layout, names: Iterable[str]) -> dict[str, HostBuffer]:
    """Buffers of a layout as the host sees them."""
    return {
        name: HostBuffer(
            name,
            layout.shape(name),
            spec.dtype,
            spec.pad,
            spec.needs_pad,
            spec.writers,
            spec.meaning,
            spec.is_paged,
        )
        for name, spec in ((name, layout[name]) for name in names)
    }

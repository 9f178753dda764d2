"""Memory of each rank's GPU that kernels of the other ranks read and write, by process group.

A rank's memory is two sets of `BLOCKS` blocks, then int64 [BLOCKS, ranks]: how often each rank has
given its part of a block. `ranks/exchanges.py` makes it; the kernels of
`triton_kernels/ops/exchanges.py` use it by the name of the process group. **It has never been used
on a GPU.**
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BLOCKS, BLOCK_BYTES = 256, 2048
"""A program has a block. All programs of an exchange must fit on a GPU at once, as each waits for
the same program of other GPUs. They have 64 threads; a GPU of `targets` has room for thousands."""
MOST_BYTES = BLOCKS * BLOCK_BYTES
"""The largest part, 512 KiB. So far vLLM's `custom_all_reduce.cuh` has up to four GPUs read all
parts at once. Never measured here."""
FLAG_BYTES = 8


def bytes_of(ranks: int) -> int:
    """How much memory each rank has."""
    return 2 * MOST_BYTES + BLOCKS * ranks * FLAG_BYTES


@dataclass(frozen=True)
class PeerMemory:
    """One rank's view of the memory of all.

    Attributes:
        rank: whose view it is.
        own: uint8 [bytes_of(ranks)], this rank's memory; zeros before the first exchange.
        addresses: int64 [ranks], on the rank's device: where the memory of each rank begins there,
            at a multiple of 16.
        handle: what keeps the memory of the others mapped.
    """

    rank: int
    own: Tensor = field(repr=False)
    addresses: Tensor = field(repr=False)
    handle: Any = field(default=None, repr=False)

    @property
    def flags(self) -> Tensor:
        """int64 [BLOCKS, ranks], a view of `own`."""
        return self.own[2 * MOST_BYTES :].view(torch.int64).view(BLOCKS, -1)

    def let_go(self) -> None:
        """End the waits of this rank's kernels, now and later; they then give wrong values."""
        most = torch.full(self.flags.shape, torch.iinfo(torch.int64).max)
        device = self.own.device
        beside = torch.cuda.stream(torch.cuda.Stream(device)) if self.own.is_cuda else nullcontext()
        with beside:
            self.flags.copy_(most, non_blocking=True)


PEERS: dict[str, PeerMemory] = {}
"""By the name of the process group; groups without such memory have no entry."""

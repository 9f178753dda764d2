"""Memory that processes share, in the place of the memory of GPUs: for Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import torch

from mtpc.backends.peer_memory import PEERS, PeerMemory, bytes_of


def share_mapped(rank: int, size: int, group: str, path: Path) -> PeerMemory:
    """Give the kernels of a rank a file of zeros as the memory of all ranks.

    Args:
        rank: of this process.
        size: number of ranks.
        group: name of the process group.
        path: the file, the same on all ranks; the first one that comes makes it.
    """
    nbytes = bytes_of(size)
    assert nbytes % 16 == 0
    whole = torch.from_file(str(path), shared=True, size=size * nbytes, dtype=torch.uint8)
    addresses = whole.data_ptr() + nbytes * torch.arange(size)
    own = whole[rank * nbytes : (rank + 1) * nbytes]
    PEERS[group] = PeerMemory(rank, own, addresses, whole)
    return PEERS[group]

"""Measures the present memory bandwidth, which limits decoding at small batches."""

from __future__ import annotations

import time

import torch

from mtpc.weights.packing import allocate

BUFFER_BYTES = 1 << 30
"""More than the caches hold, and as much as a step reads at 0.5B: a Xeon's 480 MB of third level
let 384 MB be read a twentieth faster than a gigabyte."""
PASSES = 5
"""The fastest pass counts, because others were slowed down by something else."""


class BandwidthProbe:
    """Reads a buffer from end to end with torch's threads.

    Args:
        num_bytes: the buffer's size.
    """

    def __init__(self, num_bytes: int = BUFFER_BYTES) -> None:
        # Ones, not zeros: untouched pages of zeros are all the same page, and stay in the cache.
        # In huge pages, as packed weights are: that is where the machine reads fastest.
        self._buffer = allocate((num_bytes // 4,), torch.float32).fill_(1)

    def read(self) -> float:
        """Bytes a second."""
        return self._buffer.nbytes / min(self._pass() for _ in range(PASSES))

    def _pass(self) -> float:
        start = time.perf_counter()
        self._buffer.sum()
        return time.perf_counter() - start

"""The limit that decoding at small batches runs into: how fast this machine reads memory, now."""

from __future__ import annotations

import time

import torch

BUFFER_BYTES = 384 << 20
"""Far more than the caches hold."""
PASSES = 5
"""The fastest pass counts: whatever slows one down is not the memory."""


class BandwidthProbe:
    """Reads a buffer from end to end with torch's threads.

    Args:
        num_bytes: the buffer's size.
    """

    def __init__(self, num_bytes: int = BUFFER_BYTES) -> None:
        # Ones, not zeros: untouched pages of zeros are all the same page, and stay in the cache.
        self._buffer = torch.ones(num_bytes // 4, dtype=torch.float32)

    def read(self) -> float:
        """Bytes a second."""
        return self._buffer.nbytes / min(self._pass() for _ in range(PASSES))

    def _pass(self) -> float:
        start = time.perf_counter()
        self._buffer.sum()
        return time.perf_counter() - start

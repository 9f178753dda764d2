"""Reading a checkpoint ahead: the system reads the next tensors while one is packed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from mtpc.weights.checkpoint import Checkpoint

_AHEAD = 512 << 20
"""Bytes that are read ahead: half a second's work for a fast disk."""


class ReadAhead:
    """Asks the system for tensors that are used soon.

    Args:
        checkpoint: holds the tensors.
        nbytes: the most that is asked for ahead of its use, but for one tensor.
    """

    def __init__(self, checkpoint: Checkpoint, nbytes: int = _AHEAD):
        self._checkpoint, self._nbytes = checkpoint, nbytes
        self._coming: deque[str] = deque()
        self._asked: dict[str, int] = {}

    def expect(self, names: Iterable[str]) -> None:
        """These tensors are used next, in this order."""
        self._coming = deque(dict.fromkeys(names))
        self._asked.clear()
        self._ask()

    def use(self, names: Iterable[str]) -> None:
        """These tensors are used now."""
        for name in names:
            self._asked.pop(name, None)
        self._ask()

    def _ask(self) -> None:
        ahead = sum(self._asked.values())
        while self._coming and ahead < self._nbytes:
            name = self._coming.popleft()
            self._asked[name] = self._checkpoint.read_ahead(name)
            ahead += self._asked[name]

"""Free lists for KV pages and request slots."""

from __future__ import annotations

from mtpc.errors import CapacityError


class FreeList:
    """Hands out indices `first`..`first + count - 1`, lowest first, and takes them back.

    Args:
        what: for messages, "KV pages" or "request slots".
        first: the lowest index; those below it are reserved.
        count: how many there are.
    """

    def __init__(self, what: str, first: int, count: int):
        self.what, self.count = what, count
        self._free = list(range(first + count - 1, first - 1, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` indices.

        Raises:
            CapacityError: fewer are free; none is taken.
        """
        if count > len(self._free):
            raise CapacityError(
                f"{count} {self.what} asked for, {len(self._free)} of {self.count} free"
            )
        taken = [self._free.pop() for _ in range(count)]
        self._held.update(taken)
        return taken

    def give_back(self, indices: list[int]) -> None:
        """Return indices taken before; returning one twice is a bug and is refused."""
        for index in indices:
            if index not in self._held:
                raise CapacityError(f"{self.what} {index} was returned but is not taken")
            self._held.remove(index)
            self._free.append(index)

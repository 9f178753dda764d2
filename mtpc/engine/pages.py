"""Request slots from a free list; KV pages with reference counts, kept after use until needed."""

from __future__ import annotations

from collections import Counter

from mtpc.engine.prefix import PrefixIndex
from mtpc.errors import CapacityError


class FreeList:
    """Hands out indices `first`..`first + count - 1`, lowest first, and takes them back.

    Args:
        what: for messages, "request slots".
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

    def take(self) -> int:
        """An index.

        Raises:
            CapacityError: none is free.
        """
        if not self._free:
            raise CapacityError(f"all {self.count} {self.what} are taken")
        self._held.add(self._free[-1])
        return self._free.pop()

    def give_back(self, index: int) -> None:
        """Return an index taken before; returning one twice is a bug and is refused."""
        if index not in self._held:
            raise CapacityError(f"{self.what} {index} was returned but is not taken")
        self._held.remove(index)
        self._free.append(index)


class PagePool:
    """KV pages, each used by any number of requests.

    A page that nobody uses is free; if `index` knows what it holds it is also *idle*: it stays
    as it is until it is shared again, or evicted because pages ran out (the one that has been
    idle longest first).

    Args:
        first: the lowest page; those below it are reserved.
        count: how many there are.
    """

    def __init__(self, first: int, count: int):
        self.count, self.index = count, PrefixIndex()
        self._empty = list(range(first + count - 1, first - 1, -1))
        self._users: Counter[int] = Counter()
        self._idle: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be taken, idle ones included."""
        return len(self._empty) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def users(self, page: int) -> int:
        """Requests that use a page."""
        return self._users[page]

    def take(self, count: int) -> list[int]:
        """`count` pages with one user each, whose content is anything.

        Raises:
            CapacityError: fewer are free; none is taken.
        """
        if count > self.num_free:
            raise CapacityError(f"{count} KV pages asked for, {self.num_free} of {self.count} free")
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._empty:
            page = self._empty.pop()
        else:
            page = next(iter(self._idle))
            del self._idle[page]
            self.index.forget(page)
        self._users[page] = 1
        return page

    def share(self, pages: list[int]) -> None:
        """One user more for pages that the index knows."""
        for page in pages:
            if page not in self.index:
                raise CapacityError(f"KV page {page} is to be shared, but its content is unknown")
            self._idle.pop(page, None)
            self._users[page] += 1

    def give_back(self, pages: list[int]) -> None:
        """One user less; pages in sequence order, as the end of a text is evicted first."""
        for page in reversed(pages):
            if not self._users[page]:
                raise CapacityError(f"KV page {page} was returned but is not taken")
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            if page in self.index:
                self._idle[page] = None
            else:
                self._empty.append(page)

    def forget(self, pages: list[int]) -> None:
        """Let nobody share these any more."""
        for page in pages:
            self.index.forget(page)
            if page in self._idle:
                del self._idle[page]
                self._empty.append(page)

    def forget_all(self) -> None:
        """Let nobody share any page that is known now: the pools' content was changed."""
        self.forget(self.index.pages)

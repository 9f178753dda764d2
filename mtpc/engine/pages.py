"""Request slots in a free list, and KV pages with reference counts.

A page keeps its content after use until the pool needs the page.
"""

from __future__ import annotations

from collections import Counter

from mtpc.engine.prefix import PrefixIndex
from mtpc.errors import CapacityError


class FreeList:
    """Hands out the request slots `first`..`first + count - 1`, and takes them back. Lower ones are
    reserved. The slot that was returned last is handed out first. At the start, that is the lowest
    slot."""

    def __init__(self, first: int, count: int):
        self._first, self.count = first, count
        self.reset()

    def reset(self) -> None:
        """Take all slots back, even those in use."""
        self._free = list(range(self._first + self.count - 1, self._first - 1, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Take a free slot.

        Raises:
            CapacityError: no slot is free.
        """
        if not self._free:
            raise CapacityError(f"all {self.count} request slots are taken")
        self._held.add(self._free[-1])
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Return a slot.

        Raises:
            CapacityError: the slot is not taken, which is a bug of the caller.
        """
        if slot not in self._held:
            raise CapacityError(f"request slot {slot} was returned but is not taken")
        self._held.remove(slot)
        self._free.append(slot)


class PagePool:
    """KV pages. Any number of requests may use a page.

    A page that no request uses is free. If `index` knows the page's content, the page is also
    *idle*: it keeps its content until a request shares it again, or until the pool evicts it
    because no empty page is left. The pool first evicts the page that has been idle longest.

    Pages below `first` are reserved.
    """

    def __init__(self, first: int, count: int, num_snapshots: int = 0):
        self._first, self.count, self.index = first, count, PrefixIndex(num_snapshots)
        self.reset()

    def reset(self) -> None:
        """Take all pages back, even those in use, and forget what they hold."""
        self.index.clear()
        self._empty = list(range(self._first + self.count - 1, self._first - 1, -1))
        self._users: Counter[int] = Counter()
        self._idle: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """The number of pages that can be taken, including idle ones."""
        return len(self._empty) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def known(self) -> list[int]:
        """All pages with a known content: idle ones by age, then those in use, ends first."""
        used = [page for page in self.index.pages if self._users[page]]
        return [*self._idle, *reversed(used)]

    def users(self, page: int) -> int:
        return self._users[page]

    def take(self, count: int) -> list[int]:
        """Take `count` pages, each with one user. Their content is undefined.

        Raises:
            CapacityError: fewer pages are free. Then no page is taken.
        """
        if count > self.num_free:
            raise CapacityError(f"{count} KV pages asked for, {self.num_free} of {self.count} free")
        taken = []
        for _ in range(count):
            if self._empty:
                page = self._empty.pop()
            else:
                page = next(iter(self._idle))
                self.index.keep(page)
                del self._idle[page]
                self.index.forget(page)
            self._users[page] = 1
            taken.append(page)
        return taken

    def share(self, pages: list[int]) -> None:
        """Add one user to each page.

        Raises:
            CapacityError: the index does not know a page's content, which is a bug of the caller.
        """
        for page in pages:
            if page not in self.index:
                raise CapacityError(f"KV page {page} is to be shared, but its content is unknown")
            self._idle.pop(page, None)
            self._users[page] += 1

    def give_back(self, pages: list[int]) -> None:
        """Remove one user from each page. They come in sequence order: of those that become idle,
        the last page is evicted first.

        Raises:
            CapacityError: a page is not taken, which is a bug of the caller.
        """
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
        """Make these pages unknown to the index, so that no request shares them any more."""
        for page in pages:
            self.index.forget(page)
            if page in self._idle:
                del self._idle[page]
                self._empty.append(page)

    def forget_all(self) -> None:
        """Make all pages unknown to the index, because their content is no longer valid."""
        self.forget(self.index.pages)

"""Prefix reuse: which full pages hold the KV of which tokens, and which of them a prompt can use.

Where part of a request's past is not in pages, a prompt can use the pages up to the last one with a
snapshot of that part (`snapshots`). Prompts leave snapshots at chosen page ends, where the
scheduler cuts their chunks, and decoded text leaves one at the last page end that a step met.

A page's KV depends on all tokens up to the page's end. The draft layers' KV also depends on the
tokens after the page: row t of a draft layer comes from hidden state t and token t + 1, and each of
the K draft steps adds one more token. A request may therefore reuse a page only if the
`lookahead` = K tokens after the page are the same, too. If they differed, the targets would still
be right, but the drafts would silently get worse. (A single token would suffice where one MTP layer
is applied recursively. K is right for any number of layers, and costs at most the last page of a
shared prefix.)

A match is exact. A block refers to the block before it by a number that is never used twice, and
the table compares blocks by their tokens. No hash stands for tokens, so none can collide. A token
of an image is compared by the image's SHA-256, and by its place in the image.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mtpc.engine.request import Request

if TYPE_CHECKING:
    from mtpc.engine.offload import Offload
    from mtpc.engine.prompt_images import Key

ROOT = 0
"""The block before the first one."""
TAIL = 8
"""The fewest tokens between a prompt's last snapshot and its end. Chat templates write the last few
tokens of a prompt, which open the answer, in another way when the answer is part of the history."""


@dataclass(frozen=True)
class Block:
    """What identifies a full page: the number of the block before it (ROOT at the beginning of a
    text), what identifies its tokens, and the same of the `lookahead` tokens after it."""

    parent: int
    tokens: tuple[Key, ...]
    following: tuple[Key, ...]


class Match(NamedTuple):
    """What is known of the beginning of a request's tokens: pages in sequence order, the number of
    the last block in them (ROOT if there is none), and how many blocks behind them files hold."""

    pages: list[int]
    number: int
    num_stored: int = 0


class SnapshotIndex:
    """Which snapshot belongs to which page: the one whose end it was taken at.

    A snapshot is free, or held by a request that took it, or attached to a page. Where none is
    free, the attached one that was used longest ago is evicted.

    `keep` is called with the page and the snapshot that is about to be evicted.
    """

    def __init__(self, count: int):
        self.count, self.num_evicted = count, 0
        self.keep: Callable[[int, int], None] = lambda page, snapshot: None
        self.reset()

    def reset(self) -> None:
        """Take all snapshots back, even those in use."""
        self._free = list(range(self.count - 1, -1, -1))
        self._attached: dict[int, int] = {}  # By page, the one that was used longest ago first.

    def __contains__(self, page: int) -> bool:
        return page in self._attached

    @property
    def num_used(self) -> int:
        return self.count - len(self._free)

    @property
    def attached(self) -> dict[int, int]:
        return self._attached.copy()

    def take(self) -> int | None:
        """A snapshot to write, or None if requests hold all of them."""
        if not self._free and self._attached:
            self.keep(*next(iter(self._attached.items())))
            self.forget(next(iter(self._attached)))
            self.num_evicted += 1
        return self._free.pop() if self._free else None

    def give_back(self, snapshot: int) -> None:
        """Return a snapshot that is not attached."""
        self._free.append(snapshot)

    def attach(self, page: int, snapshot: int) -> None:
        """Let a snapshot belong to a page. If the page has one, both have the same content."""
        if page in self._attached:
            self.give_back(snapshot)
        else:
            self._attached[page] = snapshot

    def use(self, page: int) -> int:
        """The snapshot of a page, which is now the last one used."""
        snapshot = self._attached[page] = self._attached.pop(page)
        return snapshot

    def forget(self, page: int) -> None:
        """Free the snapshot of a page, if it has one."""
        snapshot = self._attached.pop(page, None)
        if snapshot is not None:
            self._free.append(snapshot)


class PrefixIndex:
    """A table of blocks and the pages that hold them. `snapshots` says which page has which
    snapshot; `keep` is called with the page that is about to be evicted."""

    def __init__(self, num_snapshots: int = 0) -> None:
        self.snapshots = SnapshotIndex(num_snapshots)
        self.keep: Callable[[int], None] = lambda page: None
        self._entries: dict[Block, tuple[int, int]] = {}  # A page, and the block's number.
        self._blocks: dict[int, Block] = {}
        self._digests: dict[int, bytes] = {}
        self._numbers = itertools.count(ROOT + 1)

    def __contains__(self, page: int) -> bool:
        return page in self._blocks

    @property
    def pages(self) -> list[int]:
        return list(self._blocks)

    def find(self, block: Block) -> tuple[int, int] | None:
        """The page that holds a block, and the block's number; None if no page holds it."""
        return self._entries.get(block)

    def add(self, block: Block, page: int, digest: bytes = b"") -> int:
        """Record that a page holds a block, which `digest` identifies in files, and return its
        number.

        If another page already holds the block, the table keeps that page. Both have the same
        content.
        """
        entry = self._entries.get(block)
        if entry is None:
            entry = self._entries[block] = (page, next(self._numbers))
            self._blocks[page], self._digests[page] = block, digest
        return entry[1]

    def digest(self, page: int) -> bytes:
        """What identifies a known page in files."""
        return self._digests[page]

    def clear(self) -> None:
        """Remove all pages from the table, even if an interrupt left it half-changed."""
        self._entries.clear()
        self._blocks.clear()
        self._digests.clear()
        self.snapshots.reset()

    def forget(self, page: int) -> None:
        """Remove a page from the table. The blocks after it can then no longer be found."""
        block = self._blocks.pop(page, None)
        if block is not None:
            del self._entries[block]
            self.snapshots.forget(page)
            del self._digests[page]


class PrefixCache:
    """Finds pages that a request can reuse, and adds its own pages to the index.

    A page's content depends on `lookahead` tokens after it. `distance` is tokens from one snapshot
    of a prompt to the next; 0 if all of a request's past is in pages. Files with more pages and
    snapshots, if there are any, get what is evicted.
    """

    def __init__(
        self,
        index: PrefixIndex,
        page_size: int,
        lookahead: int,
        distance: int = 0,
        offload: Offload | None = None,
    ):
        self.index, self.page_size, self.lookahead = index, page_size, lookahead
        self.distance = -(-distance // page_size) * page_size
        self.offload = offload
        if offload is not None:
            index.keep, index.snapshots.keep = self._keep_page, self._keep_state

    def match(self, request: Request) -> Match:
        """Find the known pages that hold the beginning of a request's tokens. The last page has a
        snapshot if the request needs one.

        At least one token is left to prefill, because the request needs its logits.
        """
        known = self._known(request)
        while known and self.distance and known[-1][0] not in self.index.snapshots:
            known.pop()
        return _match(known)

    def match_files(self, request: Request, found: Match) -> Match:
        """What `match` has found, or more of the beginning with blocks that files hold.

        Where the request needs a snapshot, a page or a file has the one at the last block's end.
        """
        files, snapshots = self.offload, self.index.snapshots
        if files is None:
            return found
        known = self._known(request)
        most, end = self._reusable(request.num_tokens) // self.page_size, len(known)
        while end < most and files.has("page", request, end):
            end += 1
        while self.distance and end > len(found.pages):
            is_known = end <= len(known) and known[end - 1][0] in snapshots
            if is_known or files.has("state", request, end - 1):
                break
            end -= 1
        if end <= len(found.pages):
            return found
        return _match(known[:end], max(end - len(known), 0))

    def load(self, request: Request, found: Match) -> bool:
        """Settle which snapshot a request begins with, and fill its pages and slot from files, as
        `match_files` has found them a moment ago. If not all can be read, this returns False, and
        files will have less for the same request."""
        first, snapshots = len(found.pages), self.index.snapshots
        end, request.restored = first + found.num_stored, None
        needs_state = bool(self.distance and end)
        if needs_state and not found.num_stored and found.pages[-1] in snapshots:
            request.restored = snapshots.use(found.pages[-1])
            needs_state = False
        if self.offload is None:
            return True
        files, blocks = self.offload, range(first, end)
        if not all(files.load("page", request, n, request.pages[n]) for n in blocks):
            return False
        assert request.slot is not None
        return not needs_state or files.load("state", request, end - 1, request.slot - 1)

    def save(self, pages: list[int]) -> None:
        """Write known pages and their snapshots to files, those that matter least first."""
        if self.offload is not None:
            for page in pages[-self.offload.most_pages :]:
                self._keep_page(page)

    def _keep_page(self, page: int) -> None:
        if self.offload is not None:
            self.offload.save("page", self.index.digest(page), page)
            snapshot = self.index.snapshots.attached.get(page)
            if snapshot is not None:
                self._keep_state(page, snapshot)

    def _keep_state(self, page: int, snapshot: int) -> None:
        if self.offload is not None:
            self.offload.save("state", self.index.digest(page), snapshot)

    def _known(self, request: Request) -> list[tuple[int, int]]:
        """The known pages of a request's beginning, each with the number of its block."""
        known, number = list[tuple[int, int]](), ROOT
        for end in range(self.page_size, self._reusable(request.num_tokens) + 1, self.page_size):
            found = self.index.find(self._block(request, end, number))
            if found is None:
                break
            known.append(found)
            number = found[1]
        return known

    def next_snapshot(self, request: Request, past: int) -> int | None:
        """The first length after `past` tokens at which a prompt leaves a snapshot, if any."""
        if not self.distance:
            return None
        last = self._last_snapshot(request)
        regular = (past // self.distance + 1) * self.distance
        return min(regular, last) if past < last else None

    def coming(self, other: Request, request: Request) -> int:
        """How many tokens of a waiting request's beginning the prefill of a running one is about to
        make reusable; 0 if it has made them reusable already, or never will."""
        done = other.num_indexed * self.page_size
        if self._reusable(other.num_input) < done + self.page_size:
            return 0  # As a rule it decodes; no tokens need to be compared.
        end = self._reusable(self._common(other, request))
        end = end // self.page_size * self.page_size
        if self.distance:
            last = self._last_snapshot(other)
            end = last if last <= end else end // self.distance * self.distance
        return end if end > done else 0

    def _last_snapshot(self, request: Request) -> int:
        """The length of a prompt at its last snapshot; not above 0 if it leaves none."""
        return (self._reusable(request.num_input) - TAIL) // self.page_size * self.page_size

    def _reusable(self, length: int) -> int:
        """The most tokens of a text of this length that can be reused."""
        return length - max(self.lookahead, 1)

    def _common(self, other: Request, request: Request) -> int:
        """The number of tokens with which both a running request's input and a request begin."""
        limit = min(other.num_input, request.num_tokens)
        for begin in range(0, limit, self.page_size):
            end = min(begin + self.page_size, limit)
            pairs = zip(other.keys(begin, end), request.keys(begin, end), strict=True)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if same < end - begin:
                return begin + same
        return limit

    def learn(self, request: Request) -> None:
        """Add to the index the pages of a request that have become full and final.

        Row t of the deepest draft layer is final when token t + lookahead is committed.
        """
        final = request.num_committed - max(self.lookahead - 1, 0)
        while (end := (request.num_indexed + 1) * self.page_size) <= final:
            block, own = self._block(request, end, request.last_block), request.num_indexed
            digest = self.offload.block(request, own) if self.offload else b""
            request.last_block = self.index.add(block, request.pages[own], digest)
            request.num_indexed += 1
            if end in request.snapshots:
                self._attach(request, end, block)

    def _attach(self, request: Request, end: int, block: Block) -> None:
        """Attach a request's snapshot to the page of its block.

        Of decoded text a request leaves the last snapshot only, so that long answers do not evict
        those of other requests.
        """
        found, own = self.index.find(block), request.pages[end // self.page_size - 1]
        assert found is not None
        self.index.snapshots.attach(found[0], request.snapshots.pop(end))
        if end >= request.num_input:
            if request.newest is not None:
                self.index.snapshots.forget(request.newest)
            request.newest = own if found[0] == own else None

    def _block(self, request: Request, end: int, parent: int) -> Block:
        tokens = tuple(request.keys(end - self.page_size, end))
        return Block(parent, tokens, tuple(request.keys(end, end + self.lookahead)))


def _match(known: list[tuple[int, int]], num_stored: int = 0) -> Match:
    """A match of known pages with the numbers of their blocks."""
    return Match([page for page, _ in known], known[-1][1] if known else ROOT, num_stored)

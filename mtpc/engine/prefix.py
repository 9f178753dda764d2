"""Prefix reuse: which full pages hold the KV of which tokens, and which of them a prompt can use.

A page's KV depends on all tokens up to the page's end. The draft layers' KV also depends on the
tokens after the page: row t of a draft layer comes from hidden state t and token t + 1, and each of
the K draft steps adds one more token. A request may therefore reuse a page only if the
`lookahead` = K tokens after the page are the same, too. If they differed, the targets would still
be right, but the drafts would silently get worse. (A single token would suffice where one MTP layer
is applied recursively. K is right for any number of layers, and costs at most the last page of a
shared prefix.)

A match is exact. A block refers to the block before it by a number that is never used twice, and
the table compares blocks by their tokens. No hash stands for tokens, so none can collide.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from mtpc.engine.request import Request

ROOT = 0
"""The block before the first one."""


@dataclass(frozen=True)
class Block:
    """What identifies a full page.

    Attributes:
        parent: number of the block before it; ROOT at the beginning of a text.
        token_ids: the page's tokens.
        following: the `lookahead` tokens after the page.
    """

    parent: int
    token_ids: tuple[int, ...]
    following: tuple[int, ...]


@dataclass(frozen=True)
class _Entry:
    page: int
    number: int


class PrefixIndex:
    """A table of blocks and the pages that hold them."""

    def __init__(self) -> None:
        self._entries: dict[Block, _Entry] = {}
        self._blocks: dict[int, Block] = {}
        self._numbers = itertools.count(ROOT + 1)

    def __contains__(self, page: int) -> bool:
        return page in self._blocks

    @property
    def pages(self) -> list[int]:
        return list(self._blocks)

    def find(self, block: Block) -> tuple[int, int] | None:
        """The page that holds a block, and the block's number; None if no page holds it."""
        entry = self._entries.get(block)
        return None if entry is None else (entry.page, entry.number)

    def add(self, block: Block, page: int) -> int:
        """Record that a page holds a block, and return the block's number.

        If another page already holds the block, the table keeps that page. Both have the same
        content.
        """
        entry = self._entries.get(block)
        if entry is None:
            entry = self._entries[block] = _Entry(page, next(self._numbers))
            self._blocks[page] = block
        return entry.number

    def clear(self) -> None:
        """Remove all pages from the table, even if an interrupt left it half-changed."""
        self._entries.clear()
        self._blocks.clear()

    def forget(self, page: int) -> None:
        """Remove a page from the table. The blocks after it can then no longer be found."""
        block = self._blocks.pop(page, None)
        if block is not None:
            del self._entries[block]


class PrefixCache:
    """Finds pages that a request can reuse, and adds its own pages to the index.

    Args:
        index: the page pool's index.
        page_size: tokens per page.
        lookahead: number of tokens after a page on which its content depends.
    """

    def __init__(self, index: PrefixIndex, page_size: int, lookahead: int):
        self.index, self.page_size, self.lookahead = index, page_size, lookahead

    def match(self, request: Request) -> tuple[list[int], int]:
        """Find the known pages that hold the beginning of a request's tokens.

        At least one token is left to prefill, because the request needs its logits.

        Returns:
            The pages, in sequence order, and the number of the last block.
        """
        pages, number = [], ROOT
        limit = request.num_tokens - max(self.lookahead, 1)
        for end in range(self.page_size, limit + 1, self.page_size):
            found = self.index.find(self._block(request, end, number))
            if found is None:
                break
            page, number = found
            pages.append(page)
        return pages, number

    def learn(self, request: Request) -> None:
        """Add to the index the pages of a request that have become full and final.

        Row t of the deepest draft layer is final when token t + lookahead is committed.
        """
        final = request.num_committed - max(self.lookahead - 1, 0)
        while (end := (request.num_indexed + 1) * self.page_size) <= final:
            block = self._block(request, end, request.last_block)
            request.last_block = self.index.add(block, request.pages[request.num_indexed])
            request.num_indexed += 1

    def _block(self, request: Request, end: int, parent: int) -> Block:
        tokens = tuple(request.token_ids(end - self.page_size, end))
        return Block(parent, tokens, tuple(request.token_ids(end, end + self.lookahead)))

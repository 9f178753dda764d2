"""Prefix reuse: which full pages hold the KV of which tokens, and what of it a prompt can use.

A page's KV depends on all tokens up to its end, and the draft layers' part on the tokens right
behind it, too: a draft layer's row t is made of hidden state t and token t + 1, and draft step i
of up to K adds a token of its own. So a page may be reused where the `lookahead` = K tokens
behind it are the same as well; without them targets would still be right, and drafts would
silently get worse. (Where one MTP layer is applied recursively a single token would do. K is right
for any number of layers, and costs at most the last page of a shared prefix.)

The chain is exact: a block names the block before it by a number never used twice, and a table
compares blocks by their tokens. There is no digest that could collide.
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
        parent: number of the block before it, ROOT at the beginning of a text.
        token_ids: the page's tokens.
        following: the tokens right behind it.
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
        """The page that holds a block and the block's number, where known."""
        entry = self._entries.get(block)
        return None if entry is None else (entry.page, entry.number)

    def add(self, block: Block, page: int) -> int:
        """Say that a page holds a block; returns the block's number.

        A block that another page holds stays that page's: the two contents are the same.
        """
        entry = self._entries.get(block)
        if entry is None:
            entry = self._entries[block] = _Entry(page, next(self._numbers))
            self._blocks[page] = block
        return entry.number

    def forget(self, page: int) -> None:
        """The page is to hold something else; blocks behind it can no longer be found."""
        block = self._blocks.pop(page, None)
        if block is not None:
            del self._entries[block]


class PrefixCache:
    """Finds pages for requests, and learns theirs.

    Args:
        index: of the pool.
        page_size: tokens per page.
        lookahead: tokens behind a page that its content depends on.
    """

    def __init__(self, index: PrefixIndex, page_size: int, lookahead: int):
        self.index, self.page_size, self.lookahead = index, page_size, lookahead

    def match(self, request: Request) -> tuple[list[int], int]:
        """Pages that hold the beginning of what a request must prefill, and the last's number.

        At least one token is left to compute: its logits are what is asked for.
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
        """Enter pages of a request that became full and final since the last time.

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

"""Grammars: a request's own rules for its next tokens, applied as masks of a step.

The host can read the drafts that a step verifies. Before the replay it advances the grammar along
them and writes a mask for every row. The drafts that the step proposes follow a token that the step
itself chooses, so the host writes their masks only where few tokens are possible.
docs/sampling.md explains why this is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Grammar(Protocol):
    """Restricts the text of one request; grammar libraries call this a matcher.

    A grammar keeps a position: the tokens that it has taken. When the request is added, it has
    taken none. It never receives the request's stop ids; its masks allow them wherever the text
    may end.
    """

    def fill_mask(self, words: Tensor) -> None:
        """Clear the bits of the tokens that may not come next.

        Args:
            words: int32 [ceil(V / 32)], contiguous, on the CPU, with all bits set. Token v is bit
                v mod 32 of word v // 32.
        """
        ...

    def advance(self, token_id: int) -> bool:
        """Take a token. If it may not come next, return False and keep the position."""
        ...

    def rollback(self, count: int) -> None:
        """Go back by the last `count` tokens."""
        ...

"""The images of a prompt: embeddings and positions of their tokens, and what identifies them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpc.errors import RequestError

Key = int | bytes
"""What identifies a token's content: its id or, in an image, the image's digest and the place."""


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt, in order.

    Attributes:
        spans: runs of image tokens, each with its first token and the one after its last. An image
            has one, or several with other tokens between them.
        digests: what identifies each run: equal digests stand for equal rows of `embeds`.
        embeds: [N, H], the rows of all images, one for each of their tokens.
        offsets: int32 [length of the prompt, grids], what to add to each token's position for the
            rotary embedding; no grids where positions are those of text.
        delta: what to add for tokens after the prompt.
    """

    spans: tuple[tuple[int, int], ...]
    digests: tuple[bytes, ...]
    embeds: Tensor
    offsets: Tensor
    delta: int

    def check(self, length: int, form: Tensor, grids: int) -> None:
        """Check that these are images of a prompt of `length` tokens, with embeddings like `form`
        and `grids` coordinates of a position: 0 if images have positions like text.

        Raises:
            RequestError: the parts do not fit together, or not the prompt or the model.
        """
        edges = [0, *(edge for span in self.spans for edge in span), length]
        is_ordered = all(a <= b for a, b in itertools.pairwise(edges))
        if not is_ordered or any(begin == end for begin, end in self.spans):
            raise RequestError(
                f"images are at tokens {list(self.spans)} of a prompt of {length}; expected spans "
                "within it, in order and not empty"
            )
        found = (len(self.digests), tuple(self.embeds.shape), tuple(self.offsets.shape))
        rows = sum(end - begin for begin, end in self.spans)
        expected = (len(self.spans), (rows, form.shape[1]), (length, grids))
        if found != expected:
            raise RequestError(
                f"images have digests, embeds and offsets of the sizes {found}; expected {expected}"
            )
        if self.embeds.dtype != form.dtype:
            raise RequestError(f"embeds is {self.embeds.dtype}; expected {form.dtype}")

    def keys(self, ids: Sequence[int], begin: int) -> list[Key]:
        """What identifies the tokens `ids`, of which the first is token `begin` of the text."""
        keys: list[Key] = list(ids)
        for (first, last), digest in zip(self.spans, self.digests, strict=True):
            for token in range(max(first, begin), min(last, begin + len(ids))):
                keys[token - begin] = digest + (token - first).to_bytes(4, "little")
        return keys

    def take(self, ids: Sequence[int], begin: int, first_id: int) -> tuple[list[int], Tensor]:
        """Ids from `first_id` on that name rows in place of image tokens, and these rows. The first
        of `ids` is token `begin` of the text."""
        named, rows = list(ids), 0
        skipped = sum(max(0, min(last, begin) - first) for first, last in self.spans)
        for first, last in self.spans:
            for token in range(max(first, begin), min(last, begin + len(ids))):
                named[token - begin] = first_id + rows
                rows += 1
        return named, self.embeds[skipped : skipped + rows]

    def offset_rows(self, count: int) -> Tensor:
        """Offsets of the positions from 0 to `count` - 1, int32 [count, grids]."""
        after = torch.full((count - len(self.offsets), self.offsets.shape[1]), self.delta)
        return torch.cat([self.offsets, after.to(self.offsets)])

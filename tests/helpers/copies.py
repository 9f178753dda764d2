"""The rule by which drafts are copied from a text, in plain Python, and texts that repeat."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from typing import Any

SHORTEST, LONGEST = 3, 32
"""Tokens that must be equal, and the most that count."""


def copied(text: list[int], count: int) -> list[int] | None:
    """What follows the longest end of a text that occurs earlier in it; None if none does.

    Of equally long ones the last occurrence counts. Where the text ends, the copy follows itself.
    """
    for length in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
        end = text[-length:]
        for begin in range(len(text) - 1, length - 1, -1):
            if text[begin - length : begin] == end:
                grown = list(text)
                for place in range(count):
                    grown.append(grown[begin + place])
                return grown[len(text) :]
    return None


class CopyOracle:
    """The drafts after a text, as the state rows have them: -1 where nothing is copied."""

    def __init__(self) -> None:
        self.found = 0

    def drafts(self, text: list[int], count: int) -> list[int]:
        drafts = copied(text, count)
        self.found += drafts is not None
        return [-1] * count if drafts is None else drafts


class BesideOracle:
    """Drafts of copies beside another drafter, and the counts that choose between them.

    Args:
        other: has `drafts(text, count)`.
    """

    EXPECTED = (3, 2, 4, 8, 12)

    def __init__(self, other: Any):
        self.other, self.taken = other, Counter[int]()
        self.counts: dict[int, list[list[int]]] = {}
        self.source: dict[int, int] = {}

    def drafts(self, request: int, text: list[int], count: int, accepted: int | None) -> list[int]:
        """The drafts after a text, and the count of those before, of which so many were right.

        Args:
            request: its id.
            text: all of its tokens.
            count: K.
            accepted: of the drafts before; None: none were verified.
        """
        counts = self.counts.setdefault(request, [[0, 0] for _ in self.EXPECTED])
        if accepted is not None:
            counts[self.source[request]][0] += accepted
            counts[self.source[request]][1] += 1
        rule, length = copied(text, count), matching(text)
        kind = 1 + sum(length >= least for least in (5, 9, 17))
        means = [
            Fraction(min(prior, 2 * count) + right, 2 + times)
            for prior, (right, times) in zip(self.EXPECTED, counts, strict=True)
        ]
        takes = rule is not None and means[kind] >= means[0]
        self.source[request] = kind if takes else 0
        self.taken[self.source[request]] += 1
        return rule if takes and rule is not None else self.other.drafts(text, count)


def matching(text: list[int]) -> int:
    """How many tokens at the end of a text occur earlier in it, LONGEST at most."""
    lengths = range(min(LONGEST, len(text) - 1), 0, -1)
    ends = range(len(text) - 1, 0, -1)
    return next((n for n in lengths for e in ends if e >= n and text[e - n : e] == text[-n:]), 0)


def repeating(length: int, seed: int, alphabet: int = 4) -> list[int]:
    """Tokens of which short runs occur again and again."""
    draw = random.Random(seed)
    text: list[int] = []
    while len(text) < length:
        if len(text) > 6 and draw.random() < 0.6:
            begin = draw.randrange(len(text) - 4)
            text += text[begin : begin + draw.randrange(3, 9)]
        else:
            text += [2 + draw.randrange(alphabet)]
    return text[:length]

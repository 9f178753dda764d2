"""The rule by which drafts are copied from a text, in plain Python, and texts that repeat."""

from __future__ import annotations

import random

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
    """The drafts after a text, as the state rows have them: 0 where nothing is copied."""

    def __init__(self) -> None:
        self.found = 0

    def drafts(self, text: list[int], count: int) -> list[int]:
        drafts = copied(text, count)
        self.found += drafts is not None
        return [0] * count if drafts is None else drafts


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

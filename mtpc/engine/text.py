"""Text as tokens arrive: incremental detokenisation, and stop strings that span several pieces.

Each piece of text is final: it never ends in half a character, and holds no part of a stop string.
The pieces together are the text of all tokens, cut where a stop string begins. The text does not
depend on how many tokens a step emits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mtpc.errors import RequestError

Decode = Callable[[list[int]], str]
"""Decodes token ids to text, without special tokens."""
_HALF = "\ufffd"
"""The text of bytes that are an incomplete or invalid character."""
MAX_WAITS = 64
"""The most times that tokens are decoded again to see whether they complete a character. A
character has only a few bytes, so tokens that do not complete one by then never will."""


class Detokeniser:
    """Turns token ids into text, a few at a time.

    The text of a token depends on its neighbours (a word's leading space, the bytes of a
    character). So each push decodes the tokens of the last piece together with the new ones, and
    the additional text is the new piece. Tokens that give no text, such as special tokens or
    invalid bytes, are decoded again at most `MAX_WAITS` times. This bounds the cost of a long text
    of such tokens.

    Args:
        decode: decodes any ids.

    Attributes:
        token_ids: all tokens so far.
    """

    def __init__(self, decode: Decode):
        self._decode = decode
        self.token_ids: list[int] = []
        self._before: list[int] = []  # Of the last piece.
        self._pending: list[int] = []
        self._waits = 0

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """Add tokens, and return the new text.

        Args:
            token_ids: the new tokens.
            last: whether the text ends here. If so, an incomplete character is returned, too.
        """
        self.token_ids += token_ids
        self._pending += token_ids
        self._waits += 1
        text, is_over = self._decode(self._before + self._pending), self._waits > MAX_WAITS
        if text.endswith(_HALF) and not (last or is_over):
            return ""
        piece = text[len(self._decode(self._before)) :]
        if piece:
            self._before, self._pending, self._waits = self._pending, [], 0
        elif is_over:  # These tokens have no text, so later tokens keep the neighbours before them.
            self._pending, self._waits = [], 0
            nearest = self._before[-MAX_WAITS:]
            if self._decode(nearest):
                self._before = nearest
        return piece


class StopStrings:
    """Cuts a text where one of several strings begins.

    The string that is complete first counts. If several end at the same place, the longest counts.

    Args:
        strings: the stop strings. None of them is empty.
        keeps: whether to cut the text where the string ends instead.

    Attributes:
        found: whether a stop string is complete.
    """

    def __init__(self, strings: tuple[str, ...], keeps: bool = False):
        self._strings, self._keeps, self._held = strings, keeps, ""
        self.found = False

    def push(self, text: str, last: bool = False) -> str:
        """Add text, and return the text that can no longer be part of a stop string.

        Args:
            text: the new text.
            last: whether the text ends here. If so, nothing is held back.
        """
        if self.found:
            return ""
        text = self._held + text
        starts = ((text.find(s), s) for s in self._strings)
        ends = [(start + len(s), start) for start, s in starts if start >= 0]
        if ends:
            self.found = True
            return text[: min(ends)[0 if self._keeps else 1]]
        held = 0 if last else max((overlap(text, s) for s in self._strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def overlap(text: str, string: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `string`."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)


class TextAssembler:
    """Makes the text of one request, and ends it at a stop string.

    Args:
        decode: decodes any ids.
        stop: strings that end the text.
        keeps_stop: whether the text ends with the stop string instead of before it.

    Attributes:
        num_tokens: tokens so far, up to the one that completed a stop string.
    """

    def __init__(self, decode: Decode, stop: tuple[str, ...] = (), keeps_stop: bool = False):
        self._decode, self._strings = decode, stop
        self._detokeniser, self._stops = Detokeniser(decode), StopStrings(stop, keeps_stop)
        self.num_tokens = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete. Later pushes return no text."""
        return self._stops.found

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """Add tokens, and return the new final text.

        Args:
            token_ids: the new tokens.
            last: whether the text ends here. If so, nothing is held back.
        """
        was_stopped = self.is_stopped
        text = self._stops.push(self._detokeniser.push(token_ids, last), last)
        if not self.is_stopped:
            self.num_tokens += len(token_ids)
        elif not was_stopped:
            self.num_tokens += self._count_to_stop(token_ids)
        return text

    def _count_to_stop(self, token_ids: Sequence[int]) -> int:
        """The number of these tokens up to the one that completed the stop string.

        It replays the tokens one by one, so the result does not depend on the size of the steps.
        """
        if len(token_ids) <= 1:
            return len(token_ids)
        again = TextAssembler(self._decode, self._strings)
        again.push(self._detokeniser.token_ids[: -len(token_ids)])
        for count, token_id in enumerate(token_ids, start=1):
            again.push([token_id])
            if again.is_stopped:
                return count
        return len(token_ids)  # The end of the text (`last`) completed the stop string.


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Check the argument `stop`, and return its strings as a tuple.

    Args:
        stop: a string, a sequence of strings, or None.

    Raises:
        RequestError: `stop` is something else, or a string is empty.
    """
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) for s in strings):
        raise RequestError(f"stop is {stop!r}; expected a string or several, such as ['###']")
    if not all(strings):
        raise RequestError(f"stop is {stop!r}; an empty string would end every text at once")
    return tuple(strings)

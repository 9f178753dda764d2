"""Text as it comes: incremental detokenisation, and stop strings across any borders.

What is handed out is final: it never ends in half a character, holds no part of a stop string,
and the pieces joined are the text of all tokens, cut where a stop string began. None of it depends
on how many tokens a step emits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mtpc.errors import RequestError

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens left out."""
_HALF = "\ufffd"
"""What bytes decode to that are no character, or not yet."""
MAX_WAITS = 64
"""Times that tokens are decoded again in the hope that they become a character. Characters have a
few bytes; what is none for so long is not going to be one."""


class Detokeniser:
    """Turns token ids into text, a few at a time.

    Decoders look at neighbours (a word's leading space, the bytes of a character), so the tokens
    of the last piece are decoded again with the new ones, and the difference is the new piece.
    Tokens that make no piece, as special ones or bytes that are no text, wait at most `MAX_WAITS`
    pushes, so that a long text of them costs no more than that times its length.

    Args:
        decode: decodes any ids.

    Attributes:
        token_ids: all that came.
    """

    def __init__(self, decode: Decode):
        self._decode = decode
        self.token_ids: list[int] = []
        self._before: list[int] = []  # Of the last piece.
        self._pending: list[int] = []
        self._waits = 0

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """What these tokens complete; `last` gives out half a character, too."""
        self.token_ids += token_ids
        self._pending += token_ids
        self._waits += 1
        text, is_over = self._decode(self._before + self._pending), self._waits > MAX_WAITS
        if text.endswith(_HALF) and not (last or is_over):
            return ""
        piece = text[len(self._decode(self._before)) :]
        if piece:
            self._before, self._pending, self._waits = self._pending, [], 0
        elif is_over:  # They say nothing. The next ones' neighbours are those before them.
            self._pending, self._waits = [], 0
            nearest = self._before[-MAX_WAITS:]
            if self._decode(nearest):
                self._before = nearest
        return piece


class StopStrings:
    """Cuts a text where one of several strings begins.

    The string that is complete first counts; of several that end together, the longest.

    Args:
        strings: not empty, each.
    """

    def __init__(self, strings: tuple[str, ...]):
        self._strings, self._held = strings, ""
        self.found = False

    def push(self, text: str, last: bool = False) -> str:
        """What of the text so far can no longer be part of a stop string, once."""
        if self.found:
            return ""
        text = self._held + text
        starts = ((text.find(s), s) for s in self._strings)
        ends = [(start + len(s), start) for start, s in starts if start >= 0]
        if ends:
            self.found = True
            return text[: min(ends)[1]]
        held = 0 if last else max((_overlap(text, s) for s in self._strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that a proper beginning of `string` is."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)


class TextAssembler:
    """The text of one request.

    Args:
        decode: decodes any ids.
        stop: strings that end the text.

    Attributes:
        num_tokens: tokens that came, up to the one that completed a stop string.
    """

    def __init__(self, decode: Decode, stop: tuple[str, ...] = ()):
        self._decode, self._strings = decode, stop
        self._detokeniser, self._stops = Detokeniser(decode), StopStrings(stop)
        self.num_tokens = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string came: there is no text after it."""
        return self._stops.found

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The new text, as far as it is final; all of it with the `last` tokens."""
        was_stopped = self.is_stopped
        text = self._stops.push(self._detokeniser.push(token_ids, last), last)
        if not self.is_stopped:
            self.num_tokens += len(token_ids)
        elif not was_stopped:
            self.num_tokens += self._count_to_stop(token_ids)
        return text

    def _count_to_stop(self, token_ids: Sequence[int]) -> int:
        """How many of these it took: the same whatever steps they came in."""
        if len(token_ids) <= 1:
            return len(token_ids)
        again = TextAssembler(self._decode, self._strings)
        again.push(self._detokeniser.token_ids[: -len(token_ids)])
        for count, token_id in enumerate(token_ids, start=1):
            again.push([token_id])
            if again.is_stopped:
                return count
        return len(token_ids)  # Half a character at the very end completed it.


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Check the argument `stop`: a string, several, or None.

    Raises:
        RequestError: it is something else, or a string is empty.
    """
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) for s in strings):
        raise RequestError(f"stop is {stop!r}; expected a string or several, as ['###']")
    if not all(strings):
        raise RequestError(f"stop is {stop!r}; an empty string would end every text at once")
    return tuple(strings)

"""Text as tokens arrive: incremental detokenisation, and stop strings that span several pieces.

Each piece of text is final: it never ends in half a character, and holds no part of a stop string.
The pieces together are the text of all tokens, cut where a stop string begins. A character that the
tokens leave incomplete at the end is left out. Tokens are taken one by one, so the text does not
depend on how many of them a step emits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mtpc.errors import RequestError

Decode = Callable[[list[int]], str]
"""Decodes token ids to text, without special tokens."""
_HALF = "\ufffd"
"""The text of bytes that are an incomplete or invalid character."""
_MOST_PARTS = 3
"""The most tokens that an incomplete character has: one byte each, one less than a whole one."""
MAX_WAITS = 64
"""The most tokens that are decoded again to see whether a later one completes a character. A
character has only a few bytes, so older tokens than that never become one."""
_WINDOW = 8
"""Tokens that are decoded together with a new one, where the last piece had no more of them."""


class Detokeniser:
    """Turns token ids into text, one at a time.

    The text of a token depends on its neighbours (a word's leading space, the bytes of a
    character). So each push decodes the new token together with a window of those before it, and
    the additional text is the new piece. Tokens that give no text, such as special tokens or
    invalid bytes, wait in the window for at most `MAX_WAITS` further ones. This bounds the cost of
    a long text of such tokens.
    """

    def __init__(self, decode: Decode):
        self._decode = decode
        self._window: list[int] = []
        self._num_shown = 0  # Characters of the window's text that were returned.
        self._num_waiting = 0  # Tokens at the window's end whose text was not.

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        self._num_waiting += 1
        text = self._decode(self._window)
        piece, is_half = text[self._num_shown :], text.endswith(_HALF)
        if piece and not is_half:
            self._num_shown, count = len(text), self._num_waiting
            self._num_waiting = 0
            if len(self._window) > _WINDOW:
                self._window = self._window[-count:]
                self._num_shown = len(self._decode(self._window))
            return piece
        if self._num_waiting <= MAX_WAITS:
            return ""
        return self._give_up(_MOST_PARTS if is_half else 0)

    def _give_up(self, count: int) -> str:
        """Let no token but the last `count` wait any longer, and return the text of the others."""
        settled = self._window[: len(self._window) - count]
        piece = self._decode(settled)[self._num_shown :]
        if piece:
            self._window = self._window[-MAX_WAITS:]
        else:  # They have no text, so later tokens keep the neighbours before them.
            del self._window[-self._num_waiting : len(settled)]
        self._num_waiting = count
        self._num_shown = len(self._decode(self._window[: len(self._window) - count]))
        return piece

    def end(self) -> str:
        """The rest of the text, without a character that is incomplete."""
        return self._decode(self._window)[self._num_shown :].rstrip(_HALF)


class StopStrings:
    """Cuts a text where one of several strings begins; with `keeps`, where it ends. `found` says
    whether one is complete. None of them is empty.

    The string that is complete first counts. If several end at the same place, the longest counts.
    """

    def __init__(self, strings: tuple[str, ...], keeps: bool = False):
        self._strings, self._keeps, self._held = strings, keeps, ""
        self.found = False

    def push(self, text: str, last: bool = False) -> str:
        """Add text, and return the text that can no longer be part of a stop string: all of it at
        the last."""
        if self.found or not self._strings:
            return "" if self.found else text
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
    """Makes the text of one request, and ends it before a stop string; with `keeps_stop`, after it.
    `num_tokens` counts the tokens so far, up to the one that completed a stop string."""

    def __init__(self, decode: Decode, stop: tuple[str, ...] = (), keeps_stop: bool = False):
        self._detokeniser, self._stops = Detokeniser(decode), StopStrings(stop, keeps_stop)
        self.num_tokens = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete. Later pushes take no token and return no text."""
        return self._stops.found

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """Add tokens, and return the new final text. At the last, nothing is held back."""
        pieces = []
        for token_id in token_ids:
            if self.is_stopped:
                break
            self.num_tokens += 1
            pieces.append(self._stops.push(self._detokeniser.push(token_id)))
        if last and not self.is_stopped:
            pieces.append(self._stops.push(self._detokeniser.end(), last=True))
        return "".join(pieces)


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Check the argument `stop`, a string, a sequence or None, and return its strings as a tuple.

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

"""How the command line reads one word, and what it says of one that it cannot read."""

from __future__ import annotations

import argparse
import difflib
import re
from pathlib import Path
from typing import NoReturn

from mtpc.config import AUTO


class SuggestingParser(argparse.ArgumentParser):
    """argparse's parser, whose complaints end with the nearest name that exists."""

    def error(self, message: str) -> NoReturn:
        super().error(message + self._suggestion(message))

    def _suggestion(self, message: str) -> str:
        choice = re.search(r"invalid choice: '([^']*)'", message)
        option = re.search(r"unrecognized arguments:.*?(--[\w-]+)", message)
        wrong, known = "", list[str]()
        if choice:
            # The words that argparse itself lists after the wrong one.
            wrong, known = choice[1], re.findall(r"[\w-]+", message[choice.end() :])
        elif option:
            wrong, known = option[1], list(self._option_string_actions)
        near = difflib.get_close_matches(wrong, known, n=1)
        return f"; did you mean {near[0]}?" if near else ""


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no such number; expected 1 or more")
    return int(text)


def ids(text: str) -> list[int]:
    """Integers separated by spaces or commas."""
    try:
        return [int(word) for word in re.split(r"[\s,]+", text.strip()) if word]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of integers, as 1,2,3") from None


def number(text: str) -> int | str:
    """A number of drafts, or "auto"."""
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {AUTO}") from None


def numbers(text: str) -> list[int | str]:
    """Several of them."""
    return [AUTO] if text.strip() == AUTO else [*ids(text)]


def draft_vocab(text: str) -> int | list[int]:
    """A number of tokens, or a file of ids."""
    if text.isdecimal():
        return int(text)
    try:
        return ids(Path(text).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {text}: {error}") from None

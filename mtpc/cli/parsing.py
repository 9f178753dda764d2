"""Adds and parses single arguments of the command line, and explains errors in them."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from mtpc import CompileOptions
from mtpc.option_checks import AUTO

_UNITS = {
    f"{prefix}{i}B": base**power
    for i, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("KMGT", 1)
}
MOST_THREADS = 1024
"""OpenMP ends the process if the system refuses it a thread."""


class SuggestingParser(argparse.ArgumentParser):
    """argparse's parser, with errors of one line that suggest the most similar existing name.

    `--help` leaves out the options of `further`; `--help-all` shows all.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._left_out: dict[argparse.Action, str] = {}
        for kind, parse in ((int, _integer), (float, _number), (Path, path)):
            self.register("type", kind, parse)

    def group(self, title: str) -> Any:
        known = [group for group in self._action_groups if group.title == title]
        return known[0] if known else self.add_argument_group(title)

    def further(self, title: str) -> Any:
        """The group of this title, to add options for which few users look."""
        return SimpleNamespace(add_argument=partial(self._add_further, title))

    def _add_further(self, title: str, *flags: str, help: str, **more: Any) -> None:
        if not self._left_out:
            text = "show all options, and exit"
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help=text)
        action = self.group(title).add_argument(*flags, **more, help=argparse.SUPPRESS)
        self._left_out[action] = help
        self.epilog = f"--help-all shows {len(self._left_out)} more options."

    def show_all(self) -> list[Any]:
        """Have help show every option; returns the arguments of this parser and its commands."""
        for action, text in self._left_out.items():
            action.help, self.epilog = text, None
        commands = [each for each in self._actions if isinstance(each, argparse._SubParsersAction)]
        parsers = {parser for each in commands for parser in each.choices.values()}
        return [*self._actions, *(action for each in parsers for action in each.show_all())]

    def error(self, message: str) -> NoReturn:
        """Print the error as all errors of commands are printed, without the usage, and exit."""
        message += self._suggestion(message)
        self.exit(2, f"error: {message} ({self.prog} --help says more)\n")

    def _suggestion(self, message: str) -> str:
        choice = re.search(r"invalid choice: '([^']*)'", message)
        option = re.search(r"unrecognized arguments:.*?(--[\w-]+)", message)
        wrong, known = "", list[str]()
        if choice:
            # argparse's own message lists the valid choices after the wrong word.
            wrong, known = choice[1], re.findall(r"[\w-]+", message[choice.end() :])
        elif option:
            # Dashes would make any two options similar.
            wrong, known = option[1][2:], [name[2:] for name in self._option_string_actions]
        near = difflib.get_close_matches(wrong, known, n=1)
        dashes = "" if choice else "--"
        return f"; did you mean {dashes}{near[0]}?" if near else ""


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, SuggestingParser)
        parser.show_all()
        parser.print_help()
        parser.exit()


def add_values(parser: Any, *rows: tuple[Any, ...]) -> None:
    """Add options that take a value.

    Args:
        parser: a parser, or a group of its arguments.
        *rows: (flag, what parses the text, the value's name in the help, help); a fifth entry is
            the default, which the help then names.
    """
    for flag, kind, metavar, text, *default in rows:
        shown = f"{text} (default: %(default)s)" if default else text
        parser.add_argument(
            flag, type=kind, metavar=metavar, help=shown, default=next(iter(default), None)
        )


def add_switches(parser: Any, *rows: tuple[str, str]) -> None:
    """Add options without a value, each a (flag, help)."""
    for flag, text in rows:
        parser.add_argument(flag, action="store_true", help=text)


def typed(text: str) -> str:
    """A message of the library with its options as a user of commands types them."""
    names = "|".join(field.name for field in fields(CompileOptions))

    def option(match: re.Match[str]) -> str:
        return f"--{match[1].replace('_', '-')} {match[2]}"

    return re.sub(rf"\b({names})='?(?!True|False)(\w+)'?", option, text)


def invalid(value: object, expected: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{value!r} is invalid; expected {expected}")


def parser_of(
    kind: Callable[[str], Any], wanted: str, fits: Callable[[Any], bool] = lambda value: True
) -> Callable[[str], Any]:
    """What parses the text of an argument: `kind` makes the value, or raises ValueError; `fits`
    says whether it is allowed. The error says what was wanted."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise invalid(text, wanted) from None
        if not fits(value):
            raise invalid(text, wanted)
        return value

    return parse


def _split(text: str) -> list[int]:
    return [int(word) for word in re.split(r"[\s,]+", text.strip()) if word]


_integer, _number = parser_of(int, "an integer"), parser_of(float, "a number")
whole = parser_of(int, "an integer >= 0", lambda value: value >= 0)
positive = parser_of(int, "an integer >= 1", lambda value: value >= 1)
thread_count = parser_of(
    int, f"an integer in 1..{MOST_THREADS}", lambda value: 1 <= value <= MOST_THREADS
)
above_zero = parser_of(float, "a number above 0", lambda value: 0 < value < math.inf)
drafters = parser_of(str, "a path", bool)
"""A drafter's directory, or copy; `mtpc bench` takes several, with commas between them."""
ids = parser_of(_split, "integers such as 1,2,3")
"""Integers that spaces or commas separate."""
number = parser_of(lambda text: text if text == AUTO else int(text), f"an integer or {AUTO}")
shares = parser_of(
    lambda text: [float(word) for word in text.split(",")], "numbers such as 0.9,0.6,0.3"
)


def path(text: str) -> Path:
    """Parse a path. An empty text, which Python takes for the working directory, is none."""
    return Path(drafters(text))


def numbers(text: str) -> list[int | str]:
    return [AUTO] if text.strip() == AUTO else [*ids(text)]


def buckets_up_to(text: str) -> list[int]:
    """Powers of two below a number, and the number."""
    most = positive(text)
    powers = [2**i for i in range(most.bit_length()) if 2**i < most]
    return [*powers, most]


def speculative(text: str) -> int:
    """Parse vLLM's speculative config: the number of drafts by MTP layers."""
    try:
        config = json.loads(text)
        count, method = config.pop("num_speculative_tokens"), config.pop("method", "mtp")
    except (ValueError, AttributeError, KeyError, TypeError):
        raise invalid(text, "a JSON object with num_speculative_tokens") from None
    if not isinstance(method, str) or not method.endswith("mtp"):
        raise argparse.ArgumentTypeError(
            f"method is {method!r}; expected 'mtp'; a drafter in a checkpoint of its own is "
            "--draft DIR"
        )
    if config:
        raise argparse.ArgumentTypeError(
            f"{next(iter(config))!r} is not supported; expected num_speculative_tokens and method"
        )
    if isinstance(count, bool) or not isinstance(count, int):
        raise invalid(count, "an integer")
    return count


def acceptance_length(text: str) -> float | str:
    """Parse a mean number of tokens per step, or take the name of one."""
    try:
        return float(text)
    except ValueError:
        return text


def origins(text: str) -> tuple[str, ...]:
    """Parse origins, also as the JSON list that vLLM takes."""
    try:
        listed = json.loads(text)
    except ValueError:
        listed = text.split(",")
    return tuple(listed) if isinstance(listed, list) else (text,)


def wiring(text: str) -> dict[str, str | bool]:
    """Parse rules of MTP layers, such as first_features=before,zero_first_embedding=true."""
    rules: dict[str, str | bool] = {}
    for rule in text.split(","):
        name, equals, value = rule.strip().partition("=")
        if not equals:
            raise invalid(rule, "RULE=VALUE")
        rules[name] = {"true": True, "false": False}.get(value, value)
    return rules


def draft_vocab(text: str) -> int | list[int]:
    """Parse a number of tokens, or read token ids from a file."""
    if text.isdecimal():
        return int(text)
    try:
        return ids(Path(text).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {text}: {error}") from None


def size(text: str) -> int:
    """Parse bytes, or bytes a second: "141GiB", "4.8TB/s"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)(?:/s)?", text.strip())
    if match is None or not float(match[1]):
        raise invalid(text, "a size with its unit, as 141GiB, 192GB or 4.8TB/s")
    return int(float(match[1]) * _UNITS[match[2]])


def counts(low: int) -> Callable[[str], list[int]]:
    """A parser of one integer or several, none of them below `low`."""
    return parser_of(ids, f"integers >= {low}, as 1,2,3", lambda found: found and min(found) >= low)


microseconds = parser_of(float, "microseconds, as 10", lambda value: 0 <= value < math.inf)

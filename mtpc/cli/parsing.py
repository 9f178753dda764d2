"""Adds and parses single arguments of the command line, and explains errors in them."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from mtpc import CompileOptions
from mtpc.option_checks import AUTO

_NUMBERS = {"int": "an integer", "float": "a number"}
"""Python's type names in argparse's messages -> words for the user."""
MOST_THREADS = 1024


class SuggestingParser(argparse.ArgumentParser):
    """argparse's parser, with errors of one line that suggest the most similar existing name.

    `--help` leaves out the options of `add_further_group` and `add_further`; `--help-all` shows
    all.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._further: list[Any] = []
        self._left_out: list[argparse.Action] = []
        self.register("type", Path, _path)

    def group(self, title: str) -> Any:
        """The group of this title."""
        known = [group for group in self._action_groups if group.title == title]
        return known[0] if known else self.add_argument_group(title)

    def add_further_group(self, title: str) -> Any:
        """The group of this title, for options for which few users look."""
        group = self.group(title)
        if group not in self._further:
            self._further.append(group)
            self._add_help_all()
        return group

    def add_further(self, title: str, *flags: str, **more: Any) -> None:
        """Add to the group of this title an option for which few users look."""
        self._left_out.append(self.group(title).add_argument(*flags, **more))
        self._add_help_all()

    def _add_help_all(self) -> None:
        flag = "--help-all"
        if flag not in self._option_string_actions:
            self.add_argument(flag, action=_HelpAll, nargs=0, help="show all options, and exit")

    def format_help(self, shows_all: bool = False) -> str:
        """The text of `--help` or, with `shows_all`, of `--help-all`."""
        shown = {
            group: [a for a in group._group_actions if shows_all or a not in self._left_out]
            for group in self._action_groups
            if shows_all or group not in self._further
        }
        formatter = self._get_formatter()
        given = [action for action in self._actions if any(action in of for of in shown.values())]
        formatter.add_usage(self.usage, given, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group, actions in shown.items():
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(actions)
            formatter.end_section()
        left_out = len(self._actions) - len(given)
        if left_out:
            formatter.add_text(f"--help-all shows {left_out} more options.")
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Print the error as all errors of commands are printed, without the usage, and exit."""
        number = re.search(r"invalid (int|float) value: (.*)", message)
        if number:
            expected = _NUMBERS[number[1]]
            message = f"{message[: number.start()]}{number[2]} is invalid; expected {expected}"
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
    """`--help-all`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, SuggestingParser)
        print(parser.format_help(shows_all=True), end="")
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


def add_switches(parser: Any, *rows: tuple[str, str], default: bool | None = False) -> None:
    """Add options without a value, each a (flag, help); `default` is what an absent one gives."""
    for flag, text in rows:
        parser.add_argument(flag, action="store_true", default=default, help=text)


def typed(text: str) -> str:
    """A message of the library with its options as a user of commands types them."""
    names = "|".join(field.name for field in fields(CompileOptions))

    def option(match: re.Match[str]) -> str:
        return f"--{match[1].replace('_', '-')} {match[2]}"

    return re.sub(rf"\b({names})='?(?!True|False)(\w+)'?", option, text)


def invalid(value: object, expected: str) -> argparse.ArgumentTypeError:
    """The error for an argument that cannot be used."""
    return argparse.ArgumentTypeError(f"{value!r} is invalid; expected {expected}")


def drafters(text: str) -> str:
    """A drafter's directory, or copy; `mtpc bench` takes several, with commas between them."""
    _path(text)
    return text


def _path(text: str) -> Path:
    """Parse a path. An empty text, which Python takes for the working directory, is none."""
    if not text:
        raise invalid(text, "a path")
    return Path(text)


def whole(text: str, low: int = 0) -> int:
    """Parse an integer that is `low` or more."""
    if not text.isdecimal() or int(text) < low:
        raise invalid(text, f"an integer >= {low}")
    return int(text)


def positive(text: str) -> int:
    """Parse an integer that is 1 or more."""
    return whole(text, low=1)


def threads(text: str) -> int:
    """Parse a number of threads. OpenMP ends the process if the system refuses one."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST_THREADS:
        raise invalid(text, f"an integer in 1..{MOST_THREADS}")
    return int(text)


def above_zero(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise invalid(text, "a number above 0")
    return value


def ids(text: str) -> list[int]:
    """Parse integers that spaces or commas separate."""
    try:
        return [int(word) for word in re.split(r"[\s,]+", text.strip()) if word]
    except ValueError:
        raise invalid(text, "integers such as 1,2,3") from None


def number(text: str) -> int | str:
    """Parse a number of drafts, or "auto"."""
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise invalid(text, f"an integer or {AUTO}") from None


def numbers(text: str) -> list[int | str]:
    """Parse several numbers of drafts, or "auto"."""
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


def shares(text: str) -> list[float]:
    """Parse numbers that commas separate."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise invalid(text, "numbers such as 0.9,0.6,0.3") from None


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

"""`mtpc completion`: a script that completes commands, options and files in a shell."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtpc.cli.arguments import build_parser
from mtpc.cli.parsing import SuggestingParser
from mtpc.errors import OptionError


def command(args: argparse.Namespace) -> int:
    """Print the script, and return the exit code."""
    if find_spec("shtab") is None:
        raise OptionError("completion needs shtab, not installed here: pip install shtab")
    import shtab

    parser = build_parser()
    for action in _shown_actions(parser):
        if action.type is Path:
            action.complete = shtab.FILE
    print(shtab.complete(parser, shell=args.shell))
    return 0


def _shown_actions(parser: argparse.ArgumentParser) -> list[Any]:
    """The arguments of a parser and of its commands, none of them left out."""
    if isinstance(parser, SuggestingParser):
        parser.show_all()
    found = list[Any](parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in {id(choice): choice for choice in action.choices.values()}.values():
                found += _shown_actions(command)
    return found

"""`mtpc completion`: a script that completes commands, options and files in a shell."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from mtpc.cli.arguments import build_parser
from mtpc.errors import OptionError


def command(args: argparse.Namespace) -> int:
    if find_spec("shtab") is None:
        raise OptionError("completion needs shtab, not installed here: pip install shtab")
    import shtab

    parser = build_parser()
    for action in parser.show_all():
        if action.type is Path:
            action.complete = shtab.FILE
    print(shtab.complete(parser, shell=args.shell))
    return 0

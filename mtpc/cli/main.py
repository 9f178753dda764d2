"""Entry point: runs one command, and turns every known error into one line and an exit code."""

from __future__ import annotations

import argparse
import gc
import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from mtpc.cli.arguments import parse
from mtpc.cli.parsing import typed
from mtpc.cli.ranks import is_other, ranks_of
from mtpc.environment import without_blas_threads
from mtpc.errors import MtpcError
from mtpc.program.processes import ended_by_sigterm, without_collections

EXIT_ERROR, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141


def run() -> NoReturn:
    """Run this process's command line, and end the process."""
    code = main()
    gc.freeze()  # Skips a last garbage collection, which takes a second after a build.
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. None means the process's own arguments.

    Returns:
        The exit code: 0 for success, 1 for a negative result (`doctor`, `check`, `cache verify` and
        `cache why`), 2 for an error, 130 for Ctrl-C, 143 for SIGTERM, 141 for a closed output pipe.
    """
    # '?' for a character that the terminal cannot encode, instead of an error.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    is_own, argv = argv is None, sys.argv[1:] if argv is None else argv
    args = parse(argv)
    try:
        with ended_by_sigterm(), _only_json(args), ranks_of(args, argv), _noted(args):
            code: int = _imported(args.module, is_own).command(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # The reader of the output has ended: `mtpc inspect --nodes | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (MtpcError, OSError) as error:  # OSError: of a file that a command writes.
        if args.traceback:
            traceback.print_exc()
        print("error:", typed(" ".join(str(error).split())), file=sys.stderr)
        return EXIT_ERROR


def _imported(name: str, is_own: bool) -> ModuleType:
    """The module of a command, which imports torch. What an import makes stays, so no collection
    needs to look at it: not meanwhile, and not later where the process is the command's own."""
    with without_collections(), without_blas_threads() if is_own else nullcontext():
        module = import_module(f"mtpc.cli.{name}")
        if is_own:
            gc.freeze()
    return module


class _Notes(logging.Handler):
    """Prints what the library warns of, each line once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said = set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line, but not a server's, which has a log of its own."""
        line = typed(record.getMessage())
        if record.name == "mtpc" and line not in self._said and not is_other():
            print("note:", line, file=sys.stderr)
        self._said.add(line)


@contextmanager
def _noted(args: argparse.Namespace) -> Iterator[None]:
    """Within the block warnings of the library are notes on stderr, but for `--quiet`."""
    log, is_quiet = logging.getLogger("mtpc"), getattr(args, "quiet", False)
    handler = logging.NullHandler() if is_quiet else _Notes()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextmanager
def _only_json(args: argparse.Namespace) -> Iterator[None]:
    """With `--json`, standard output gets the command's `args.result`, and nothing else.

    Ranks other than the first have no result.
    """
    if not getattr(args, "as_json", False):
        yield
        return
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:  # A command that fails may have a result of what it did before.
        if hasattr(args, "result"):
            print(json.dumps(args.result))

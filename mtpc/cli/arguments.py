"""What the command line accepts. Imports no torch, so that `--help` is immediate."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import mtpc
from mtpc.config import CompileOptions

DEFAULT_NEW_TOKENS = 128


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments; prints argparse's own message and exits where they are wrong."""
    args, unknown = _build_parser().parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def compile_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `CompileOptions` that the user gave."""
    given = {f.name: getattr(args, f.name, None) for f in fields(CompileOptions)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }


class _Parser(argparse.ArgumentParser):
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


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mtpc", description=mtpc.__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("-V", "--version", action="version", version=f"mtpc {mtpc.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary, add_arguments in (
        ("run", "generate text with a captured MTP step, and say how it went", _add_run),
        ("inspect", "show the graph of one step before, between and after passes", _add_inspect),
        ("doctor", "show what mtpc finds on this machine, and how to get what is missing", None),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            allow_abbrev=False,
        )
        command.set_defaults(parser=command)
        command.add_argument(
            "--traceback", action="store_true", help="show where in mtpc an error was raised"
        )
        if add_arguments is not None:
            add_arguments(command)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    prompt: dict[str, Any] = {"action": "append", "dest": "prompts"}
    parser.add_argument(
        "-p", "--prompt", **prompt, metavar="TEXT", help="a prompt; repeat it for a batch"
    )
    parser.add_argument(
        "--ids", **prompt, type=_ids, metavar='"1 2 3"', help="a prompt as token ids"
    )
    parser.add_argument(
        "-n",
        "--max-new-tokens",
        type=int,
        default=DEFAULT_NEW_TOKENS,
        metavar="N",
        help="new tokens per prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="do not stop at the end-of-sequence ids"
    )
    parser.add_argument(
        "--threads",
        type=_positive,
        metavar="N",
        help="CPU threads (default: 1 for checkpoints under 64 MiB, else torch's choice)",
    )
    _add_compile_options(parser, batch_buckets="as many as there are prompts")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads; expected 1 or more")
    return int(text)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--after", metavar="PASS", help="stop after this pass (default: the last)")
    where.add_argument("--before", metavar="PASS", help="stop before this pass")
    parser.add_argument(
        "--phase",
        choices=("decode", "prefill"),
        default="decode",
        help="which step to show (default: %(default)s)",
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="R", help="its requests (default: %(default)s)"
    )
    parser.add_argument("--nodes", action="store_true", help="print every node of the graph")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the step to a file")
    _add_compile_options(parser, backend="eager")
    parser.set_defaults(backend="eager")


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        nargs="?",
        type=Path,
        metavar="CHECKPOINT",
        help="directory with config.json and *.safetensors (default: the demo model)",
    )


def _add_compile_options(parser: argparse.ArgumentParser, **defaults: str) -> None:
    """Options of `mtpc.compile`; one not given is left to `CompileOptions`.

    Args:
        parser: where to.
        **defaults: what help says of options for which the command has another default.
    """
    group = parser.add_argument_group("compile options")
    for name, kind, metavar, text in (
        ("spec_tokens", int, "K", "drafts per step; 0 is plain decoding"),
        ("batch_buckets", _ids, "R,R", "request counts to capture"),
        ("max_len", int, "N", "longest sequence, prompt and new tokens"),
        ("page_size", int, "N", "tokens per KV page"),
        ("num_pages", int, "N", "pages in the KV pool (default: enough for the largest bucket)"),
        ("prefill_chunk", int, "N", "prompt tokens per prefill step"),
        ("backend", str, "NAME", "auto, cpu, eager or null"),
        ("dtype", str, "NAME", "dtype of the weights (default: the checkpoint's)"),
    ):
        default = defaults.get(name, getattr(CompileOptions, name))
        shown = "" if default is None else f" (default: {_listed(default)})"
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=kind, metavar=metavar, help=text + shown)
    for flag, dest in (("--disable-pass", "disabled_passes"), ("--enable-pass", "enabled_passes")):
        text = f"{flag[2:].replace('-', ' an optional ')} by name; repeatable"
        group.add_argument(flag, action="append", dest=dest, metavar="PASS", help=text)
    group.add_argument(
        "--verify-passes",
        action="store_true",
        default=None,
        help="propagate fake tensors through the graph after every pass",
    )


def _listed(value: object) -> str:
    """A tuple as it is typed on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _ids(text: str) -> list[int]:
    """Integers separated by spaces or commas."""
    try:
        return [int(word) for word in re.split(r"[\s,]+", text.strip()) if word]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of integers, as 1,2,3") from None

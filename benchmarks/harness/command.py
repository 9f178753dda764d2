"""Shared parts of the benchmarks' command lines: options, progress, directories."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.harness.machine import BUFFER_BYTES
from benchmarks.harness.models import SHAPES
from benchmarks.harness.rounds import Tell
from benchmarks.peers.llama_decoder import BENCH
from mtpc.config import KV_CACHE_DTYPES, SCHEMES


def positive(text: str) -> int:
    """An argument that is a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _llama_programs(text: str) -> Path:
    """An argument that is a directory of llama.cpp's programs."""
    if not (Path(text) / BENCH).is_file():
        raise argparse.ArgumentTypeError(f"{text}: expected a directory that has {BENCH}")
    return Path(text)


def teller() -> Tell:
    """Plain lines on standard error, because a live display would use the measured CPU."""
    start = time.perf_counter()

    def tell(text: str) -> None:
        print(f"[{time.perf_counter() - start:7.1f} s] {text}", file=sys.stderr, flush=True)

    return tell


def quiet() -> None:
    """Silence transformers."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def begin(args: argparse.Namespace) -> Tell:
    """Set torch's threads, silence transformers, and return a function that reports progress."""
    quiet()
    if getattr(args, "threads", None):
        torch.set_num_threads(args.threads)
    return teller()


NUMBER: dict[str, Any] = dict(type=positive, metavar="N")
"""How an option takes a positive number; `NUMBERS`: several."""
NUMBERS: dict[str, Any] = NUMBER | dict(nargs="+")
_SHARED: dict[str, dict[str, Any]] = {
    "--shape": dict(choices=SHAPES, default="0.5b", help="sizes of the model"),
    "--weights": dict(choices=("random", "accepting"), help="which accept no drafts, or all"),
    "--backend": dict(default="auto", help="mtpc's backend"),
    "--batches": NUMBER | dict(help="requests at a time"),
    "--batch-buckets": NUMBER,
    "--spec-tokens": dict(type=int, metavar="K", help="drafts a step"),
    "--prompt-tokens": NUMBER,
    "--new-tokens": NUMBER | dict(help="decoded for each request"),
    "--max-len": NUMBER,
    "--acceptance": dict(nargs="+", type=float, metavar="P", help="synthetic"),
    "--peers": dict(
        action=argparse.BooleanOptionalAction, default=True, help="run transformers, too"
    ),
    "--kv-cache-dtypes": dict(
        choices=KV_CACHE_DTYPES, metavar="NAME", help="what pages of K and V hold"
    ),
    "--quantize": dict(
        nargs="+",
        choices=SCHEMES,
        default=[],
        metavar="SCHEME",
        help="schemes by which mtpc quantises all weights, in engines of their own",
    ),
    "--vllm-python": dict(
        type=Path, metavar="FILE", help="interpreter of an environment with vLLM"
    ),
    "--llama-bench": dict(
        type=_llama_programs,
        metavar="DIRECTORY",
        help="directory with llama-batched-bench, -quantize and -server of llama.cpp",
    ),
    "--gguf-python": dict(
        type=Path,
        default=Path(sys.executable),
        metavar="FILE",
        help="interpreter that has the package gguf; default: this one",
    ),
    "--peer-context": dict(
        type=positive,
        default=8192,
        metavar="N",
        help="the longest context that peers are measured at, for they compute it",
    ),
    "--repeats": NUMBER | dict(help="undisturbed samples of each row"),
    "--threads": dict(type=positive, metavar="N", help="torch's threads; default: as torch has it"),
    "--max-foreign": dict(
        type=float, default=0.05, metavar="SHARE", help="CPU time that other processes may use"
    ),
    "--seed": dict(type=int, default=0),
    "--probe-mib": dict(
        type=positive, default=BUFFER_BYTES >> 20, metavar="N", help="read by the probe"
    ),
    "--workdir": dict(
        type=Path, help="keep checkpoints, caches and logs here; default: a temporary directory"
    ),
    "--out": dict(type=Path, metavar="FILE", help="write everything as JSON"),
}
"""Options that several benchmarks have."""
SAMPLING = ("--max-foreign", "--threads", "--seed")
"""Those that `rounds.sample` needs, beside `--repeats`, and those of what it samples."""
RESULTS = ("--out",)
"""What every benchmark takes."""
FILES = ("--workdir", *RESULTS)
"""Those of a benchmark that writes checkpoints."""
DECODING = (*FILES, *SAMPLING, "--probe-mib")
"""Those of `rounds.decode_case`, beside `--repeats`."""
PEERS = ("--vllm-python", "--llama-bench", "--gguf-python")
"""Those that `peer_decoders` needs."""


def new_parser(name: str, doc: str | None, *flags: str, **defaults: Any) -> argparse.ArgumentParser:
    """The command line of `python -m benchmarks.NAME`, described by its module's first line.

    Args:
        name: of the module.
        doc: its docstring.
        *flags: options that several benchmarks have, with their usual defaults.
        **defaults: such options with a default of this benchmark; one of a list takes several
            values.
    """
    description = (doc or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    for flag in flags:
        parser.add_argument(flag, **_SHARED[flag])
    for name, default in defaults.items():
        form = _SHARED[flag := f"--{name.replace('_', '-')}"]
        several = {"nargs": "+"} if isinstance(default, list) else {}
        parser.add_argument(flag, **form | several | {"default": default})
    return parser


def check_peer_context(parser: argparse.ArgumentParser, args: Any, contexts: Sequence[int]) -> None:
    """Refuse, as the parser does, peers that no context is left for.

    Args:
        parser: of the command line.
        args: has `--peer-context` and the peers' options.
        contexts: all that are measured, in tokens.
    """
    if (args.vllm_python or args.llama_bench) and min(contexts) > args.peer_context:
        parser.error(
            f"every context is longer than --peer-context, which is {args.peer_context}; raise it, "
            "or leave the peers out"
        )


@contextmanager
def working_directory(path: Path | None) -> Iterator[Path]:
    """A directory for checkpoints and logs: the given one, which is kept, or a temporary one."""
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="mtpc-benchmark-") as temporary:
        yield Path(temporary)

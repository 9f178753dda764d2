"""A GGUF file as people have it, in mtpc and in llama.cpp: starts, memory, decode steps, a prompt.

    python -m benchmarks.released FILE --llama-bench DIR --out FILE.json --markdown FILE.md

A start is a process, from just before it begins to its first token; the file is in the page cache.
Steps and prompts are sampled in turns. The tokens of prompts are random.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import mtpc
from benchmarks.harness import command
from benchmarks.harness.command import positive
from benchmarks.harness.decoders import MtpcDecoder
from benchmarks.harness.machine import FamilyWatch
from benchmarks.harness.results import Record, Table, publish
from benchmarks.harness.sampling import Tell
from benchmarks.peers.llama_decoder import LlamaDecoder
from benchmarks.real_size import start
from mtpc.backends.cpu_kernels import build_kernels
from mtpc.store.entries import EntryStore

MIB = 2**20
PROMPT = "def quicksort(arr):"
COLUMNS = (
    "what", "mtpc best", "mtpc median", "llama.cpp best", "llama.cpp median", "times as fast",
)  # fmt: skip
NOTES = (
    "start: seconds to the first token of a short text; cold: kernels are built, steps are not.",
    "peak: MiB, the most that was resident in the process until then, mapped weights included.",
    "decode: milliseconds of a step. prompt: seconds of its prefill.",
    "times as fast: of the medians. others' share: the most of the CPU that other processes used"
    " during a sample.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = _parse(argv)
    tell = command.begin(args)
    with command.working_directory(args.workdir) as workdir:
        cache = workdir.absolute() / "cache"
        rows = [*_starts(args, cache, tell), *_steps(args, cache, tell)]
    files = {"file": _described(args.file)}
    if args.llama_file:
        files["llama_file"] = _described(args.llama_file)
    publish("released", args, {**files, "rows": rows}, table)
    return 0


def _described(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256}


def table(record: Record) -> Table:
    """A record's table."""
    others = max(max(row["foreign"]) for row in record["rows"])
    files = [f"{key}: {record[key]}" for key in ("file", "llama_file") if key in record]
    notes = (*NOTES, f"others' share: {others:.0%}", *files)
    return Table("A released file", COLUMNS, [_cells(row) for row in record["rows"]], notes)


def _cells(row: dict[str, Any]) -> list[str]:
    ours, theirs = row["mtpc"], row["llama"]
    shown = [
        f"{pick(some):.3g}" if some else "-" for some in (ours, theirs) for pick in (min, median)
    ]
    return [row["what"], *shown, f"{median(theirs) / median(ours):.2f}" if theirs else "-"]


def _starts(args: argparse.Namespace, cache: Path, tell: Tell) -> Iterator[dict[str, Any]]:
    tell("build the kernels")
    build_kernels(EntryStore(cache))
    for name, count in (("cold", 1), ("warm", args.repeats)):
        found, foreign = list[dict[str, Any]](), list[float]()
        for _ in range(count):
            watch = FamilyWatch()
            found.append(start(args.file.absolute(), cache, 0, 2, PROMPT))
            foreign.append(watch.foreign_share())
            tell(f"{name} start: {found[-1]['first_token_s']:.2f} s")
        common: dict[str, Any] = {"llama": [], "foreign": foreign}
        yield {"what": f"{name} start", "mtpc": [f["first_token_s"] for f in found], **common}
        yield {"what": f"{name} peak", "mtpc": [f["peak_bytes"] / MIB for f in found], **common}


@dataclass(frozen=True)
class Engines:
    """Both engines on one file.

    Attributes:
        args: the command line.
        model: mtpc's; it has a bucket for each batch.
        llama: None if it is not measured.
    """

    args: argparse.Namespace
    model: mtpc.SpecModel
    llama: LlamaDecoder | None
    _generator: torch.Generator = field(default_factory=torch.Generator)

    def _tokens(self, length: int) -> list[int]:
        most = self.model.served.vocab_size // 2  # Special tokens are above.
        found = torch.randint(most, (length,), generator=self._generator)
        return [int(each) for each in found]

    def step_ms(self, batch: int) -> tuple[float, float | None]:
        """Milliseconds of a decode step, in each."""
        context, count, theirs = self.args.context, self.args.new_tokens, None
        prompts = [self._tokens(context) for _ in range(batch)]
        ours = MtpcDecoder(self.model, 0.0).decode(prompts, count).ms_per_step
        if self.llama:
            theirs = 1e3 * self.llama.run(batch, context, count)[0].decode_s / count
        return ours, theirs

    def prompt_s(self) -> tuple[float, float | None]:
        """Seconds of a prompt's prefill, in each."""
        length, before = self.args.prompt, self.model.stats.prefill_s
        self.model.generate([self._tokens(length)], 1, ignore_eos=True)
        theirs = self.llama.run(1, length, 1)[0].prompt_s if self.llama else None
        return self.model.stats.prefill_s - before, theirs


def _steps(args: argparse.Namespace, cache: Path, tell: Tell) -> list[dict[str, Any]]:
    model = mtpc.compile(
        args.file,
        cache_dir=cache,
        spec_tokens=0,
        batch_buckets=tuple(args.batches),
        prefill_chunk=args.prompt,
        max_len=max(args.prompt, args.context + args.new_tokens) + command.HEADROOM,
    )
    threads, file = torch.get_num_threads(), (args.llama_file or args.file).absolute()
    llama = LlamaDecoder(args.llama_bench, file, "", threads) if args.llama_bench else None
    engines = Engines(args, model, llama)
    cases: dict[str, Callable[[], tuple[float, float | None]]] = {
        f"decode, batch {b}": partial(engines.step_ms, b) for b in args.batches
    }
    cases[f"prompt of {args.prompt}"] = engines.prompt_s
    rows: list[dict[str, Any]] = [
        {"what": what, "mtpc": [], "llama": [], "foreign": []} for what in cases
    ]
    for turn in range(args.repeats + 1):
        for row, (what, sample) in zip(rows, cases.items(), strict=True):
            watch = FamilyWatch()
            ours, theirs = sample()
            tell(f"round {turn}: {what}: {ours:.3g}, llama.cpp {theirs}")
            if turn > 0:  # The first one warms up.
                row["mtpc"].append(ours)
                row["llama"] += [] if theirs is None else [theirs]
                row["foreign"].append(watch.foreign_share())
    model.close()
    return rows


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    flags = ("--threads", "--llama-bench", "--gguf-python", *command.FILES)
    parser = command.new_parser("released", __doc__, *flags)
    add = parser.add_argument
    add("file", type=Path, help="a GGUF file")
    text = "what llama.cpp reads (default: the same); both may be as good, and of unlike sizes"
    add("--llama-file", type=Path, metavar="FILE", help=text)
    add("--batches", nargs="+", type=positive, default=[1, 4, 8], metavar="N")
    add("--context", type=positive, default=128, metavar="N", help="tokens before those decoded")
    add("--new-tokens", type=positive, default=64, metavar="N", help="tokens that are decoded")
    add("--prompt", type=positive, default=512, metavar="N", help="tokens of the timed prompt")
    add("--repeats", type=positive, default=5, metavar="N", help="samples of each")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

"""A GGUF file as people have it, in mtpc and in llama.cpp: starts, memory, decode steps, a prompt.

    python -m benchmarks.released FILE --llama-bench DIR --out FILE.json

A start is a process, from just before it begins to its first token; the file is in the page cache.
Steps and prompts are sampled in turns. The tokens of prompts are random.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import mtpc
from benchmarks.harness import command
from benchmarks.harness.bench import HEADROOM, Benchmark, Run
from benchmarks.harness.decoders import MtpcDecoder
from benchmarks.harness.machine import CpuWatch
from benchmarks.harness.tables import Column, Record, Row, TableForm
from benchmarks.peers.llama_decoder import LlamaDecoder
from benchmarks.real_size import start
from mtpc.backends.cpu_kernels import build_kernels
from mtpc.store.entries import EntryStore

MIB = 2**20
PROMPT = "def quicksort(arr):"


def measure(run: Run) -> Iterator[list[Row]]:
    """Starts, then steps and prompts in turns."""
    for name in ("file", "llama_file"):
        if path := getattr(run.args, name):
            run.facts[name] = _described(path)
    cache = run.workdir.absolute() / "cache"
    yield from _starts(run, cache)
    yield _steps(run, cache)


def _described(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256}


def _starts(run: Run, cache: Path) -> Iterator[list[Row]]:
    run.tell("build the kernels")
    build_kernels(EntryStore(cache))
    for name, count in (("cold", 1), ("warm", run.args.repeats)):
        found, foreign = list[Row](), list[float]()
        for _ in range(count):
            watch = CpuWatch()
            found.append(start(run.args.file.absolute(), cache, 0, 2, PROMPT))
            foreign.append(watch.foreign_share())
            run.tell(f"{name} start: {found[-1]['first_token_s']:.2f} s")
        common: Row = {"llama": [], "foreign": foreign}
        yield [
            {"what": f"{name} start", "mtpc": [f["first_token_s"] for f in found], **common},
            {"what": f"{name} peak", "mtpc": [f["peak_bytes"] / MIB for f in found], **common},
        ]


@dataclass(frozen=True)
class Engines:
    """Both engines on one file.

    Attributes:
        args: the command line.
        model: mtpc's; it has a bucket for each batch.
        llama: None if it is not measured.
    """

    args: Any
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
            theirs = 1e3 * self.llama.run(batch, context, count).decode_s / count
        return ours, theirs

    def prompt_s(self) -> tuple[float, float | None]:
        """Seconds of a prompt's prefill, in each."""
        length, before = self.args.prompt, self.model.stats.prefill_s
        self.model.generate([self._tokens(length)], 1, ignore_eos=True)
        theirs = self.llama.run(1, length, 1).prompt_s if self.llama else None
        return self.model.stats.prefill_s - before, theirs


def _steps(run: Run, cache: Path) -> list[Row]:
    args = run.args
    model = mtpc.compile(
        args.file,
        cache_dir=cache,
        spec_tokens=0,
        batch_buckets=tuple(args.batches),
        prefill_chunk=args.prompt,
        max_len=max(args.prompt, args.context + args.new_tokens) + HEADROOM,
    )
    threads, file = torch.get_num_threads(), (args.llama_file or args.file).absolute()
    llama = LlamaDecoder(args.llama_bench, file, "", threads) if args.llama_bench else None
    engines = Engines(args, model, llama)
    cases: dict[str, Callable[[], tuple[float, float | None]]] = {
        f"decode, batch {b}": partial(engines.step_ms, b) for b in args.batches
    }
    cases[f"prompt of {args.prompt}"] = engines.prompt_s
    rows: list[Row] = [{"what": what, "mtpc": [], "llama": [], "foreign": []} for what in cases]
    for turn in range(args.repeats + 1):
        for row, (what, sample) in zip(rows, cases.items(), strict=True):
            watch = CpuWatch()
            ours, theirs = sample()
            run.tell(f"round {turn}: {what}: {ours:.3g}, llama.cpp {theirs}")
            if turn > 0:  # The first one warms up.
                row["mtpc"].append(ours)
                row["llama"] += [] if theirs is None else [theirs]
                row["foreign"].append(watch.foreign_share())
    model.close()
    return rows


def _of(engine: str, pick: Callable[[Sequence[float]], float]) -> Callable[..., float | None]:
    """The best or the median of an engine's samples."""
    return lambda row, _: pick(row[engine]) if row[engine] else None


def _faster(row: Row, rows: Sequence[Row]) -> float | None:
    return median(row["llama"]) / median(row["mtpc"]) if row["llama"] else None


def _notes(record: Record) -> Iterator[str]:
    yield from NOTES
    yield f"others' share: {max(max(row['foreign']) for row in record['rows']):.0%}"
    yield from (f"{key}: {record[key]}" for key in ("file", "llama_file") if key in record)


NOTES = (
    "start: seconds to the first token of a short text; cold: kernels are built, steps are not.",
    "peak: MiB, the most that was resident in the process until then, mapped weights included.",
    "decode: milliseconds of a step. prompt: seconds of its prefill.",
    "times as fast: of the medians. others' share: the most of the CPU that other processes used"
    " during a sample.",
)
FORM = TableForm(
    "A released file",
    (
        Column("what"),
        Column("mtpc best", _of("mtpc", min), ".3g"),
        Column("mtpc median", _of("mtpc", median), ".3g"),
        Column("llama.cpp best", _of("llama", min), ".3g"),
        Column("llama.cpp median", _of("llama", median), ".3g"),
        Column("times as fast", _faster, ".2f"),
    ),
    _notes,
)
BENCHMARK = Benchmark(
    "released",
    __doc__,
    measure,
    FORM.of,
    ("--threads", "--llama-bench", "--gguf-python", *command.FILES),
    dict(batches=[1, 4, 8], new_tokens=64, repeats=5),
    {
        "file": dict(type=Path, help="a GGUF file"),
        "--llama-file": dict(
            type=Path,
            metavar="FILE",
            help="what llama.cpp reads (default: the same); both may be as good, and of unlike "
            "sizes",
        ),
        "--context": command.NUMBER | dict(default=128, help="tokens before those decoded"),
        "--prompt": command.NUMBER | dict(default=512, help="tokens of the timed prompt"),
    },
)
main, table = BENCHMARK.commands(__name__)

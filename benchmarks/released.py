"""A GGUF file as people have it, in mtpc and in llama.cpp: starts, memory, decode steps, a prompt.

    python -m benchmarks.released FILE --llama-bench DIR --out FILE.json

A start is a process, from just before it begins to its first token; the file is in the page cache.
Steps and prompts are sampled in turns. The tokens of prompts are random.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

import mtpc
from benchmarks.harness import command
from benchmarks.harness.bench import HEADROOM, Benchmark, Run
from benchmarks.harness.decoders import Decoder, MtpcDecoder
from benchmarks.harness.rounds import Case
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
    run.tell("build the kernels")
    build_kernels(EntryStore(cache))
    once = partial(start, run.args.file.absolute(), cache, 0, 2, PROMPT)
    cold, warm = Case(dict(what="cold"), once), Case(dict(what="warm"), once)
    cold.attempt(run.tell)
    run.sample([warm])
    for name, case in (("cold", cold), ("warm", warm)):
        yield [_row(f"{name} start", case, run, "first_token_s")]
        yield [_row(f"{name} peak", case, run, "peak_bytes", 1 / MIB)]
    cases = _cases(run, cache)
    run.sample(cases)
    yield [_row(case.row["what"], case, run, "mtpc") for case in cases]


def _row(what: str, case: Case, run: Run, ours: str, factor: float = 1) -> Row:
    """All samples that count, of each engine."""
    kept = case.undisturbed(run.args.max_foreign) or case.samples
    theirs = [sample["llama"] for sample in kept if "llama" in sample]
    foreign = [sample["foreign_share"] for sample in kept]
    return dict(
        what=what, mtpc=[factor * sample[ours] for sample in kept], llama=theirs, foreign=foreign
    )


def _described(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256}


def _cases(run: Run, cache: Path) -> list[Case]:
    """Milliseconds of a decode step of each batch, and seconds of a prompt, in each engine."""
    args, generator = run.args, torch.Generator()
    model = mtpc.compile(
        args.file,
        cache_dir=cache,
        spec_tokens=0,
        batch_buckets=tuple(args.batches),
        prefill_chunk=args.prompt,
        max_len=max(args.prompt, args.context + args.new_tokens) + HEADROOM,
    )
    engines: dict[str, Decoder] = {"mtpc": MtpcDecoder(model, 0.0)}
    if args.llama_bench:
        threads, file = torch.get_num_threads(), (args.llama_file or args.file).absolute()
        engines["llama"] = LlamaDecoder(args.llama_bench, file, "", threads)
    most = model.served.vocab_size // 2  # Special tokens are above.

    def steps(batch: int) -> Row:
        prompts = torch.randint(most, (batch, args.context), generator=generator).tolist()
        return {n: e.decode(prompts, args.new_tokens).ms_per_step for n, e in engines.items()}

    def prompt() -> Row:
        prompts = torch.randint(most, (1, args.prompt), generator=generator).tolist()
        return {name: engine.prefill(prompts).seconds for name, engine in engines.items()}

    works = {f"decode, batch {b}": partial(steps, b) for b in args.batches}
    works[f"prompt of {args.prompt}"] = partial(prompt)
    return [Case(dict(what=what), work, work) for what, work in works.items()]


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
    ("--threads", "--max-foreign", "--llama-bench", "--gguf-python", *command.FILES),
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

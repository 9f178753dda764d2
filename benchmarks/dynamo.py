"""A model's forward with torch.compile: eager, Inductor, and the backend mtpc, sampled in rounds.

    python -m benchmarks.dynamo              # the 0.5B shape: a prompt of 512, and decode rows
    python -m benchmarks.dynamo --shape tiny --repeats 1

transformers' Qwen2 in bfloat16, random weights. "prefill" is one forward of a prompt without a
cache, with logits of the last row only. "decode" is a forward of one token of each request, with
the prompts in transformers' StaticCache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
import transformers
from transformers import StaticCache

from benchmarks.harness import command
from benchmarks.harness.machine import CpuWatch
from benchmarks.harness.models import SHAPES, make_config
from benchmarks.harness.results import (
    SAMPLES_NOTE,
    Columns,
    Counts,
    Record,
    Table,
    publish,
    sample_counts,
)
from benchmarks.harness.sampling import ATTEMPTS, Sampled, Tell, in_rounds
from mtpc.integrations.dynamo import backend
from mtpc.models.families.mimo import MIMO
from mtpc.models.seams import CACHE

ENGINES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "Inductor": {"backend": "inductor"},
    "mtpc": {"backend": "mtpc", "options": {"fallback": "error"}},
}
"""Name in the table -> torch.compile's backend; None does not compile."""
NOTES = (
    "ms: of one forward; medians. over Inductor: its time over the engine's; above 1 is faster.",
    "first call: with compilation.",
    SAMPLES_NOTE,
)


@dataclass(frozen=True)
class Sample:
    """Milliseconds of a forward, and the share of the CPU that other processes used."""

    ms: float
    foreign_share: float

    def __str__(self) -> str:
        return f"{self.ms:.2f} ms"


@dataclass
class Case(Sampled[Sample]):
    """A row and its samples so far.

    Attributes:
        forward: "prefill" or "decode".
        batch: requests.
        engine: a name of `ENGINES`.
        run: runs one forward.
        calls: forwards per sample.
        first_s: seconds of the first forward.
        samples: all samples.
    """

    forward: str
    batch: int
    engine: str
    run: Callable[[], Any]
    calls: int
    first_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.forward}, batch {self.batch}, {self.engine}"


@dataclass(frozen=True)
class Row(Counts):
    """The figures of a case."""

    forward: str
    batch: int
    engine: str
    ms: float
    first_s: float


def cases(model: Any, args: argparse.Namespace) -> Iterator[Case]:
    """Each forward with each engine."""
    vocab = model.config.vocab_size
    for engine, options in ENGINES.items():
        called = model if options is None else torch.compile(model, dynamic=False, **options)
        prompt = torch.randint(0, vocab, (1, args.prompt_tokens))
        yield Case("prefill", 1, engine, _prefill(called, prompt), 1)
        for batch in args.batches:
            prompts = torch.randint(0, vocab, (batch, args.prompt_tokens))
            run = _decode(model, called, prompts, args.calls * (2 + args.repeats * ATTEMPTS))
            yield Case("decode", batch, engine, run, args.calls)


def _prefill(called: Any, prompt: torch.Tensor) -> Callable[[], Any]:
    return lambda: called(prompt, use_cache=False, logits_to_keep=1).logits


def _decode(model: Any, called: Any, prompts: torch.Tensor, room: int) -> Callable[[], Any]:
    """A forward of one token after each prompt, with a static cache."""
    cache = StaticCache(config=model.config, max_cache_len=prompts.shape[1] + room)
    model(prompts, logits_to_keep=1, **{CACHE: cache})
    return lambda: called(prompts[:, -1:], **{CACHE: cache}).logits


def sample_in_turns(wanted: Sequence[Case], args: argparse.Namespace, tell: Tell) -> None:
    """Sample the cases in rounds, until every case has enough samples."""
    for case in wanted:
        start = time.perf_counter()
        case.run()
        case.first_s = time.perf_counter() - start
        tell(f"first call: {case}: {case.first_s:.1f} s")

    def take(case: Case) -> Sample:
        watch, start = CpuWatch(), time.perf_counter()
        for _ in range(case.calls):
            case.run()
        ms = 1e3 * (time.perf_counter() - start) / case.calls
        return Sample(ms, watch.foreign_share())

    in_rounds(wanted, args.repeats, args.max_foreign, take, tell)


def summarise(case: Case, max_foreign: float) -> Row:
    """The row of a sampled case."""
    ms = median(sample.ms for sample in case.kept(max_foreign))
    counts = case.counts(max_foreign)
    return Row(case.forward, case.batch, case.engine, ms, case.first_s, **counts)


def table(record: Record) -> Table:
    """A record's table."""
    told, rows = record["arguments"], [Row(**row) for row in record["rows"]]
    inductor = {(row.forward, row.batch): row.ms for row in rows if row.engine == "Inductor"}
    columns: Columns[Row] = {
        "forward": lambda row: row.forward,
        "batch": lambda row: str(row.batch),
        "engine": lambda row: row.engine,
        "ms": lambda row: f"{row.ms:.2f}",
        "over Inductor": lambda row: f"{inductor[row.forward, row.batch] / row.ms:.2f}x",
        "first call, s": lambda row: f"{row.first_s:.1f}",
        "samples": sample_counts,
    }
    title = f"torch.compile: prompts of {told['prompt_tokens']} tokens, {told['shape']}"
    return Table.of(title, columns, rows, NOTES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = _parse(argv)
    tell = command.begin(args)
    torch.manual_seed(args.seed)
    config = make_config(MIMO, SHAPES[args.shape])
    config.num_hidden_layers -= 1  # Of an MTP layer this benchmark has no use.
    model: Any = transformers.Qwen2ForCausalLM(config)
    model = model.to(torch.bfloat16).eval()
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        wanted = list(cases(model, args))
        sample_in_turns(wanted, args, tell)
    for report in backend.reports:
        tell(str(report))
    rows = [asdict(summarise(case, args.max_foreign)) for case in wanted]
    publish("dynamo", args, {"rows": rows, "reports": [*map(str, backend.reports)]}, table)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser(
        "dynamo", __doc__, *command.FILES, "--shape", *command.SAMPLING,
        prompt_tokens=512, batches=[1, 4], repeats=7,
    )  # fmt: skip
    help_ = "decode rows of a sample"
    parser.add_argument("--calls", type=command.positive, default=16, metavar="N", help=help_)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

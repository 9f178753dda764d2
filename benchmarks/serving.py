"""Serving under load: requests of mixed lengths, on mtpc and on vLLM's CPU build.

    python -m benchmarks.serving --vllm-python VENV/bin/python --out RESULTS.json

For each load (Poisson arrivals of a rate, or a burst) the same requests go to mtpc and to vLLM,
with drafts and without, in rounds. The figures are those that a caller sees: tokens per second,
time to the first token, and gaps between outputs.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Protocol

import mtpc
from benchmarks.harness import command
from benchmarks.harness.arrivals import Arrival, Trace, draw_arrivals, serve
from benchmarks.harness.machine import CpuWatch
from benchmarks.harness.models import SHAPES
from benchmarks.harness.results import (
    SAMPLES_NOTE,
    Columns,
    Counts,
    Record,
    Table,
    publish,
    sample_counts,
)
from benchmarks.harness.sampling import Sampled, Tell, in_rounds
from benchmarks.peers.vllm_decoder import VllmProcess

PROMPT_TOKENS, NEW_TOKENS = (8, 32, 64, 128), (16, 32, 64, 96)
MAX_LEN = 256
NOTES = (
    "tokens/s: all new tokens, over the time from the first arrival to the last token.",
    "TTFT: from a request's arrival to its first token. gap: between a request's outputs, of one "
    "or more tokens. ms/token: of a request, after its first token.",
    "host gap: of the time in which mtpc had work, the part between its replays.",
    "over vLLM: tokens/s over those of vLLM with the same K, on the same requests in the same run.",
    SAMPLES_NOTE,
)


@dataclass(frozen=True)
class Load:
    """The arrivals of requests: `rate` per second, or all at once."""

    rate: float | None
    count: int

    def __str__(self) -> str:
        return f"burst of {self.count}" if self.rate is None else f"{self.rate:g} requests/s"


@dataclass(frozen=True)
class Sample:
    """One run of a load.

    Attributes:
        at_s: the arrivals.
        traces: see `arrivals.serve`.
        foreign_share: share of the CPU that other processes used.
        host_gap_share: share of the time with work that is between replays; None if unknown.
        work_s: seconds with work: replays and the gaps between them; None if unknown.
        tokens_by_k: tokens by the K of the step that emitted them, if counted.
        child_cpu_s: CPU seconds of the server's own other processes.
    """

    at_s: list[float]
    traces: list[Trace]
    foreign_share: float = 0.0
    host_gap_share: float | None = None
    work_s: float | None = None
    tokens_by_k: dict[int, int] | None = None
    child_cpu_s: float = 0.0

    def __str__(self) -> str:
        return f"{tokens_per_s(self):.1f} tokens/s"


class Serves(Protocol):
    """A server that can be measured.

    Attributes:
        engine: the engine's name.
        spec_tokens: K, or "auto".
    """

    engine: str
    spec_tokens: int | str

    def run(self, arrivals: Sequence[Arrival]) -> Sample:
        """Serve requests; `foreign_share` is not known yet."""
        ...


class MtpcServer:
    """mtpc's engine in this process; it counts tokens by the K of their step."""

    engine = "mtpc"

    def __init__(self, model: mtpc.SpecModel):
        self._engine = model.engine
        self.spec_tokens: int | str = model.options.spec_tokens
        self._names: dict[int, str] = {}
        self._tokens: Counter[int] = Counter()

    def add(self, name: str, arrival: Arrival) -> None:
        """Queue a request."""
        self._names[self._engine.add(arrival.prompt, arrival.new_tokens)] = name

    def step(self) -> Iterator[tuple[str, int]]:
        """One iteration."""
        before = self._engine.program.replays.copy()
        joined = self._engine.stats.joined.tokens
        outputs = self._engine.step()
        beside = self._engine.stats.joined.tokens - joined
        for key in self._engine.program.replays - before:
            tokens = sum(len(o.token_ids) for o in outputs) if key.phase == "decode" else beside
            self._tokens[key.spec_tokens] += tokens
        for output in outputs:
            yield self._names[output.request_id], len(output.token_ids)

    def run(self, arrivals: Sequence[Arrival]) -> Sample:
        """Serve them."""
        stats = self._engine.stats
        gap_s, replay_s = stats.host_gap_s, stats.replay_s
        self._tokens.clear()
        traces = serve(self, arrivals)
        gap_s, replay_s = stats.host_gap_s - gap_s, stats.replay_s - replay_s
        work_s = gap_s + replay_s
        tokens = dict(sorted(self._tokens.items()))
        return Sample(_times(arrivals), traces, 0.0, gap_s / work_s, work_s, tokens)


class VllmServer:
    """vLLM in another process, which waits between its samples."""

    engine = "vLLM"

    def __init__(self, process: VllmProcess):
        self._process = process
        self.spec_tokens: int | str = process.spec_tokens

    def run(self, arrivals: Sequence[Arrival]) -> Sample:
        """Let its process serve requests."""
        answer = self._process.ask({"arrivals": [asdict(arrival) for arrival in arrivals]})
        return Sample(_times(arrivals), answer["traces"], child_cpu_s=answer["cpu_s"])


def _times(arrivals: Sequence[Arrival]) -> list[float]:
    return [arrival.at_s for arrival in arrivals]


@dataclass
class Case(Sampled[Sample]):
    """A load on a server, and its samples so far."""

    load: Load
    server: Serves
    samples: list[Sample] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.load}, {self.server.engine} K={self.server.spec_tokens}"


@dataclass(frozen=True)
class Row(Counts):
    """The figures that callers see, each the median over samples."""

    load: str
    engine: str
    spec_tokens: int | str
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p50_ms: float
    gap_p99_ms: float
    ms_per_token_p50: float
    host_gap_share: float | None


def sample_in_turns(cases: Sequence[Case], args: argparse.Namespace, tell: Tell) -> None:
    """Sample the cases in rounds, until every case has enough samples."""
    vocab_size = SHAPES[args.shape].vocab_size

    def draw(load: Load, seed: int) -> list[Arrival]:
        lengths = (PROMPT_TOKENS, NEW_TOKENS)
        return draw_arrivals(load.count, load.rate, *lengths, vocab_size, seed)

    for server in {id(case.server): case.server for case in cases}.values():
        tell(f"warm up: {server.engine} K={server.spec_tokens}")
        server.run(draw(Load(None, 2), args.seed))

    def take(case: Case) -> Sample:
        # By what has been kept: a dropped sample's requests come again, as they did to others.
        kept = len(case.undisturbed(args.max_foreign))
        watch = CpuWatch()
        run = case.server.run(draw(case.load, args.seed + 1 + kept))
        return replace(run, foreign_share=watch.foreign_share(run.child_cpu_s))

    in_rounds(cases, args.repeats, args.max_foreign, take, tell)


def tokens_per_s(sample: Sample) -> float:
    """All tokens over the time from the first arrival to the last token."""
    ends = [at + trace[-1][0] for at, trace in zip(sample.at_s, sample.traces, strict=True)]
    return sum(count for trace in sample.traces for _, count in trace) / max(ends)


def percentile(values: Sequence[float], percent: int) -> float:
    """Interpolated between values, as by `statistics.quantiles`."""
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def gaps_ms(trace: Trace) -> list[float]:
    """Between outputs of one request."""
    return [1e3 * (after - before) for (before, _), (after, _) in pairwise(trace)]


def ms_per_token(trace: Trace) -> float | None:
    """Milliseconds per token of one request after its first output; None without further tokens."""
    (first, _), (last, _) = trace[0], trace[-1]
    tokens = sum(count for _, count in trace[1:])
    return 1e3 * (last - first) / tokens if tokens else None


def summarise(case: Case, max_foreign: float) -> Row:
    """The row of a sampled case."""
    kept = case.kept(max_foreign)
    first = [[trace[0][0] for trace in sample.traces] for sample in kept]
    gaps = [[gap for trace in sample.traces for gap in gaps_ms(trace)] for sample in kept]
    host = [s.host_gap_share for s in kept if s.host_gap_share is not None]
    pace = [[p for p in map(ms_per_token, sample.traces) if p is not None] for sample in kept]

    def over_samples(values: list[list[float]], percent: int) -> float:
        return median(percentile(of_sample, percent) for of_sample in values)

    return Row(
        load=str(case.load),
        engine=case.server.engine,
        spec_tokens=case.server.spec_tokens,
        tokens_per_s=median(tokens_per_s(sample) for sample in kept),
        ttft_p50_s=over_samples(first, 50),
        ttft_p99_s=over_samples(first, 99),
        gap_p50_ms=over_samples(gaps, 50),
        gap_p99_ms=over_samples(gaps, 99),
        ms_per_token_p50=over_samples(pace, 50),
        host_gap_share=median(host) if host else None,
        **case.counts(max_foreign),
    )


def table(record: Record) -> Table:
    """A record's table."""
    rows = [Row(**row) for row in record["rows"]]
    theirs = {(r.load, r.spec_tokens): r.tokens_per_s for r in rows if r.engine == "vLLM"}

    def over_vllm(row: Row) -> str:
        peer = theirs.get((row.load, row.spec_tokens))
        return f"{row.tokens_per_s / peer:.2f}x" if peer and row.engine == "mtpc" else "-"

    columns: Columns[Row] = {
        "load": lambda row: row.load,
        "engine": lambda row: row.engine,
        "K": lambda row: str(row.spec_tokens),
        "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
        "over vLLM": over_vllm,
        "TTFT p50 s": lambda row: f"{row.ttft_p50_s:.2f}",
        "TTFT p99 s": lambda row: f"{row.ttft_p99_s:.2f}",
        "gap p50 ms": lambda row: f"{row.gap_p50_ms:.1f}",
        "gap p99 ms": lambda row: f"{row.gap_p99_ms:.1f}",
        "ms/token p50": lambda row: f"{row.ms_per_token_p50:.1f}",
        "host gap": lambda r: "-" if r.host_gap_share is None else f"{r.host_gap_share:.2%}",
        "samples": sample_counts,
    }
    return Table.of("Serving", columns, rows, NOTES)


def servers(
    args: argparse.Namespace, workdir: Path, closing: ExitStack, tell: Tell
) -> Iterator[Serves]:
    """Start mtpc and vLLM, each with drafts and without, on one checkpoint."""
    directory = command.write_mimo(args, workdir, tell, args.weights == "accepting").directory
    for k in (0, args.spec_tokens):
        tell(f"compile mtpc K={k}")
        model = mtpc.compile(
            directory,
            spec_tokens=k,
            batch_buckets=args.batch_buckets,
            max_len=MAX_LEN,
            backend=args.backend,
        )
        yield MtpcServer(model)
        if args.vllm_python:
            tell(f"start vLLM K={k}")
            most = max(args.batch_buckets)
            process = VllmProcess.of(
                args.vllm_python, directory, k, MAX_LEN, most, workdir / "vllm"
            )
            closing.callback(process.close)
            yield VllmServer(process)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = _parse(argv)
    tell = command.begin(args)
    loads = [*(Load(rate, args.requests) for rate in args.rates), Load(None, args.requests)]
    with command.working_directory(args.workdir) as workdir, ExitStack() as closing:
        engines = list(servers(args, workdir, closing, tell))
        cases = [Case(load, server) for load in loads for server in engines]
        sample_in_turns(cases, args, tell)
    rows = [summarise(case, args.max_foreign) for case in cases]
    publish("serving", args, {"rows": [asdict(row) for row in rows]}, table)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser(
        "serving", __doc__, *command.FILES, "--shape", "--vllm-python", "--backend",
        *command.SAMPLING, weights="random", spec_tokens=3, batch_buckets=[1, 2, 4, 8], repeats=3,
    )  # fmt: skip
    add = parser.add_argument
    add("--rates", nargs="*", type=float, default=[1.0, 4.0], metavar="R", help="requests/s")
    add("--requests", type=command.positive, default=24, metavar="N", help="of each load")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

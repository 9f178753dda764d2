"""Serving under load: requests of mixed lengths, on mtpc and on vLLM's CPU build.

    python -m benchmarks.serving --vllm-python VENV/bin/python --out RESULTS.json

For each load (Poisson arrivals of a rate, or a burst) the same requests go to mtpc and to vLLM,
with drafts and without, in rounds. The figures are those that a caller sees: tokens per second,
time to the first token, and gaps between outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Protocol

import mtpc
from benchmarks.harness import command
from benchmarks.harness.arrivals import Arrival, Trace, draw_arrivals, serve
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.rounds import Case, medians
from benchmarks.harness.tables import SAMPLES, Column, Row, TableForm, fields, over
from benchmarks.peers.vllm_decoder import VLLM, VllmDecoder

PROMPT_TOKENS, NEW_TOKENS = (8, 32, 64, 128), (16, 32, 64, 96)
MAX_LEN = 256


@dataclass(frozen=True)
class Load:
    """The arrivals of requests: `rate` per second, or all at once."""

    rate: float | None
    count: int

    def __str__(self) -> str:
        return f"burst of {self.count}" if self.rate is None else f"{self.rate:g} requests/s"


class Server(Protocol):
    """A server that can be measured.

    Attributes:
        row: what identifies it in tables.
    """

    row: Row

    def run(self, arrivals: Sequence[Arrival]) -> Row:
        """Serve requests; returns their `traces`, and whatever else is known."""
        ...


class MtpcServer:
    """mtpc's engine in this process.

    Of a run it also knows the share of the time with work that is between replays, the seconds with
    work, and tokens by the K of the step that emitted them.
    """

    def __init__(self, model: mtpc.SpecModel, **row: object):
        self._engine = model.engine
        self.row: Row = {"engine": "mtpc", "spec_tokens": model.options.spec_tokens, **row}
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

    def run(self, arrivals: Sequence[Arrival]) -> Row:
        """Serve them."""
        stats = self._engine.stats
        gap_s, replay_s = stats.host_gap_s, stats.replay_s
        self._tokens.clear()
        traces = serve(self, arrivals)
        gap_s, replay_s = stats.host_gap_s - gap_s, stats.replay_s - replay_s
        work_s, tokens = gap_s + replay_s, dict(sorted(self._tokens.items()))
        return dict(traces=traces, host_gap_share=gap_s / work_s, work_s=work_s, tokens_by_k=tokens)


class VllmServer:
    """vLLM in another process, which waits between its samples."""

    def __init__(self, peer: VllmDecoder):
        self._peer = peer
        self.row: Row = {"engine": VLLM, "spec_tokens": peer.spec_tokens}

    def run(self, arrivals: Sequence[Arrival]) -> Row:
        """Let its process serve requests."""
        answer = self._peer.ask(arrivals=[asdict(arrival) for arrival in arrivals])
        return dict(traces=answer["traces"], child_cpu_s=answer["cpu_s"], host_gap_share=None)


def load_cases(
    loads: Sequence[Load],
    servers: Sequence[Server],
    run: Run,
    figures: Callable[[Sequence[float], Row], Row],
    summary: Callable[[Sequence[Row]], Row] = medians,
) -> list[Case]:
    """A case for each load on each server.

    Args:
        loads: what is served.
        servers: by which; each serves two requests to warm up.
        run: has the seed: all servers get the same requests.
        figures: of a sample, by the times of arrivals and by what a server knows of it.
        summary: see `Case`.
    """

    def draw(load: Load, seed: int) -> list[Arrival]:
        lengths = (PROMPT_TOKENS, NEW_TOKENS)
        return draw_arrivals(load.count, load.rate, *lengths, run.vocab_size, seed)

    def case_of(load: Load, server: Server) -> Case:
        def take() -> Row:
            # By what has been kept: a dropped sample's requests come again, as they did to others.
            kept = len(case.undisturbed(run.args.max_foreign))
            arrivals = draw(load, run.args.seed + 1 + kept)
            found = server.run(arrivals)
            return {**found, **figures([arrival.at_s for arrival in arrivals], found)}

        def warm() -> Row:
            return server.run(draw(Load(None, 2), run.args.seed))

        first = warm if load is loads[0] else None
        case = Case({"load": str(load), **server.row}, take, first, summary=summary)
        return case

    return [case_of(load, server) for load in loads for server in servers]


def tokens_per_s(at_s: Sequence[float], traces: Sequence[Trace]) -> float:
    """All tokens over the time from the first arrival to the last token."""
    ends = [at + trace[-1][0] for at, trace in zip(at_s, traces, strict=True)]
    return sum(count for trace in traces for _, count in trace) / max(ends)


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


def median_pace(traces: Sequence[Trace]) -> float:
    """The median of requests' milliseconds per token."""
    return median(pace for pace in map(ms_per_token, traces) if pace is not None)


def figures(at_s: Sequence[float], found: Row) -> Row:
    """What callers see of a sample."""
    traces = found["traces"]
    first = [trace[0][0] for trace in traces]
    gaps = [gap for trace in traces for gap in gaps_ms(trace)]
    return dict(
        tokens_per_s=tokens_per_s(at_s, traces),
        ttft_p50_s=percentile(first, 50),
        ttft_p99_s=percentile(first, 99),
        gap_p50_ms=percentile(gaps, 50),
        gap_p99_ms=percentile(gaps, 99),
        ms_per_token_p50=median_pace(traces),
    )


def measure(run: Run) -> Iterator[list[Row]]:
    """mtpc and vLLM, each with drafts and without, on one checkpoint."""
    args = run.args
    loads = [*(Load(rate, args.requests) for rate in args.rates), Load(None, args.requests)]
    directory = run.write_mimo(args.weights == "accepting").directory
    servers = list[Server]()
    with ExitStack() as closing:
        for k in (0, args.spec_tokens):
            run.tell(f"compile mtpc K={k}")
            sizes = dict(batch_buckets=args.batch_buckets, max_len=MAX_LEN)
            model = mtpc.compile(directory, spec_tokens=k, backend=args.backend, **sizes)
            servers.append(MtpcServer(model))
            if args.vllm_python:
                run.tell(f"start vLLM K={k}")
                place = (k, MAX_LEN, max(args.batch_buckets), run.workdir / "vllm")
                peer = VllmDecoder(args.vllm_python, directory, *place)
                closing.callback(peer.close)
                servers.append(VllmServer(peer))
        yield run.sample(load_cases(loads, servers, run, figures))


def _over_vllm(row: Row, rows: Sequence[Row]) -> float | None:
    ratio = over("tokens_per_s", ("load", "spec_tokens"), engine=VLLM)
    return ratio(row, rows) if row["engine"] == "mtpc" else None


FORM = TableForm(
    "Serving",
    (
        *fields("load, engine, K=spec_tokens"),
        Column(
            "tokens/s", "tokens_per_s", ".1f",
            "all new tokens, over the time from the first arrival to the last token.",
        ),
        Column(
            "over vLLM", _over_vllm, ".2fx",
            "tokens/s over those of vLLM with the same K, on the same requests in the same run.",
        ),
        Column("TTFT p50 s", "ttft_p50_s", ".2f"),
        Column("TTFT p99 s", "ttft_p99_s", ".2f", "from a request's arrival to its first token."),
        Column("gap p50 ms", "gap_p50_ms", ".1f"),
        Column(
            "gap p99 ms", "gap_p99_ms", ".1f",
            "between a request's outputs, of one or more tokens.",
        ),
        Column("ms/token p50", "ms_per_token_p50", ".1f", "of a request, after its first token."),
        Column(
            "host gap", "host_gap_share", ".2%",
            "of the time in which mtpc had work, the part between its replays.",
        ),
        SAMPLES,
    ),
)  # fmt: skip
BENCHMARK = Benchmark(
    "serving",
    __doc__,
    measure,
    FORM.of,
    (*command.FILES, "--shape", "--vllm-python", "--backend", *command.SAMPLING),
    dict(weights="random", spec_tokens=3, batch_buckets=[1, 2, 4, 8], repeats=3),
    {
        "--rates": dict(nargs="*", type=float, default=[1.0, 4.0], metavar="R", help="requests/s"),
        "--requests": command.NUMBER | dict(default=24, help="of each load"),
    },
)
main, table = BENCHMARK.commands(__name__)

"""A long run of random traffic on a small model, which checks that memory and objects do not grow.

    python -m benchmarks.soak --tokens 1000000 --out soak.json

Requests arrive at random: prompts with shared beginnings, greedy and sampled ones with all kinds of
parameters, callbacks, some of which raise, aborts at any moment, and a pool too small for all of
them, so that requests are preempted. At each interval the engine is emptied, and memory, objects,
pages and request slots are counted. Some requests are repeated, and must give the same text. The
exit code is 1 if memory or objects grew beyond the bounds after the warm-up, if a page or request
slot is not free, or if a text changed.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mtpc
from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.machine import field_bytes
from benchmarks.harness.rounds import Tell
from benchmarks.harness.tables import Column, Record, Row, TableForm, fields
from mtpc.cli.demo import demo_checkpoint
from mtpc.engine.request import Request, StepOutput

OPTIONS: dict[str, Any] = {"spec_tokens": 2, "batch_buckets": (8,), "max_len": 128, "page_size": 8,
           "prefill_chunk": 32, "num_pages": 65, "sampling": True, "dtype": "float64"}  # fmt: skip
"""64 pages of 8 tokens, into which eight requests of up to 128 tokens do not fit. float64, because
texts are compared, and sums of experts may round in another way in another batch."""
SENTINELS, BEGINNINGS, MAX_WAITING = 8, 6, 6
CHANCES = {"sentinel": 0.15, "abort": 0.2, "callback": 0.3, "broken callback": 0.02}


WARM_UP = 0.2
"""Share of the tokens that are the warm-up."""
MAX_GROWTH_MIB, MAX_OBJECTS = 16.0, 2000
"""The most growth after the warm-up, of resident memory and of the number of Python objects."""


def random_params(draw: random.Random, vocab_size: int) -> mtpc.SamplingParams:
    """Greedy decoding, or any mixture of sampling parameters."""
    if draw.random() < 0.3:
        return mtpc.SamplingParams()
    some = tuple(draw.randrange(vocab_size) for _ in range(4))
    return mtpc.SamplingParams(
        temperature=draw.choice((0.0, 0.5, 1.0, 1.5)),
        top_k=draw.choice((0, 0, 5, 40)),
        top_p=draw.choice((1.0, 1.0, 0.8)),
        min_p=draw.choice((0.0, 0.0, 0.05)),
        seed=draw.randrange(2**63),
        logprobs=draw.choice((None, None, 0, 3)),
        repetition_penalty=draw.choice((1.0, 1.0, 1.3)),
        frequency_penalty=draw.choice((0.0, 0.0, 0.5)),
        logit_bias=draw.choice(((), dict.fromkeys(some, 2.0))),
        banned_ids=draw.choice(((), some)),
    )


class Traffic:
    """Random requests on an engine, and what they returned.

    Args:
        model: a compiled model.
        seed: seed of all random choices.
    """

    def __init__(self, model: mtpc.SpecModel, seed: int = 0):
        self.engine, self._draw = model.engine, random.Random(seed)
        self._limit, self._vocab_size = model.engine.longest, model.served.vocab_size
        self._beginnings = [self._ids(self._limit // 3) for _ in range(BEGINNINGS)]
        self._sentinels = [self._request() for _ in range(SENTINELS)]
        self._texts: list[list[int] | None] = [None] * SENTINELS
        self._watched: list[tuple[int, Request]] = []
        self.compared = self.changed = 0

    def step(self) -> int:
        """Perhaps add requests or abort one, and run a step; returns the number of new tokens."""
        draw, engine = self._draw, self.engine
        while len(engine.waiting) < MAX_WAITING and draw.random() < 0.5:
            self._add()
        if draw.random() < CHANCES["abort"] / 8 and (engine.running or engine.waiting):
            engine.abort(draw.choice([*engine.running, *engine.waiting]).request_id)
        return sum(len(output.token_ids) for output in engine.step())

    def finish(self) -> int:
        """Run until the engine is empty; returns the number of new tokens."""
        tokens = 0
        while self.engine.has_work:
            tokens += sum(len(output.token_ids) for output in self.engine.step())
        for index, request in self._watched:
            self._compare(index, request)
        self._watched.clear()
        return tokens

    def _ids(self, count: int) -> list[int]:
        return [self._draw.randrange(self._vocab_size) for _ in range(count)]

    def _request(self) -> Request:
        draw = self._draw
        prompt = self._ids(draw.randint(1, self._limit // 4))
        if draw.random() < 0.6:
            prompt = draw.choice(self._beginnings) + prompt
        new = draw.randint(1, self._limit - len(prompt))
        stops = tuple(self._ids(draw.choice((0, 0, 2))))
        return Request(-1, prompt, new, stops, random_params(draw, self._vocab_size).settled())

    def _add(self) -> None:
        if self._draw.random() < CHANCES["sentinel"]:
            index = self._draw.randrange(SENTINELS)
            known = self._sentinels[index]
            request = Request(-1, known.prompt_ids, known.max_new_tokens, known.stop_ids,
                              known.sampling)  # fmt: skip
            self._watched.append((index, request))
        else:
            request = self._request()
            if self._draw.random() < CHANCES["callback"]:
                request.on_output = self._take
        self.engine.submit(request)

    def _take(self, output: StepOutput) -> None:
        if output.finish_reason is None and self._draw.random() < CHANCES["broken callback"]:
            raise ValueError("a consumer that is broken")

    def _compare(self, index: int, request: Request) -> None:
        """Compare a text with that of an equal earlier request, up to the shorter length."""
        found, known = request.output_ids, self._texts[index]
        if known is None or len(found) > len(known):
            self._texts[index] = list(found)
        if known is not None:
            self.compared += 1
            count = min(len(found), len(known))
            self.changed += found[:count] != known[:count]


def count(traffic: Traffic, tokens: int, seconds: float) -> Row:
    """Count everything now, with the engine empty; totals are since the start."""
    gc.collect()
    stats, engine = traffic.engine.stats, traffic.engine
    return dict(
        tokens=tokens,
        seconds=round(seconds, 2),
        rss_mib=round(resident_mib(), 2),
        objects=len(gc.get_objects()),
        pages_used=stats.pages_used,
        slots_used=engine.program.max_reqs - engine.slots.num_free,
        pages_idle=stats.pages_idle,
        finished=sum(n for reason, n in stats.finished.items() if reason != "aborted"),
        aborted=stats.finished["aborted"],
        preemptions=stats.preemptions,
        reused_tokens=stats.reused_tokens,
        callback_errors=stats.callback_errors,
        texts_compared=traffic.compared,
        texts_changed=traffic.changed,
    )


def resident_mib() -> float:
    """Resident memory of this process."""
    resident = field_bytes("/proc/self/status", "VmRSS")
    if resident is None:
        raise RuntimeError("/proc/self/status does not say what is resident; soak needs Linux")
    return resident / 2**20


def soak(traffic: Traffic, tokens: int, intervals: int, tell: Tell) -> list[Row]:
    """Serve at least `tokens` tokens; counts at the start and after each interval."""
    start, done = time.perf_counter(), 0
    rows = [count(traffic, 0, 0.0)]
    for interval in range(1, intervals + 1):
        while done < tokens * interval // intervals:
            done += traffic.step()
        done += traffic.finish()
        last = count(traffic, done, time.perf_counter() - start)
        rows.append(last)
        if interval % max(intervals // 20, 1) == 0:
            speed = last["tokens"] / last["seconds"]
            tell(f"{last['tokens']} tokens, {speed:.0f} tokens/s, {last['rss_mib']:.1f} MiB, "
                 f"{last['objects']} objects")  # fmt: skip
    return rows


def faults(rows: Sequence[Row]) -> list[str]:
    """The faults of a run; empty without faults."""
    found, last = [], rows[-1]
    for name, what in (("pages_used", "pages"), ("slots_used", "slots")):
        most = max(row[name] for row in rows)
        if most:
            found.append(f"{most} {what} were held by nobody at an interval's end")
    if last["texts_changed"]:
        texts = f"{last['texts_changed']} of {last['texts_compared']}"
        found.append(f"{texts} repeated texts changed")
    warm = [row for row in rows if row["tokens"] >= WARM_UP * last["tokens"]]
    growth = max(row["rss_mib"] for row in warm) - warm[0]["rss_mib"]
    if growth > MAX_GROWTH_MIB:
        found.append(f"resident memory grew by {growth:.1f} MiB after the warm-up; at most "
                     f"{MAX_GROWTH_MIB:g} may")  # fmt: skip
    objects = max(row["objects"] for row in warm) - warm[0]["objects"]
    if objects > MAX_OBJECTS:
        found.append(f"{objects} Python objects came to stay after the warm-up; at most "
                     f"{MAX_OBJECTS} may")  # fmt: skip
    return found


SHOWN = 10


def _rows(record: Record) -> list[Row]:
    rows: list[Row] = record["rows"]
    return rows[:: max(len(rows) // SHOWN, 1)]


FORM = TableForm(
    "Soak",
    (
        *fields("tokens, seconds:.0f"),
        Column("MiB", "rss_mib", ".1f", "resident memory."),
        Column("objects", "objects", "", "Python objects that the collector knows."),
        *fields(
            "pages=pages_used, slots=slots_used, finished, aborted, preemptions, "
            "texts compared=texts_compared"
        ),
        Column("texts changed", "texts_changed", "", "of requests that are repeated: a fault."),
    ),
    (
        "The engine is empty at each interval's end; counts are since the start. Each tenth of the "
        "intervals is shown.",
        "pages, slots: what is held without a request.",
    ),
    _rows,
)


def measure(run: Run) -> Iterator[list[Row]]:
    """An interval a row."""
    args = run.args
    checkpoint = args.checkpoint or demo_checkpoint()
    run.facts["model"] = checkpoint.absolute().name
    traffic = Traffic(mtpc.compile(checkpoint, backend=args.backend, **OPTIONS), args.seed)
    run.tell("compiled")
    rows = soak(traffic, args.tokens, args.intervals, run.tell)
    found = faults(rows)
    for fault in found:
        run.tell(f"fault: {fault}")
    run.failed = bool(found)
    yield rows


BENCHMARK = Benchmark(
    "soak",
    __doc__,
    measure,
    FORM.of,
    command.RESULTS,
    dict(backend="cpu", threads=1, seed=0),
    {
        "checkpoint": dict(nargs="?", type=Path, help="default: the demo model"),
        "--tokens": command.NUMBER | dict(default=1_000_000),
        "--intervals": command.NUMBER | dict(default=100),
    },
)
main, table = BENCHMARK.commands(__name__)

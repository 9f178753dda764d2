"""A long run of random traffic over a small model: memory, objects, pages and slots stay put.

    python -m benchmarks.soak --tokens 1000000 --csv soak.csv --png soak.png

Requests arrive at random: prompts with shared beginnings, greedy and sampled ones with all kinds of
parameters, callbacks, some of which raise, aborts at any moment, and a pool too small for all of
them, so that requests are preempted. At each interval the engine is emptied and everything is
counted. Some requests are the same ones again and again: their text must be what it was. The exit
code is 1 if memory or objects grew beyond the bounds after the warm-up, a page or a slot was left,
or a text changed.
"""

from __future__ import annotations

import argparse
import csv
import gc
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

import mtpc
from benchmarks.command import new_parser, positive, teller
from benchmarks.machine import describe_machine, describe_versions, field_bytes
from benchmarks.sampling import Tell
from mtpc.cli.demo import demo_checkpoint
from mtpc.engine.request import Request, StepOutput

MIB = 2**20
OPTIONS = {"spec_tokens": 2, "batch_buckets": (8,), "max_len": 128, "page_size": 8,
           "prefill_chunk": 32, "num_pages": 65, "sampling": True, "dtype": "float64"}  # fmt: skip
"""64 pages of 8 tokens: eight requests of up to 128 tokens do not fit. In float64, for texts are
compared: the demo model has experts, whose sums may round otherwise in another batch."""
SENTINELS, BEGINNINGS, MAX_WAITING = 8, 6, 6
CHANCES = {"sentinel": 0.15, "abort": 0.2, "callback": 0.3, "broken callback": 0.02}


@dataclass(frozen=True)
class Bounds:
    """What may change after the warm-up.

    Attributes:
        warm_up: share of the tokens after which things are to stay put.
        growth_mib: resident memory, the most at any later interval over that at the warm-up's end.
        objects: Python objects that the collector knows, likewise.
    """

    warm_up: float = 0.2
    growth_mib: float = 16.0
    objects: int = 2000


@dataclass(frozen=True)
class Record:
    """What was counted at an interval, with the engine emptied; counts are since the start."""

    tokens: int
    seconds: float
    rss_mib: float
    objects: int
    pages_used: int
    slots_used: int
    pages_idle: int
    finished: int
    aborted: int
    preemptions: int
    reused_tokens: int
    callback_errors: int
    texts_compared: int
    texts_changed: int


def random_params(draw: random.Random, vocab_size: int) -> mtpc.SamplingParams:
    """Greedy, or any mixture of what sampling offers."""
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
    """Random requests on an engine, and what is remembered of them.

    Args:
        model: compiled with `OPTIONS`, or others.
        seed: of everything drawn.
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
        """Perhaps new requests, perhaps an abort, one step; returns how many tokens it gave."""
        draw, engine = self._draw, self.engine
        while len(engine.waiting) < MAX_WAITING and draw.random() < 0.5:
            self._add()
        if draw.random() < CHANCES["abort"] / 8 and (engine.running or engine.waiting):
            engine.abort(draw.choice([*engine.running, *engine.waiting]).request_id)
        return sum(len(output.token_ids) for output in engine.step())

    def finish(self) -> int:
        """Serve what is there; returns how many tokens that gave."""
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
        """With what the same request said before, as far as both were let speak."""
        found, known = request.output_ids, self._texts[index]
        if known is None or len(found) > len(known):
            self._texts[index] = list(found)
        if known is not None:
            self.compared += 1
            count = min(len(found), len(known))
            self.changed += found[:count] != known[:count]


def count(traffic: Traffic, tokens: int, seconds: float) -> Record:
    """What there is now."""
    gc.collect()
    stats, engine = traffic.engine.stats, traffic.engine
    return Record(
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


def soak(
    traffic: Traffic, tokens: int, intervals: int, tell: Tell, seconds: float = float("inf")
) -> list[Record]:
    """Serve at least that many tokens; a record at the start and after each interval.

    After that many seconds it ends with the interval that runs.
    """
    start, done = time.perf_counter(), 0
    records = [count(traffic, 0, 0.0)]
    for interval in range(1, intervals + 1):
        while done < tokens * interval // intervals:
            done += traffic.step()
        done += traffic.finish()
        records.append(count(traffic, done, time.perf_counter() - start))
        last = records[-1]
        if interval % max(intervals // 20, 1) == 0:
            tell(f"{last.tokens} tokens, {last.tokens / last.seconds:.0f} tokens/s, "
                 f"{last.rss_mib:.1f} MiB, {last.objects} objects")  # fmt: skip
        if last.seconds > seconds:
            tell(f"stopped after {last.tokens} of {tokens} tokens: {seconds:g} s are over")
            break
    return records


def faults(records: Sequence[Record], bounds: Bounds) -> list[str]:
    """What is wrong with a run; nothing, if all is well."""
    found = []
    for name, what in (("pages_used", "pages"), ("slots_used", "slots")):
        most = max(getattr(record, name) for record in records)
        if most:
            found.append(f"{most} {what} were held by nobody at an interval's end")
    if records[-1].texts_changed:
        last = records[-1]
        found.append(f"{last.texts_changed} of {last.texts_compared} repeated texts changed")
    warm = [r for r in records if r.tokens >= bounds.warm_up * records[-1].tokens]
    growth = max(r.rss_mib for r in warm) - warm[0].rss_mib
    if growth > bounds.growth_mib:
        found.append(f"resident memory grew by {growth:.1f} MiB after the warm-up; at most "
                     f"{bounds.growth_mib:g} may")  # fmt: skip
    objects = max(r.objects for r in warm) - warm[0].objects
    if objects > bounds.objects:
        found.append(f"{objects} Python objects came to stay after the warm-up; at most "
                     f"{bounds.objects} may")  # fmt: skip
    return found


def write_csv(records: Sequence[Record], path: Path) -> None:
    """A line per interval."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Record)])
        writer.writeheader()
        writer.writerows(asdict(record) for record in records)


def draw_png(records: Sequence[Record], bounds: Bounds, path: Path) -> None:
    """Memory and objects over tokens, with the bounds; and what went on."""
    # Here: it takes longer to import than a short run.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    tokens = [record.tokens / 1e3 for record in records]
    warm = next(r for r in records if r.tokens >= bounds.warm_up * records[-1].tokens)
    panels = (
        ("resident MiB", [r.rss_mib for r in records], warm.rss_mib, bounds.growth_mib),
        ("Python objects", [r.objects for r in records], warm.objects, bounds.objects),
        ("pages, slots left", [r.pages_used + r.slots_used for r in records], None, 0),
        ("preemptions", [r.preemptions for r in records], None, 0),
    )
    for axes, (title, values, level, room) in zip(figure.subplots(4, sharex=True), panels,
                                                  strict=True):  # fmt: skip
        axes.plot(tokens, values, color="#1f6f8b", marker=".", markersize=3)
        axes.set_ylabel(title)
        if level is not None:
            axes.hlines(level + room, warm.tokens / 1e3, tokens[-1], color="#d98e32",
                        linestyle="--", label="bound after the warm-up")  # fmt: skip
            axes.legend(loc="lower left", frameon=False, bbox_to_anchor=(0.2, 0.55))
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("thousand tokens")
    last, machine, versions = records[-1], describe_machine(), describe_versions()
    figure.suptitle(
        f"{last.finished} requests finished, {last.aborted} aborted, {last.seconds:.0f} s\n"
        f"{machine['cpu']}, torch {versions['torch']}, commit {versions['commit']}"
    )
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code."""
    args = _parse(argv)
    torch.set_num_threads(args.threads)
    tell, bounds = teller(), Bounds(args.warm_up, args.max_growth_mib, args.max_objects)
    model = mtpc.compile(args.checkpoint or demo_checkpoint(), backend=args.backend, **OPTIONS)
    tell("compiled")
    traffic = Traffic(model, args.seed)
    records = soak(traffic, args.tokens, args.intervals, tell, args.seconds)
    if args.csv:
        write_csv(records, args.csv)
    if args.png:
        draw_png(records, bounds, args.png)
    last, found = records[-1], faults(records, bounds)
    print(f"{last.tokens} tokens, {last.finished} requests finished, {last.aborted} aborted, "
          f"{last.preemptions} preemptions, {last.reused_tokens} tokens reused, "
          f"{last.texts_compared} texts compared, {last.seconds:.0f} s")  # fmt: skip
    for fault in found:
        print(f"fault: {fault}")
    return 1 if found else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("soak", __doc__)
    add, bounds = parser.add_argument, Bounds()
    add("checkpoint", nargs="?", type=Path, help="default: the demo model")
    add("--tokens", type=positive, default=1_000_000, metavar="N")
    add("--seconds", type=float, default=float("inf"), metavar="S", help="stop after these")
    add("--intervals", type=positive, default=100, metavar="N")
    add("--backend", default="cpu", help="mtpc's backend")
    add("--threads", type=positive, default=1, metavar="N", help="torch's threads")
    add("--warm-up", type=float, default=bounds.warm_up, metavar="SHARE")
    add("--max-growth-mib", type=float, default=bounds.growth_mib, metavar="MIB")
    add("--max-objects", type=int, default=bounds.objects, metavar="N")
    add("--seed", type=int, default=0)
    add("--csv", type=Path, metavar="FILE", help="write a line per interval")
    add("--png", type=Path, metavar="FILE", help="draw them")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

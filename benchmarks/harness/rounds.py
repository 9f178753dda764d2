"""Takes samples in rounds, measures the bandwidth around each, and drops disturbed ones.

Machines drift: memory bandwidth changes by half within minutes, and other processes come and go.
So every case is sampled once before any is sampled again, and each sample is compared with the
bandwidth around it, not with a number from a data sheet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from benchmarks.harness.decoders import Decoded, Decoder, Prompts
from benchmarks.harness.machine import BandwidthProbe, CpuWatch, memory_shortage
from benchmarks.harness.tables import Row

Tell = Callable[[str], None]
"""Receives lines of progress."""
ATTEMPTS = 3
"""The most rounds, as a multiple of the requested ones, to repeat disturbed samples."""
_CPU = ("foreign_share", "child_cpu_s")
"""Figures of a sample that are none of its row."""


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> Prompts:
    """Random prompts, the same ones in every run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count, length), generator=generator).tolist()


def medians(samples: Sequence[Row]) -> Row:
    """The medians of samples' figures that are numbers; None where all are None."""
    found = Row()
    for name in samples[0]:
        values = [sample[name] for sample in samples if sample[name] is not None]
        if name not in _CPU and all(isinstance(value, (int, float)) for value in values):
            found[name] = median(values) if values else None
    return found


class SampleError(Exception):
    """A sample that came to nothing, after which none of its case is taken; says why."""


@dataclass
class Case:
    """What is sampled for one row.

    Attributes:
        row: what identifies the row.
        take: takes one sample: figures by name. `child_cpu_s` of a living child's CPU seconds is
            none of others' share.
        warm: is called before the first sample.
        engine: may want to start again before another round; then it is warmed up again.
        summary: the figures of the samples that count.
        samples: all that were taken, with the `foreign_share` of each.
        failure: why no more are taken.
    """

    row: Row
    take: Callable[[], Row]
    warm: Callable[[], object] | None = None
    engine: Decoder | None = None
    summary: Callable[[Sequence[Row]], Row] = medians
    samples: list[Row] = field(default_factory=list)
    failure: str | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.row.items())

    def undisturbed(self, max_foreign: float) -> list[Row]:
        """Samples during which other processes used at most `max_foreign` of the CPU time."""
        return [sample for sample in self.samples if sample["foreign_share"] <= max_foreign]

    def result(self, max_foreign: float) -> Row:
        """The row: of the undisturbed samples; of all of them, if none is undisturbed."""
        undisturbed = self.undisturbed(max_foreign)
        kept = undisturbed or self.samples
        counts = dict(
            samples=len(kept),
            discarded=len(self.samples) - len(kept),
            disturbed=bool(kept) and not undisturbed,
            taken=list(self.samples),
        )
        not_run = {"not_run": self.failure} if self.failure else {}
        return {**self.row, **self.summary(kept), **counts, **not_run}

    def attempt(self, tell: Tell) -> None:
        """Take one more sample, unless one has failed."""
        watch = CpuWatch()
        figures = self._try(self.take, tell)
        if figures is not None:
            share = watch.foreign_share(figures.get("child_cpu_s", 0.0))
            self.samples.append({**figures, "foreign_share": share})
            numbers = [f"{n} {v:.4g}" for n, v in figures.items() if isinstance(v, float)]
            tell(f"{self}: {', '.join(numbers[:3])}, others used {share:.0%} of the CPU")

    def warm_up(self, tell: Tell) -> None:
        """Call what warms up."""
        if self.warm:
            tell(f"warm up: {self}")
            self._try(self.warm, tell)

    def _try(self, call: Callable[[], Any], tell: Tell) -> Any:
        """The result of a call; None after a failure, which is one of the case."""
        if self.failure is not None:
            return None
        try:
            return call()
        except SampleError as error:
            self.failure = str(error)
            tell(f"{self}: {error}")
            return None


def sample(cases: Sequence[Case], repeats: int, max_foreign: float, tell: Tell) -> Iterator[int]:
    """Sample cases in rounds, until each has enough undisturbed samples, or `ATTEMPTS` are over.

    Args:
        cases: to be filled.
        repeats: undisturbed samples wanted of each.
        max_foreign: share of the CPU time that others may use in such a sample.
        tell: hears of each.

    Yields:
        The number of each round, when it is over.
    """
    for case in cases:
        case.warm_up(tell)
    if shortage := memory_shortage():
        tell(shortage)
    for turn in range(1, repeats * ATTEMPTS + 1):
        open_cases = [case for case in cases if case.failure is None]
        wanting = [c for c in open_cases if len(c.undisturbed(max_foreign)) < repeats]
        if not wanting:
            return
        if turn > 1:
            engines = dict.fromkeys(case.engine for case in wanting if case.engine)
            renewed = [engine for engine in engines if engine.renew()]
            for case in (case for case in wanting if case.engine in renewed):
                case.warm_up(tell)
        for case in wanting:
            case.attempt(tell)
        yield turn


def decode_case(
    row: Row,
    decoder: Decoder,
    run: Callable[[Prompts], Decoded],
    prompts: Prompts,
    step_bytes: int,
    probe: BandwidthProbe,
    warm_up_tokens: int | None = None,
) -> Case:
    """A case of decode steps, or of prefill, and the limit that memory sets to them.

    A figure `roofline_ms` is the time that reading the step's bytes takes at the bandwidth around
    the sample; `efficiency` is that over the measured time. Of a decoder that started anew for each
    round the sample alone counts that was fastest for its bandwidth: launches differ, and a peer is
    to be measured at its best.

    Args:
        row: identifies it, beside engine, K and batch.
        decoder: the engine.
        run: its method that is measured.
        prompts: of all requests.
        step_bytes: what a step has to read.
        probe: reads the bandwidth.
        warm_up_tokens: of each prompt, in the warm-up; None: all.
    """

    def take() -> Row:
        before = probe.read()
        decoded = run(prompts)
        bandwidth = (before + probe.read()) / 2
        roofline = 1e3 * step_bytes / bandwidth
        return dict(
            ms_per_step=decoded.ms_per_step,
            tokens_per_s=decoded.tokens_per_s,
            acceptance_rate=decoded.acceptance_rate,
            bandwidth_gb_s=bandwidth / 1e9,
            step_bytes=step_bytes,
            roofline_ms=roofline,
            efficiency=roofline / decoded.ms_per_step,
            build_s=decoder.build_s,
            steps=decoded.steps,
            tokens=decoded.tokens,
            child_cpu_s=decoded.child_cpu_s,
        )

    def summary(samples: Sequence[Row]) -> Row:
        if decoder.launches > 1:
            samples = [max(samples, key=lambda one: one["tokens_per_s"] / one["bandwidth_gb_s"])]
        return medians(samples)

    # As many new tokens as a sample has: with few, the first request would be done before the
    # last began.
    first = [prompt[:warm_up_tokens] for prompt in prompts]
    warm: Callable[[], Any] | None = (lambda: run(first)) if decoder.stays_warm else None
    named = dict(engine=decoder.engine, spec_tokens=decoder.spec_tokens, batch=len(prompts))
    return Case({**row, **named}, take, warm, decoder, summary)

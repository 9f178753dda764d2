"""Takes samples in rounds, measures the bandwidth around each, and drops disturbed ones.

Machines drift: memory bandwidth changes by half within minutes, and other processes come and go.
So every case is sampled once before any is sampled again, and each sample is compared with the
bandwidth around it, not with a number from a data sheet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

import torch

from benchmarks.harness.decoders import Decoded, Decoder, Prompts
from benchmarks.harness.machine import BandwidthProbe, CpuWatch, memory_shortage
from benchmarks.harness.results import Counts, Record

Tell = Callable[[str], None]
"""Receives lines of progress."""

ATTEMPTS = 3
"""The most rounds, as a multiple of the requested ones, to repeat disturbed samples."""


@dataclass(frozen=True)
class Plan:
    """How to sample.

    Attributes:
        prompt_tokens: length of each prompt.
        new_tokens: decoded per request and sample.
        repeats: undisturbed samples wanted per case.
        max_foreign: share of the CPU time that others may use before a sample is dropped.
        seed: of the prompts.
        warm_up_tokens: of each prompt, in the warm-up; None: all.
    """

    prompt_tokens: int
    new_tokens: int
    repeats: int
    max_foreign: float
    seed: int
    warm_up_tokens: int | None = None

    def prompts(self, count: int, vocab_size: int) -> Prompts:
        """Random prompts, the same ones in every run."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (count, self.prompt_tokens)
        return torch.randint(0, vocab_size, shape, generator=generator).tolist()


@dataclass(frozen=True)
class Sample:
    """One decoded batch, its bandwidth (bytes per second), and the CPU share of others."""

    decoded: Decoded
    bandwidth: float
    foreign_share: float

    def __str__(self) -> str:
        return f"{self.decoded.ms_per_step:.2f} ms a step at {self.bandwidth / 1e9:.1f} GB/s"


class Shared(Protocol):
    """A sample that knows which share of the CPU time other processes used."""

    @property
    def foreign_share(self) -> float: ...


S = TypeVar("S", bound=Shared)


class Sampled(Generic[S]):
    """The samples of a row, and which of them count.

    Attributes:
        samples: all that were taken.
    """

    samples: list[S]

    def undisturbed(self, max_foreign: float) -> list[S]:
        """Samples during which other processes used at most `max_foreign` of the CPU time."""
        return [sample for sample in self.samples if sample.foreign_share <= max_foreign]

    def kept(self, max_foreign: float) -> list[S]:
        """The undisturbed samples; all of them, if none is undisturbed."""
        return self.undisturbed(max_foreign) or self.samples

    def counts(self, max_foreign: float) -> dict[str, Any]:
        """The fields of `Counts`."""
        kept = self.kept(max_foreign)
        return dict(
            samples=len(kept),
            discarded=len(self.samples) - len(kept),
            disturbed=bool(kept) and not self.undisturbed(max_foreign),
            taken=tuple(self.samples),
        )


C = TypeVar("C", bound=Sampled[Any])


def in_rounds(
    cases: Sequence[C],
    repeats: int,
    max_foreign: float,
    take: Callable[[C], Shared],
    tell: Tell,
    renew: Callable[[Sequence[C]], None] = lambda cases: None,
) -> None:
    """Sample cases in rounds, until each has enough undisturbed samples, or `ATTEMPTS` are over.

    Args:
        cases: to be filled.
        repeats: undisturbed samples wanted of each.
        max_foreign: share of the CPU time that others may use in such a sample.
        take: takes one more sample of a case.
        tell: hears of each.
        renew: is called before each round but the first, with the cases that want samples.
    """
    for turn in range(1, repeats * ATTEMPTS + 1):
        wanting = [case for case in cases if len(case.undisturbed(max_foreign)) < repeats]
        if turn > 1:
            renew(wanting)
        for case in wanting:
            sample = take(case)
            case.samples.append(sample)
            others = f" (dropped: others used {sample.foreign_share:.0%} of the CPU)"
            disturbed = sample.foreign_share > max_foreign
            tell(f"round {turn}: {case}: {sample}{others * disturbed}")


@dataclass
class Case(Sampled[Sample]):
    """A case: a model and its weights, a decoder, a batch size.

    Attributes:
        model: family name.
        weights: "random" or "accepting".
        decoder: what decodes.
        batch: requests at a time.
        step_bytes: weights that a step has to read.
        samples: all that were taken.
    """

    model: str
    weights: str
    decoder: Decoder
    batch: int
    step_bytes: int
    samples: list[Sample] = field(default_factory=list)

    def __str__(self) -> str:
        engine, spec_tokens = self.decoder.engine, self.decoder.spec_tokens
        return f"{self.model} {self.weights}, {engine} K={spec_tokens} batch {self.batch}"


def sample_in_turns(
    cases: Sequence[Case], plan: Plan, prompts: Prompts, probe: BandwidthProbe, tell: Tell
) -> None:
    """Sample the cases in rounds, until every case has enough samples.

    Args:
        cases: to be filled.
        plan: how many samples, and of how many tokens.
        prompts: as many as the largest batch has.
        probe: reads the bandwidth around each sample.
        tell: hears what is being done.
    """
    _warm_up(cases, plan, prompts, tell)
    shortage = memory_shortage()
    if shortage is not None:
        tell(shortage)

    def renew(wanting: Sequence[Case]) -> None:
        decoders = list(dict.fromkeys(case.decoder for case in wanting))
        renewed = [decoder for decoder in decoders if decoder.renew()]
        _warm_up([case for case in wanting if case.decoder in renewed], plan, prompts, tell)

    def take(case: Case) -> Sample:
        return _take(case, prompts[: case.batch], plan.new_tokens, probe)

    in_rounds(cases, plan.repeats, plan.max_foreign, take, tell, renew)


def _warm_up(cases: Sequence[Case], plan: Plan, prompts: Prompts, tell: Tell) -> None:
    for case in cases:
        if not case.decoder.stays_warm:
            continue
        tell(f"warm up: {case}")
        # As many new tokens as a sample has: with few, the first request would be done before the
        # last began.
        first = [prompt[: plan.warm_up_tokens] for prompt in prompts[: case.batch]]
        case.decoder.decode(first, plan.new_tokens)


def _take(case: Case, prompts: Prompts, new_tokens: int, probe: BandwidthProbe) -> Sample:
    watch = CpuWatch()
    before = probe.read()
    decoded = case.decoder.decode(prompts, new_tokens)
    bandwidth = (before + probe.read()) / 2
    return Sample(decoded, bandwidth, watch.foreign_share(decoded.child_cpu_s))


@dataclass(frozen=True)
class Row(Counts):
    """What the samples of a case say: medians, over undisturbed samples where there is one.

    Of a decoder that started anew for each, the sample alone that was fastest for the bandwidth
    around it: launches differ, and a peer is to be measured at its best.

    Attributes:
        roofline_ms: the time that reading the step's weights takes at the adjacent bandwidth.
        efficiency: roofline over measured time, sample by sample.
    """

    model: str
    weights: str
    engine: str
    spec_tokens: int
    batch: int
    ms_per_step: float
    tokens_per_s: float
    acceptance_rate: float | None
    bandwidth_gb_s: float
    step_bytes: int
    roofline_ms: float
    efficiency: float
    build_s: float


def summarise(case: Case, max_foreign: float) -> Row:
    """The row of a case that has been sampled."""
    all_kept = case.kept(max_foreign)
    best = max(all_kept, key=lambda sample: sample.decoded.tokens_per_s / sample.bandwidth)
    kept = [best] if case.decoder.launches > 1 else all_kept
    roofline = [1e3 * case.step_bytes / sample.bandwidth for sample in kept]
    measured = [sample.decoded.ms_per_step for sample in kept]
    rates = [s.decoded.acceptance_rate for s in kept if s.decoded.acceptance_rate is not None]
    return Row(
        model=case.model,
        weights=case.weights,
        engine=case.decoder.engine,
        spec_tokens=case.decoder.spec_tokens,
        batch=case.batch,
        ms_per_step=median(measured),
        tokens_per_s=median(sample.decoded.tokens_per_s for sample in kept),
        acceptance_rate=median(rates) if rates else None,
        bandwidth_gb_s=median(sample.bandwidth for sample in kept) / 1e9,
        step_bytes=case.step_bytes,
        roofline_ms=median(roofline),
        efficiency=median(r / m for r, m in zip(roofline, measured, strict=True)),
        build_s=case.decoder.build_s,
        **case.counts(max_foreign),
    )


def measure(
    cases: Sequence[Case], plan: Plan, prompts: Prompts, probe: BandwidthProbe, tell: Tell
) -> list[Row]:
    """The rows of cases, which `sample_in_turns` samples."""
    sample_in_turns(cases, plan, prompts, probe, tell)
    return [summarise(case, plan.max_foreign) for case in cases]


def rows_of(record: Record, name: str) -> list[tuple[int, Row]]:
    """Pairs of a length and a row, of a record whose rows also have a length of this name."""
    rows = [dict(row) for row in record["rows"]]
    return [(row.pop(name), Row(**row)) for row in rows]

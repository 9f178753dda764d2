"""What the engine did, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mtpc.layout import StepKey


@dataclass(frozen=True)
class DecodeCounts:
    """Decode steps up to a moment, prefill left out; the difference of two is a measurement.

    Attributes:
        steps: decode steps.
        seconds: in them.
        request_steps: decode steps, counted once per live request in them.
        tokens: emitted by them.
        accepted: drafts accepted.
        drafted: drafts verified.
    """

    steps: int
    seconds: float
    request_steps: int
    tokens: int
    accepted: int
    drafted: int

    def __sub__(self, earlier: DecodeCounts) -> DecodeCounts:
        return DecodeCounts(
            self.steps - earlier.steps,
            self.seconds - earlier.seconds,
            self.request_steps - earlier.request_steps,
            self.tokens - earlier.tokens,
            self.accepted - earlier.accepted,
            self.drafted - earlier.drafted,
        )

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts over verified drafts; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass
class Stats:
    """Counts since the engine was made.

    Attributes:
        spec_tokens: K.
        drafted: draft tokens verified, per draft position; those behind a stop do not count.
        accepted: of those, accepted.
        decoded_tokens: tokens emitted by decode steps.
        request_steps: decode steps, counted once per live request in them.
        decode_steps: decode steps.
        prefill_steps: prefill chunks.
        emitted_tokens: new tokens handed out, the first one of each request included.
        prompt_tokens: prompt tokens processed.
        decode_s: seconds in decode steps, reading results included.
        prefill_s: seconds in prefill steps.
        replays: replays per captured step.
        host_writes: buffer writes by the host.
        fallbacks: how often something slower or other than asked for was used, by reason.
    """

    spec_tokens: int
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    decoded_tokens: int = 0
    request_steps: int = 0
    decode_steps: int = 0
    prefill_steps: int = 0
    emitted_tokens: int = 0
    prompt_tokens: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    replays: Counter[StepKey] = field(default_factory=Counter)
    host_writes: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.drafted = self.drafted or [0] * self.spec_tokens
        self.accepted = self.accepted or [0] * self.spec_tokens

    def count_acceptance(self, num_accepted: int, num_emitted: int) -> None:
        """Record one request's decode step.

        Where a stop cut the output short, only the drafts that were handed out count.
        """
        self.request_steps += 1
        self.decoded_tokens += num_emitted
        was_cut = num_emitted <= num_accepted
        for position in range(num_emitted if was_cut else self.spec_tokens):
            self.drafted[position] += 1
            self.accepted[position] += position < num_accepted

    def decode_counts(self) -> DecodeCounts:
        """What decode steps did so far."""
        return DecodeCounts(
            self.decode_steps,
            self.decode_s,
            self.request_steps,
            self.decoded_tokens,
            sum(self.accepted),
            sum(self.drafted),
        )

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per request and decode step, the bonus token included."""
        return self.decoded_tokens / self.request_steps if self.request_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts over verified drafts."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of steps in which the draft at each position was accepted."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    def __str__(self) -> str:
        by_position = " ".join(f"{rate:.0%}" for rate in self.acceptance_by_position) or "-"
        lines = [
            f"spec_tokens {self.spec_tokens}, acceptance length {self.acceptance_length:.2f} "
            f"(bonus token included), rate {self.acceptance_rate:.1%}, by position {by_position}",
            f"{self.emitted_tokens} tokens in {self.decode_steps} decode and "
            f"{self.prefill_steps} prefill steps; {self.host_writes} host writes",
            "replays: "
            + ", ".join(f"{key} {count}" for key, count in sorted(self.replays.items())),
        ]
        if self.fallbacks:
            reasons = ", ".join(f"{why} ({count})" for why, count in self.fallbacks.items())
            lines.append(f"fallbacks: {reasons}")
        return "\n".join(lines)

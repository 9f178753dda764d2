"""What the engine did, counted."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING

from mtpc.engine.metrics import prometheus_text, stats_rows
from mtpc.layout import StepKey

if TYPE_CHECKING:
    from rich.table import Table


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

    steps: int = 0
    seconds: float = 0.0
    request_steps: int = 0
    tokens: int = 0
    accepted: int = 0
    drafted: int = 0

    def __add__(self, other: DecodeCounts) -> DecodeCounts:
        return DecodeCounts(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, earlier: DecodeCounts) -> DecodeCounts:
        return DecodeCounts(*map(operator.sub, astuple(self), astuple(earlier)))

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts over verified drafts; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass
class Stats:
    """Counts since the engine was made; queue and pool as they were when the stats were read.

    Attributes:
        spec_tokens: K, the largest one where it changes.
        drafted: draft tokens verified, per draft position; those behind a stop do not count.
        accepted: of those, accepted.
        decoded_tokens: tokens emitted by decode steps, and of who joined prefill steps.
        request_steps: both kinds of steps, counted once per request that decodes in them.
        decode_steps: decode steps.
        prefill_steps: prefill chunks.
        joined: of these, those that requests joined which decode, and what these got of them; their
            time is prefill's.
        prefill_prompts: prompts that had a part in them, counted once a step.
        emitted_tokens: new tokens handed out, the first one of each request included.
        prompt_tokens: tokens prefilled, again after a preemption; those reused do not count.
        reused_tokens: tokens not prefilled because a page with them was known.
        decode_s: seconds in decode steps, host work included.
        prefill_s: seconds in prefill steps, host work included.
        replay_s: seconds in replays.
        host_gap_s: seconds between the end of a replay and the start of the next, while there was
            work: the engine's host work, and its caller's.
        host_gaps: how many of these gaps.
        forced_drafts: drafts replaced by the only token that a request's grammar allowed.
        preemptions: how often a request was sent back to the queue.
        callback_errors: how often a request's callback raised.
        finished: requests that ended, by reason.
        num_waiting: requests in the queue.
        num_running: requests with a slot.
        num_pages: pages of the pool.
        pages_used: of these, held by requests.
        pages_idle: of those that are free, kept for reuse.
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
    joined: DecodeCounts = field(default_factory=DecodeCounts)
    prefill_prompts: int = 0
    emitted_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    replay_s: float = 0.0
    host_gap_s: float = 0.0
    host_gaps: int = 0
    forced_drafts: int = 0
    preemptions: int = 0
    callback_errors: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    num_waiting: int = 0
    num_running: int = 0
    num_pages: int = 0
    pages_used: int = 0
    pages_idle: int = 0
    replays: Counter[StepKey] = field(default_factory=Counter)
    host_writes: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.drafted = self.drafted or [0] * self.spec_tokens
        self.accepted = self.accepted or [0] * self.spec_tokens

    def count_acceptance(
        self, num_drafted: int, num_accepted: int, num_emitted: int, joined: bool = False
    ) -> None:
        """Record one request's step in which it decoded.

        Where a stop cut the output short, only the drafts that were handed out count.

        Args:
            num_drafted: drafts verified.
            num_accepted: of these, accepted.
            num_emitted: tokens handed out.
            joined: whether the step was a prefill step.
        """
        self.request_steps += 1
        self.decoded_tokens += num_emitted
        was_cut = num_emitted <= num_accepted
        drafted = num_emitted if was_cut else num_drafted
        for position in range(drafted):
            self.drafted[position] += 1
            self.accepted[position] += position < num_accepted
        if joined:
            accepted = min(num_accepted, drafted)
            self.joined += DecodeCounts(0, 0.0, 1, num_emitted, accepted, drafted)

    def count_host_gap(self, seconds: float) -> None:
        """Record a time in which there was work and no replay ran."""
        self.host_gap_s += seconds
        self.host_gaps += 1

    def decode_counts(self) -> DecodeCounts:
        """What decode steps did so far."""
        beside = replace(self.joined, steps=0)
        counts = (self.request_steps, self.decoded_tokens, sum(self.accepted), sum(self.drafted))
        return DecodeCounts(self.decode_steps, self.decode_s, *counts) - beside

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

    @property
    def prompts_per_prefill(self) -> float:
        """Mean prompts that shared a prefill step."""
        return self.prefill_prompts / self.prefill_steps if self.prefill_steps else 0.0

    @property
    def host_gap_share(self) -> float:
        """Host gaps over replays and gaps together."""
        total = self.replay_s + self.host_gap_s
        return self.host_gap_s / total if total else 0.0

    def prometheus(self) -> str:
        """All of it in Prometheus' text format; see `metrics`."""
        return prometheus_text(self)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in stats_rows(self))

    def __rich__(self) -> Table:
        """The same as a table, for rich's `print`."""
        from rich.table import Table

        table = Table(box=None, show_header=False)
        for name, value in stats_rows(self):
            table.add_row(name, value)
        return table

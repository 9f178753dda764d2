"""Counts of what the engine has done."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING

from mtpc.layout import StepKey

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class DecodeCounts:
    """Counts of the steps in which requests decoded, up to a moment.

    The difference of two such counts measures the steps between them.

    Attributes:
        steps: number of steps.
        seconds: seconds in the steps.
        request_steps: number of steps, counted once for each request that decoded in the step.
        tokens: tokens emitted by requests that decoded.
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
        """Accepted drafts divided by verified drafts; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True)
class DraftCounts:
    """Counts of accepted and verified drafts by position, up to a moment or between two."""

    accepted: list[int]
    drafted: list[int]

    def __sub__(self, earlier: DraftCounts) -> DraftCounts:
        pairs = ((self.accepted, earlier.accepted), (self.drafted, earlier.drafted))
        return DraftCounts(*(list(map(operator.sub, *pair)) for pair in pairs))

    @property
    def by_position(self) -> list[float]:
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def per_step(self) -> float:
        """Accepted drafts a decode step and request."""
        return sum(self.by_position)


@dataclass
class Stats:
    """Counts since the engine was made, and the state of its queue and page pool.

    `Engine.stats` updates the state (`num_waiting` to `offload_evictions`) each time it is read.

    Attributes:
        spec_tokens: K, or the largest K if the engine chooses among several.
        synthetic_acceptance_rates: the rates of `CompileOptions`. If there are any, drafts were
            accepted whatever they are, and the text is not the model's.
        drafted: draft tokens verified, per draft position. Drafts after a stop do not count.
        accepted: draft tokens accepted, per draft position.
        decoded_tokens: tokens of decoding requests, in decode steps and in shared prefill steps.
        request_steps: steps of both kinds, counted once for each request that decoded in the step.
        decode_steps: decode steps.
        prefill_steps: prefill steps.
        joined: prefill steps that decoding requests shared, with the counts of these requests. Its
            `seconds` stay 0, because the time counts as prefill.
        prefill_prompts: prompts in prefill steps; a prompt counts once for each step.
        emitted_tokens: new tokens emitted, including each request's first one.
        prompt_tokens: tokens prefilled, including those prefilled again after a preemption. Reused
            tokens do not count.
        reused_tokens: tokens that were not prefilled because a known page held their KV.
        decode_s: seconds in decode steps, including host work.
        prefill_s: seconds in prefill steps, including host work.
        replay_s: seconds in replays.
        host_gap_s: seconds between the end of a replay and the start of the next one, while there
            was work. The gaps contain the host work of the engine and of its caller.
        host_gaps: number of these gaps.
        forced_drafts: drafts replaced by the only token that a request's grammar allowed.
        preemptions: number of times that a request was sent back to the queue.
        callback_errors: number of times that a request's callback raised.
        finished: requests that ended, by finish reason.
        num_waiting: requests in the queue.
        num_running: requests with a slot.
        num_pages: pages of the pool.
        pages_used: pages that requests hold.
        pages_idle: free pages that keep their content for reuse.
        num_snapshots: the most snapshots of state outside of pages; 0 if the model has none.
        snapshots_used: snapshots that are kept.
        snapshot_bytes: bytes of these snapshots.
        snapshot_evictions: snapshots that were evicted because new ones needed their memory.
        offload_saved: files of pages and snapshots that were written to `kv_offload_dir`.
        offload_loaded: files of pages and snapshots that requests read from there.
        offload_bytes: bytes of all files there when the engine last wrote one.
        offload_evictions: files that the engine removed because new ones needed their bytes.
        images_embedded: images that the vision tower embedded.
        images_reused: images whose embeddings were kept from an earlier prompt.
        image_bytes: bytes of the embeddings that are kept.
        tiers: the K that the engine chooses from at its next decode step.
        building: the state of a build in another process; "" if there is none.
        replays: replays per captured step.
        host_writes: buffer writes by the host.
        fallbacks: number of times that something other than requested was used, by reason.
    """

    spec_tokens: int
    synthetic_acceptance_rates: tuple[float, ...] = ()
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
    num_snapshots: int = 0
    snapshots_used: int = 0
    snapshot_bytes: int = 0
    snapshot_evictions: int = 0
    offload_saved: int = 0
    offload_loaded: int = 0
    offload_bytes: int = 0
    offload_evictions: int = 0
    images_embedded: int = 0
    images_reused: int = 0
    image_bytes: int = 0
    tiers: tuple[int, ...] = ()
    building: str = ""
    replays: Counter[StepKey] = field(default_factory=Counter)
    host_writes: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.drafted = self.drafted or [0] * self.spec_tokens
        self.accepted = self.accepted or [0] * self.spec_tokens

    def count_prefill(self, num_decoding: int, chunks: Sequence[int]) -> None:
        """Record a prefill step of prompts' chunks, and of requests that decoded in it."""
        self.prefill_steps += 1
        self.joined += DecodeCounts(steps=int(bool(num_decoding)))
        self.prefill_prompts += len(chunks)
        self.prompt_tokens += sum(chunks)

    def count_acceptance(
        self, num_drafted: int, num_accepted: int, num_emitted: int, joined: bool
    ) -> None:
        """Record that one request decoded in a step, a prefill step if `joined`: the drafts
        verified and accepted, and the tokens emitted. If a stop cut the output short, only the
        emitted drafts count."""
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

    def decode_counts(self) -> DecodeCounts:
        """The counts of decode steps so far. Shared prefill steps do not count."""
        beside = replace(self.joined, steps=0)
        counts = (self.request_steps, self.decoded_tokens, sum(self.accepted), sum(self.drafted))
        return DecodeCounts(self.decode_steps, self.decode_s, *counts) - beside

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per request and step in which it decoded, including the bonus token."""
        return self.decoded_tokens / self.request_steps if self.request_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts divided by verified drafts."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else 0.0

    @property
    def drafts(self) -> DraftCounts:
        """The counts of drafts so far."""
        return DraftCounts(list(self.accepted), list(self.drafted))

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each draft position, accepted drafts divided by verified drafts."""
        return self.drafts.by_position

    @property
    def prompts_per_prefill(self) -> float:
        """Mean number of prompts per prefill step."""
        return self.prefill_prompts / self.prefill_steps if self.prefill_steps else 0.0

    @property
    def host_gap_share(self) -> float:
        """The time in host gaps, as a share of the time in replays and gaps."""
        total = self.replay_s + self.host_gap_s
        return self.host_gap_s / total if total else 0.0

    def prometheus(self) -> str:
        """The statistics in Prometheus' text format; see `metrics`."""
        from mtpc.engine.metrics import prometheus_text  # Not above: few starts show any.

        return prometheus_text(self)

    def __str__(self) -> str:
        from mtpc.engine.metrics import stats_rows

        return "\n".join(f"{name}: {value}" for name, value in stats_rows(self))

    def __rich__(self) -> Table:
        """The statistics as a table, for rich's `print`."""
        from rich.table import Table

        from mtpc.engine.metrics import stats_rows

        table = Table(box=None, show_header=False)
        for name, value in stats_rows(self):
            table.add_row(name, value)
        return table

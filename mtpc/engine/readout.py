"""Reads a replay's results. The host can launch the next replay before it waits for them.

On a device with streams, a launch returns before the work is done. One copy of all results follows
the replay on its stream, and events record when the replay began and ended. The host waits only for
the copy, while later launches run. On a CPU the launch does the work, so nothing is pending.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtpc.engine.request import Request
from mtpc.engine.scheduler import Turn
from mtpc.engine.stats import Stats
from mtpc.engine.tiers import TierPolicy
from mtpc.layout import DRAFT_CHANCES, NUM_DRAFTS, NUM_VERIFIED, StepKey
from mtpc.program.program import Program

if TYPE_CHECKING:
    from mtpc.engine.budgets import BudgetPolicy


class Moment:
    """The current moment on the host, where a call returns when its work is done."""

    def __init__(self) -> None:
        self.time_s = time.perf_counter()

    def wait(self) -> None:
        """Return when the work before this moment is done: on the host, at once."""

    def seconds_until(self, later: Moment) -> float:
        """Seconds from here to a later moment of the same kind. Both moments must be past."""
        return later.time_s - self.time_s


class DeviceMoment(Moment):
    """An event on a GPU's current stream, which may differ from the thread's current device. Where
    it `sleeps`, a wait gives the processor away, and wakes up some 50 us late."""

    def __init__(self, device: torch.device, sleeps: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=sleeps)
        self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Return when the stream reaches the event."""
        self.event.synchronize()

    def seconds_until(self, later: Moment) -> float:
        """Seconds by the device's clock."""
        assert isinstance(later, DeviceMoment)
        return float(self.event.elapsed_time(later.event)) / 1e3


class Readout:
    """Launches a step, and holds its results until `read` is called. `begin` and `end` are the
    moments before and after the replay."""

    def __init__(self, program: Program, key: StepKey):
        step = program.steps[key]
        device = step.buffers[step.layout.results[0]].device
        # A decode step is over in a moment, so the host stays awake for it.
        on_device = partial(DeviceMoment, device, key.phase == "prefill")
        moment = on_device if device.type == "cuda" else Moment
        self.begin: Moment = moment()
        program.run(key)
        self.end: Moment = moment()
        self._wait = program.wait
        self._results = step.results.take()
        self._copied: Moment = moment()

    def read(self) -> Mapping[str, Tensor]:
        """Wait for the results, and return them on the CPU by buffer name. The second readout of
        the same step after this one overwrites them."""
        self._wait(self._copied.wait)
        return self._results

    @property
    def replay_s(self) -> float:
        """Seconds of the replay. Call this after `read`."""
        return self.begin.seconds_until(self.end)


@dataclass(frozen=True)
class PendingStep:
    """A step that the engine has launched and not yet read; the host took `launch_s` seconds for
    that.

    `emitting` has the requests that may emit tokens in this step, each with its largest number of
    tokens. The step's other requests have prompt tokens left to prefill.
    """

    turn: Turn
    key: StepKey
    emitting: dict[Request, int]
    readout: Readout
    launch_s: float

    def count_drafts(
        self,
        results: Mapping[str, Tensor],
        stats: Stats,
        tiers: TierPolicy,
        budgets: BudgetPolicy | None,
    ) -> None:
        """Record in the statistics and the policies which drafts the step accepted.

        After a step with fewer drafts, the last columns of a row hold old tokens. They do not
        count as drafts.
        """
        key, turn = self.key, self.turn
        accepted, emitted = results["batch.num_accepted"], results["batch.num_emitted"]
        most = [key.spec_tokens] * len(turn.decoding)
        if NUM_VERIFIED in results:  # A budget of rows: each request has its own number.
            most = results[NUM_VERIFIED].tolist()
            for request, chances in zip(
                turn.requests, results[DRAFT_CHANCES].tolist(), strict=False
            ):
                request.draft_chances = chances
        rows = zip(turn.decoding, most, accepted.tolist(), emitted.tolist(), strict=False)
        drafts, each = [], []
        for request, limit, num_accepted, num_emitted in rows:
            if request.finish_reason is not None:  # It ended before this step was read.
                continue
            verified = min(request.num_drafts, limit)
            right = min(num_accepted, verified)
            stats.count_acceptance(verified, right, num_emitted, turn.phase == "prefill")
            drafts.append((verified, right))
            each.append(request.acceptance)
        proposed = dict.fromkeys(self.emitting, key.spec_tokens)
        if NUM_DRAFTS in results:  # Copies: a row may have none, also with K > 0.
            proposed = dict(zip(turn.requests, results[NUM_DRAFTS].tolist(), strict=False))
        for request in self.emitting:
            request.num_drafts = proposed[request]
        tiers.observe_drafts(drafts, each)
        if turn.phase == "decode":  # The time of a prefill step is not a decode step's cost.
            context = sum(request.num_tokens for request in turn.decoding)
            took = (self.readout.replay_s, context)
            if budgets is None:
                tiers.observe(key.bucket.num_reqs, key.spec_tokens, *took)
            else:
                shape = (key.spec_tokens, key.bucket.query_len)
                budgets.observe(len(turn.decoding), shape, *took)

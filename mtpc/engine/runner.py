"""Runs steps: writes the rows that changed, replays, and gives the results to the requests.

The captured step makes every decision about tokens. `scheduler` chooses a step's requests, `rows`
writes their rows, and here the host reads `out_token_ids` and `num_emitted`.

With `async_scheduling` a step is launched before the previous one is read. The text is the same,
because no decision about tokens waits for the host. The host knows lengths one step late, so it
allocates pages for the greatest possible one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from mtpc.engine.outbox import Outbox
from mtpc.engine.readout import Moment, PendingStep, Readout
from mtpc.engine.request import FinishReason, Request, StepOutput
from mtpc.engine.rows import write_chunks, write_new_pages, write_state, write_synthetic_draws
from mtpc.engine.sampling_rows import read_logprobs
from mtpc.engine.scheduler import Scheduler, Turn
from mtpc.engine.snapshots import SlotStates
from mtpc.engine.stats import Stats
from mtpc.engine.tiers import TierPolicy, from_json, to_json
from mtpc.layout import HIDDEN, STOP_REASONS, TEXT_IDS, StepKey
from mtpc.plan import Plan
from mtpc.program.program import Program

if TYPE_CHECKING:
    from mtpc.engine.budgets import BudgetPolicy
    from mtpc.engine.grammar_rows import GrammarRows


class StepRunner:
    """Runs the steps of an engine.

    If the program has steps for several K, `tiers` chooses K for each decode step. If it has a
    budget of rows, `budgets` chooses K and the rows.
    """

    def __init__(
        self,
        program: Program,
        options: Plan,
        vocab_size: int,
        states: SlotStates,
        scheduler: Scheduler,
        outbox: Outbox,
        stats: Stats,
    ):
        self.program, self.states, self._vocab_size = program, states, vocab_size
        self._scheduler, self._outbox, self._stats = scheduler, outbox, stats
        self._pages, self._reads_late = scheduler.pages, options.async_scheduling
        write_synthetic_draws(program, options.synthetic_acceptance_rates)
        self.tiers = TierPolicy(program.tiers)
        known = program.costs.read(stats.fallbacks) if program.costs is not None else None
        if known is not None:
            try:
                self.tiers = TierPolicy(program.tiers, from_json(known))
            except ValueError as error:
                stats.fallbacks[f"costs of earlier runs were not used: {error}"] += 1
        self.budgets: BudgetPolicy | None = None
        if options.row_budgets:
            from mtpc.engine.budgets import BudgetPolicy  # Few starts have budgets.

            self.budgets = BudgetPolicy(options.shapes)
            self.budgets.use(program.tiers)
        self._hidden: Tensor | None = None
        if options.hidden_state_layers:
            found = (t for name, t in program.shared.items() if name.endswith(f".{HIDDEN}"))
            self._hidden = next(found)
        self._masks: GrammarRows | None = None
        self._unread: PendingStep | None = None
        self._last_end: Moment | None = None

    def describe(self) -> None:
        """Write the state of the program, the queues and the memory into the statistics."""
        program, stats = self.program, self._stats
        stats.replays, stats.host_writes = program.replays.copy(), program.host_writes
        stats.building, stats.tiers = program.building, program.ready or self.tiers.tiers
        stats.forced_drafts = self._masks.forced_drafts if self._masks is not None else 0
        stats.fallbacks |= program.fallbacks
        self._scheduler.describe(stats)
        self.states.describe(stats, self._pages.index)

    def save(self) -> None:
        """Write pages and snapshots to `kv_offload_dir`, and the costs of steps."""
        self.states.save(self._pages)
        if self.program.costs is not None and self.tiers.steps:
            self.program.costs.write(to_json(self.tiers.costs()), self._stats.fallbacks)

    def rest(self) -> None:
        """Forget the unread step, and do not count the time until the next one as a gap."""
        self._unread = self._last_end = None

    def advance(self) -> None:
        """Launch the next step, if there is one, and read it, or with async the previous one.

        Raises:
            Exception: whatever the replay raises. The queues may be half-changed.
        """
        turn, unread = self._scheduler.next_turn(), self._unread
        turn = None if turn is None else self._write_rows(turn)
        launched = None if turn is None else self._launch(turn)
        if self._reads_late:
            self._unread, launched = launched, unread
        if launched is not None:
            self._collect(launched)

    def _write_rows(self, turn: Turn) -> Turn | None:
        """Write the buffer rows that changed. End and leave out requests that cannot be written."""
        failed: dict[Request, Exception] = {}
        for request in turn.placed:
            try:
                write_state(self.program, request)
                self.states.restore(request)
            except Exception as error:
                failed[request] = error
        for request, first in turn.grown:
            write_new_pages(self.program, request, first)
        for request, reason in failed.items():
            self._pages.forget(request.pages)
            self._outbox.fail(request, reason)
        return turn.without(failed) if failed else turn

    def _launch(self, turn: Turn) -> PendingStep:
        start = time.perf_counter()
        if turn.phase == "prefill":
            key = self.program.prefill_key()
            chunks = (len(turn.decoding), turn.prompts, turn.chunks)
            write_chunks(self.program, key, *chunks, self._vocab_size)
        else:
            key = self._choose(self.program.bucket_for(len(turn.requests)), turn)
        self._write_masks(key, turn)
        self.program.set_batch(key, [r.slot for r in turn.requests if r.slot is not None])
        readout = Readout(self.program, key)
        self.states.save_prompts(turn)
        emitting = dict.fromkeys(turn.decoding, key.max_emitted)
        emitting |= {request: 1 for request in turn.prompts if request.is_prefilled}
        for request, most in emitting.items():
            request.num_unread += most
        return PendingStep(turn, key, emitting, readout, time.perf_counter() - start)

    def _write_masks(self, key: StepKey, turn: Turn) -> None:
        """Write a step's masks, from the first request with a grammar on."""
        if self._masks is None and any(each.grammar is not None for each in turn.requests):
            from mtpc.engine.grammar_rows import GrammarRows  # Not above: few requests have one.

            self._masks = GrammarRows(self.program, self._vocab_size)
        if self._masks is not None:
            self._masks.write(key, turn)

    def _choose(self, num_reqs: int, turn: Turn) -> StepKey:
        """The decode step of a turn, of a bucket's rows."""
        while self.program.arrived:
            tiers = self.program.take()
            self.tiers.use(tiers)
            if self.budgets is not None:
                self.budgets.use(tiers)
        if self.budgets is not None:
            known = [request.draft_chances for request in turn.decoding]
            return StepKey.decode(num_reqs, *self.budgets.choose(num_reqs, known))
        each = [request.acceptance for request in turn.decoding]
        context = sum(request.num_tokens for request in turn.decoding)
        idle = TEXT_IDS in self.program.shared and turn.has_no_drafts
        return StepKey.decode(num_reqs, self.tiers.choose(num_reqs, context, each, idle))

    def _collect(self, pending: PendingStep) -> None:
        """Wait for a step's results, count them, and give them to its requests."""
        start = time.perf_counter()
        results, stats, turn = pending.readout.read(), self._stats, pending.turn
        for request, most in pending.emitting.items():
            request.num_unread -= most
        if self._last_end is not None:
            stats.host_gap_s += self._last_end.seconds_until(pending.readout.begin)
            stats.host_gaps += 1
        self._last_end = pending.readout.end
        stats.replay_s += pending.readout.replay_s
        if turn.phase == "prefill":
            stats.count_prefill(len(turn.decoding), turn.chunks)
        else:
            stats.decode_steps += 1
        pending.count_drafts(results, stats, self.tiers, self.budgets)
        self._read(pending, results)
        seconds = pending.launch_s + time.perf_counter() - start
        if turn.phase == "prefill":
            stats.prefill_s += seconds
        else:
            stats.decode_s += seconds

    def _read(self, pending: PendingStep, results: Mapping[str, Tensor]) -> None:
        """Turn a step's results into outputs, row by row.

        Rows give no output if their prompt has tokens left to prefill, or if their request ended
        before the step was read.
        """
        names = ("out_token_ids", "num_emitted", "num_accepted", "stop_reason")
        columns = [results[f"batch.{name}"].tolist() for name in names]
        rows = zip(pending.turn.requests, *columns, strict=False)
        for row, (request, ids, count, accepted, code) in enumerate(rows):
            if request.finish_reason is not None:
                continue
            if request not in pending.emitting:
                self._scheduler.learn(request)
                continue
            emitted = ids[:count]
            reason: FinishReason | None = STOP_REASONS.get(code)
            if request.grammar is not None:
                assert self._masks is not None  # The masks of the step were written before.
                emitted = self._masks.take(request, emitted, reason == "nonfinite")
                reason = "error" if request.error else reason
            logprobs = read_logprobs(results, row, emitted, request)
            output = StepOutput(request.request_id, emitted, reason, logprobs, request.error)
            request.emit(output)
            request.is_walking = False
            self._outbox.put(request)
            self._stats.emitted_tokens += len(emitted)
            if reason in ("nonfinite", "error"):
                self._pages.forget(request.pages)
            else:
                if count == accepted + 1:  # Else a stop cut the output, and not the state.
                    self.states.save_decoded(request)
                self._scheduler.learn(request)
            if reason is not None:
                if self._hidden is not None:  # Its pages are its own until it leaves.
                    kept = self._hidden[request.pages].flatten(0, 1)
                    request.hidden_states = kept[: request.num_tokens - 1].cpu()
                self._outbox.leave(request)

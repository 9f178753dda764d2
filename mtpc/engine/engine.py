"""The engine: admits requests into slots and pages, replays steps, reads results.

Everything decided per token is in the captured step; the host admits, frees, and reads
`out_token_ids` and `num_emitted`. `scheduler` says who runs when, `rows` what is written.

`add`, `abort` and `step` may be called at any moment, from any thread, and from a request's own
callback.

With `async_scheduling` a step is launched before the one before it is read. Nothing that is decided
per token waits for the host, so the text is the same; the host knows lengths one step late, and
hands out pages for the most that they can be.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from mtpc.config import CompileOptions
from mtpc.engine.admission import check_request, longest_request
from mtpc.engine.grammar import Grammar, GrammarMasks
from mtpc.engine.lock import FairLock
from mtpc.engine.pages import FreeList, PagePool
from mtpc.engine.prefix import PrefixCache
from mtpc.engine.readout import Moment, Readout
from mtpc.engine.request import FinishReason, OnOutput, Request, StepOutput
from mtpc.engine.rows import unpaged_state, write_chunks, write_new_pages, write_state
from mtpc.engine.sampling_rows import read_logprobs
from mtpc.engine.scheduler import Scheduler, Turn
from mtpc.engine.stats import DecodeCounts, Stats
from mtpc.engine.tiers import TierPolicy
from mtpc.errors import RequestError
from mtpc.layout import NULL_PAGE, SCRATCH_SLOT, STOP_REASONS, StepKey
from mtpc.program.program import Program
from mtpc.sampling_params import SamplingParams

Emission = tuple[Request, StepOutput]
"""What a request got of a step."""


@dataclass(frozen=True)
class PendingStep:
    """A step that was launched and not yet read.

    Attributes:
        turn: whose.
        key: which step.
        emitting: of its requests, those that it may emit tokens of, and how many of each at most;
            other prompts go on.
        readout: its results.
        launch_s: seconds that the host took to launch it.
    """

    turn: Turn
    key: StepKey
    emitting: dict[Request, int]
    readout: Readout
    launch_s: float


class Engine:
    """Runs requests on a program.

    Args:
        program: captured steps.
        options: what it was compiled with.
        vocab_size: ids must be below it.

    Attributes:
        tiers: chooses K for each decode step, where there are several.
    """

    def __init__(self, program: Program, options: CompileOptions, vocab_size: int):
        self.program, self.options, self.vocab_size = program, options, vocab_size
        self._stats = Stats(options.spec_tokens)
        self.pages = PagePool(NULL_PAGE + 1, options.page_count - 1)
        self.slots = FreeList("request slots", SCRATCH_SLOT + 1, program.max_reqs)
        prefill = program.prefill_key()
        self.scheduler = Scheduler(
            self.slots,
            self.pages,
            self._prefixes(),
            self._pages_for,
            prefill.bucket,
            options.busy_prefill_tokens,
            prefill.max_emitted,
        )
        self._ids = itertools.count()
        self.tiers = TierPolicy(options.tiers)
        self._masks = GrammarMasks(program, vocab_size)
        self._lock = FairLock()
        self._unread: PendingStep | None = None
        self._last_end: Moment | None = None

    def _prefixes(self) -> PrefixCache | None:
        """The prefix cache, where it was asked for and all of a request's past is in pages."""
        if not self.options.prefix_caching:
            return None
        unpaged = unpaged_state(self.program.shared, self.options.page_count)
        if unpaged is not None:
            reason = f"no prefix reuse: {unpaged} holds state that is not in pages"
            self._stats.fallbacks[reason] += 1
            return None
        return PrefixCache(self.pages.index, self.options.page_size, self.options.spec_tokens)

    def _pages_for(self, num_committed: int) -> int:
        """Pages for a step that begins with that many committed tokens."""
        return self.options.blocks_per_request(num_committed + 1)

    @property
    def waiting(self) -> deque[Request]:
        """Requests without a slot, the next one first."""
        return self.scheduler.waiting

    @property
    def running(self) -> list[Request]:
        """Requests with a slot, in order of arrival."""
        return self.scheduler.running

    @property
    def stats(self) -> Stats:
        """Counts so far, and how full queue and pool are at this moment."""
        stats, scheduler = self._stats, self.scheduler
        stats.replays = self.program.replays.copy()
        stats.host_writes = self.program.host_writes
        stats.preemptions = scheduler.num_preemptions
        stats.reused_tokens = scheduler.reused_tokens
        stats.forced_drafts = self._masks.forced_drafts
        stats.num_waiting, stats.num_running = len(self.waiting), len(self.running)
        stats.num_pages = self.pages.count
        stats.pages_used = self.pages.count - self.pages.num_free
        stats.pages_idle = self.pages.num_idle
        return stats

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run; one whose last step was not read yet does."""
        return bool(self.waiting or self.running)

    @property
    def has_requests_by_hand(self) -> bool:
        """Whether some requests have no callback: only who steps the engine gets their outputs."""
        with self._lock:
            return any(r.on_output is None for r in [*self.waiting, *self.running])

    def add(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        stop_ids: tuple[int, ...] = (),
        sampling: SamplingParams | None = None,
        on_output: OnOutput | None = None,
        grammar: Grammar | None = None,
    ) -> int:
        """Queue a request.

        Args:
            prompt_ids: token ids, not empty, each below vocab_size.
            max_new_tokens: at least 1; with the prompt at most `max_len`.
            stop_ids: at most MAX_STOP_IDS ids that end the request.
            sampling: how tokens are chosen; None is greedy. What is not greedy needs a program
                compiled with `sampling`.
            on_output: called with each `StepOutput` of the request, in the thread that steps the
                engine. What it raises ends its own request, with finish_reason `error`.
            grammar: which tokens may come next, an object of this request's own that took none
                yet; needs a program compiled with `token_mask`. What it raises ends its own
                request, too.

        Returns:
            The request's id.

        Raises:
            RequestError: one of the above does not hold.
            CapacityError: the page pool cannot hold the request even when it is empty.
        """
        prompt, stops, params = list(prompt_ids), tuple(stop_ids), sampling or SamplingParams()
        return self.submit(Request(-1, prompt, max_new_tokens, stops, params, on_output, grammar))

    def submit(self, request: Request) -> int:
        """Queue a request that was formed before; see `add`."""
        self.check(request)
        request.sampling = request.sampling.settled()
        with self._lock:
            mine = request.grammar
            if mine is not None and any(r.grammar is mine for r in [*self.waiting, *self.running]):
                raise RequestError("the grammar is another request's; give each its own")
            request.request_id = next(self._ids)
            self.scheduler.add(request)
        return request.request_id

    @property
    def longest(self) -> int:
        """Tokens of the longest request that `check` lets in, prompt and continuation together."""
        return longest_request(self.options, self.pages.count)

    def check(self, request: Request) -> None:
        """Refuse what can never be served; see `add`."""
        check_request(request, self.options, self.vocab_size, self.pages.count)

    def abort(self, request_id: int, reason: FinishReason = "aborted") -> None:
        """End a request at any moment; unknown or finished ids are ignored.

        Args:
            request_id: whose.
            reason: what its callback is told, where it has one.
        """
        with self._lock:
            for request in [*self.waiting, *self.running]:
                if request.request_id == request_id:
                    self._finish(request, reason)
                    self._rest()
                    if request.on_output is not None:
                        request.on_output(StepOutput(request_id, [], reason))

    def reset_prefix_cache(self) -> None:
        """Reuse nothing computed so far: after weights were changed, and while nothing runs."""
        with self._lock:
            self.pages.forget_all()

    def step(self) -> list[StepOutput]:
        """One iteration: admit, then prefill one chunk, decode all requests that can, or both.

        Returns:
            What each request of the step got; nothing for a chunk that is not a prompt's last. With
            `async_scheduling` of the step before it, which is read while this one runs.

        Raises:
            Whatever the replay raises. Its requests are computed again by the next step, with what
            was not read of the step before.
        """
        with self._lock:
            try:
                outputs = self._advance()
            except BaseException:  # An interrupt, too: what the device got to is unknown.
                if self.options.async_scheduling:
                    self.pages.forget_all()  # Some were learned of what was only launched.
                self.scheduler.preempt_all()
                self._unread = self._last_end = None
                raise
            handed = self._hand_out(outputs)
            self._rest()
            return handed

    def _rest(self) -> None:
        """Where there is no work left nothing is to be read, and no gap begins."""
        if not self.has_work:
            self._unread = self._last_end = None

    def _advance(self) -> list[Emission]:
        """Launch the next step, if that can be said now; read it, or the one before it."""
        turn, unread = self.scheduler.next_turn(), self._unread
        launched = self._launch(turn) if turn is not None else None
        if not self.options.async_scheduling:
            return self._collect(launched) if launched is not None else []
        self._unread = launched
        return self._collect(unread) if unread is not None else []

    def _launch(self, turn: Turn) -> PendingStep:
        """Write what changed, and run the step."""
        start = time.perf_counter()
        for request in turn.placed:
            write_state(self.program, request)
        for request, first in turn.grown:
            write_new_pages(self.program, request, first)
        if turn.phase == "prefill":
            key = self.program.prefill_key()
            write_chunks(self.program, key, len(turn.decoding), turn.prompts, turn.chunks)
        else:
            num_reqs = self.program.bucket_for(len(turn.requests))
            key = StepKey.decode(num_reqs, self.tiers.choose(num_reqs))
        self._masks.write(key, turn)
        self.program.set_batch(key, [r.slot for r in turn.requests if r.slot is not None])
        readout = Readout(self.program, key)
        emitting = dict.fromkeys(turn.decoding, key.max_emitted)
        emitting |= {request: 1 for request in turn.prompts if request.is_prefilled}
        for request, most in emitting.items():
            request.num_unread += most
        return PendingStep(turn, key, emitting, readout, time.perf_counter() - start)

    def _collect(self, pending: PendingStep) -> list[Emission]:
        """Read what a step emitted."""
        start = time.perf_counter()
        results, stats, turn = pending.readout.read(), self._stats, pending.turn
        for request, most in pending.emitting.items():
            request.num_unread -= most
        if self._last_end is not None:
            stats.count_host_gap(self._last_end.seconds_until(pending.readout.begin))
        self._last_end = pending.readout.end
        stats.replay_s += pending.readout.replay_s
        if turn.phase == "prefill":
            stats.prefill_steps += 1
            stats.joined += DecodeCounts(steps=int(bool(turn.decoding)))
            stats.prefill_prompts += len(turn.prompts)
            stats.prompt_tokens += sum(turn.chunks)
        else:
            stats.decode_steps += 1
        self._count_drafts(pending, results)
        outputs = self._read(pending, results)
        seconds = pending.launch_s + time.perf_counter() - start
        if turn.phase == "prefill":
            stats.prefill_s += seconds
        else:
            stats.decode_s += seconds
        return outputs

    def _count_drafts(self, pending: PendingStep, results: Mapping[str, Tensor]) -> None:
        """Tell statistics and policy what became of the drafts that a step verified.

        After a step of fewer drafts a row's further columns hold old tokens: no drafts.
        """
        key, turn = pending.key, pending.turn
        accepted, emitted = results["batch.num_accepted"], results["batch.num_emitted"]
        rows = zip(turn.decoding, accepted.tolist(), emitted.tolist(), strict=False)
        drafts = []
        for request, num_accepted, num_emitted in rows:
            if request.finish_reason is not None:  # Before this step was read.
                continue
            verified = min(request.num_drafts, key.spec_tokens)
            right = min(num_accepted, verified)
            self._stats.count_acceptance(verified, right, num_emitted, turn.phase == "prefill")
            drafts.append((verified, right))
        for request in pending.emitting:
            request.num_drafts = key.spec_tokens
        self.tiers.observe_drafts(drafts)
        if turn.phase == "decode":  # Else its time says nothing of a decode step's.
            self.tiers.observe(key.bucket.num_reqs, key.spec_tokens, pending.readout.replay_s)

    def _read(self, pending: PendingStep, results: Mapping[str, Tensor]) -> list[Emission]:
        """Take what a step emitted, row by row.

        Nothing of prompts whose end it did not reach, nor of requests that ended meanwhile.
        """
        rows = zip(
            pending.turn.requests,
            results["batch.out_token_ids"].tolist(),
            results["batch.num_emitted"].tolist(),
            results["batch.stop_reason"].tolist(),
            strict=False,
        )
        outputs = []
        for row, (request, token_ids, count, code) in enumerate(rows):
            if request.finish_reason is not None:
                continue
            if request not in pending.emitting:
                self.scheduler.learn(request)
                continue
            emitted = token_ids[:count]
            reason: FinishReason | None = STOP_REASONS.get(code)
            if request.grammar is not None:
                self._masks.take(request, emitted, reason == "nonfinite")
                emitted, reason = ([], "error") if request.error else (emitted, reason)
            logprobs = read_logprobs(results, row, emitted, request)
            request.output_ids += emitted
            request.logprobs += logprobs or []
            self._stats.emitted_tokens += len(emitted)
            if reason in ("nonfinite", "error"):
                self.pages.forget(request.pages)
            else:
                self.scheduler.learn(request)
            if reason is not None:
                self._finish(request, reason)
            output = StepOutput(request.request_id, emitted, reason, logprobs, request.error)
            outputs.append((request, output))
        return outputs

    def _hand_out(self, outputs: list[Emission]) -> list[StepOutput]:
        """Call the requests' callbacks; where one raises its request ends, and no other."""
        handed = []
        for request, output in outputs:
            was_aborted = request.finish_reason != output.finish_reason  # By another's callback.
            if request.on_output is not None and not was_aborted:
                try:
                    request.on_output(output)
                except Exception as error:
                    output = self._fail(request, output, error)
            handed.append(output)
        return handed

    def _fail(self, request: Request, output: StepOutput, error: Exception) -> StepOutput:
        self._stats.callback_errors += 1
        if request.finish_reason is None:
            self._finish(request, "error")
        return replace(output, finish_reason="error", error=error)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._stats.finished[reason] += 1
        self.scheduler.remove(request)

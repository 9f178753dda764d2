"""The engine: admits requests into slots and pages, replays steps, and reads results.

The captured step makes every decision about tokens. The host admits and frees requests, and reads
`out_token_ids` and `num_emitted`. `scheduler` decides which requests run in a step, and `rows`
writes their rows of the buffers.

Any thread may call `add`, `abort` and `step` at any moment, and so may a request's own callback.

With `async_scheduling` the engine launches a step before it reads the previous one. The text is the
same, because no decision about tokens waits for the host. The host knows each request's length one
step late, so it allocates pages for the greatest possible length.
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
"""A request and the output that a step gave it."""


@dataclass(frozen=True)
class PendingStep:
    """A step that the engine has launched and not yet read.

    Attributes:
        turn: the requests of the step.
        key: the captured step.
        emitting: the requests that may emit tokens in this step, each with its largest number of
            tokens. The step's other requests have prompt tokens left to prefill.
        readout: the step's results.
        launch_s: seconds that the host took to launch the step.
    """

    turn: Turn
    key: StepKey
    emitting: dict[Request, int]
    readout: Readout
    launch_s: float


class Engine:
    """Runs requests on a program.

    Args:
        program: the captured steps.
        options: the options that the program was compiled with.
        vocab_size: number of ids in the vocabulary.

    Attributes:
        tiers: chooses K for each decode step, if the program has steps for several K.
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
        """The prefix cache, or None if it is off or a request's past is not all in pages."""
        if not self.options.prefix_caching:
            return None
        unpaged = unpaged_state(self.program.layout)
        if unpaged is not None:
            reason = f"no prefix reuse: {unpaged} holds state that is not in pages"
            self._stats.fallbacks[reason] += 1
            return None
        return PrefixCache(self.pages.index, self.options.page_size, self.options.spec_tokens)

    def _pages_for(self, num_committed: int) -> int:
        """The number of pages for a step that begins with `num_committed` committed tokens."""
        return self.options.blocks_per_request(num_committed + 1)

    @property
    def waiting(self) -> deque[Request]:
        """The requests without a slot, in the order in which they are admitted."""
        return self.scheduler.waiting

    @property
    def running(self) -> list[Request]:
        """The requests with a slot, in order of arrival."""
        return self.scheduler.running

    @property
    def stats(self) -> Stats:
        """The counts so far, and the current state of the queue and the page pool."""
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
        """Whether any request waits or runs. A request runs until its last step has been read."""
        return bool(self.waiting or self.running)

    @property
    def has_requests_by_hand(self) -> bool:
        """Whether any request has no callback, so that only `step` returns its outputs."""
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
            prompt_ids: token ids, at least one, each below vocab_size.
            max_new_tokens: at least 1. The prompt and the new tokens together are at most
                `max_len`.
            stop_ids: at most MAX_STOP_IDS ids that end the request.
            sampling: how tokens are chosen; None is greedy. Other parameters need a program
                compiled with `sampling`.
            on_output: called with each `StepOutput` of the request, in the thread that calls
                `step` or `abort`. If it raises, only its own request ends, with
                finish_reason `error`.
            grammar: decides which tokens may come next. Each request needs its own object, which
                has taken no token yet. It needs a program compiled with `token_mask`. If it
                raises, only its own request ends, with finish_reason `error`.

        Returns:
            The request's id.

        Raises:
            RequestError: an argument does not meet these conditions.
            CapacityError: the page pool cannot hold the request even when it is empty.
        """
        prompt, stops, params = list(prompt_ids), tuple(stop_ids), sampling or SamplingParams()
        return self.submit(Request(-1, prompt, max_new_tokens, stops, params, on_output, grammar))

    def submit(self, request: Request) -> int:
        """Queue a `Request` object; see `add` for its fields, the result and the errors."""
        self.check(request)
        request.sampling = request.sampling.settled()
        with self._lock:
            grammar, others = request.grammar, [*self.waiting, *self.running]
            if grammar is not None and any(r.grammar is grammar for r in others):
                raise RequestError("the grammar is another request's; give each its own")
            request.request_id = next(self._ids)
            self.scheduler.add(request)
        return request.request_id

    @property
    def longest(self) -> int:
        """The most tokens that `check` accepts, counting the prompt and the new tokens."""
        return longest_request(self.options, self.pages.count)

    def check(self, request: Request) -> None:
        """Refuse a request that can never be served; see `add` for the conditions and errors."""
        check_request(request, self.options, self.vocab_size, self.pages.count)

    def abort(self, request_id: int, reason: FinishReason = "aborted") -> None:
        """End a request at any moment. Ids of unknown or finished requests are ignored.

        Args:
            request_id: id of the request.
            reason: the finish reason. A callback gets it in an output without tokens. An error that
                the callback raises is counted in `Stats.callback_errors`.
        """
        with self._lock:
            for request in [*self.waiting, *self.running]:
                if request.request_id == request_id:
                    self._finish(request, reason)
                    self._rest()
                    self._call_back(request, StepOutput(request_id, [], reason))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Call this after the weights change, while nothing runs."""
        with self._lock:
            self.pages.forget_all()

    def step(self) -> list[StepOutput]:
        """Admit requests, then run one prefill step or one decode step (see `scheduler`).

        Returns:
            One output for each request that emitted tokens or ended. A prompt emits nothing before
            its last chunk. With `async_scheduling` these are the outputs of the previous step,
            which is read while the new one runs.

        Raises:
            Whatever the replay raises. All running requests return to the queue, and later steps
            compute them again, including results that had not been read.
        """
        with self._lock:
            try:
                outputs = self._advance()
            except BaseException:  # KeyboardInterrupt, too: the state on the device is unknown.
                if self.options.async_scheduling:
                    # The index may hold pages of a step that was launched and not completed.
                    self.pages.forget_all()
                self.scheduler.preempt_all()
                self._unread = self._last_end = None
                raise
            handed = self._hand_out(outputs)
            self._rest()
            return handed

    def _rest(self) -> None:
        """If no work is left, forget the unread step, and do not count the idle time as a gap."""
        if not self.has_work:
            self._unread = self._last_end = None

    def _advance(self) -> list[Emission]:
        """Launch the next step, if there is one, and read it, or with async the previous one."""
        turn, unread = self.scheduler.next_turn(), self._unread
        launched = self._launch(turn) if turn is not None else None
        if not self.options.async_scheduling:
            return self._collect(launched) if launched is not None else []
        self._unread = launched
        return self._collect(unread) if unread is not None else []

    def _launch(self, turn: Turn) -> PendingStep:
        """Write the buffer rows that changed, and launch the step."""
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
        """Wait for a step's results, count them, and return its requests' outputs."""
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
        """Record in the statistics and the tier policy which drafts the step accepted.

        After a step with fewer drafts, the last columns of a row hold old tokens. They do not
        count as drafts.
        """
        key, turn = pending.key, pending.turn
        accepted, emitted = results["batch.num_accepted"], results["batch.num_emitted"]
        rows = zip(turn.decoding, accepted.tolist(), emitted.tolist(), strict=False)
        drafts = []
        for request, num_accepted, num_emitted in rows:
            if request.finish_reason is not None:  # It ended before this step was read.
                continue
            verified = min(request.num_drafts, key.spec_tokens)
            right = min(num_accepted, verified)
            self._stats.count_acceptance(verified, right, num_emitted, turn.phase == "prefill")
            drafts.append((verified, right))
        for request in pending.emitting:
            request.num_drafts = key.spec_tokens
        self.tiers.observe_drafts(drafts)
        if turn.phase == "decode":  # The time of a prefill step is not a decode step's cost.
            self.tiers.observe(key.bucket.num_reqs, key.spec_tokens, pending.readout.replay_s)

    def _read(self, pending: PendingStep, results: Mapping[str, Tensor]) -> list[Emission]:
        """Turn a step's results into outputs, row by row.

        Rows give no output if their prompt has tokens left to prefill, or if their request ended
        before the step was read.
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
        """Call the requests' callbacks, in order."""
        handed = []
        for request, output in outputs:
            # Another request's callback may have aborted this one.
            was_aborted = request.finish_reason != output.finish_reason
            handed.append(output if was_aborted else self._call_back(request, output))
        return handed

    def _call_back(self, request: Request, output: StepOutput) -> StepOutput:
        """Call a request's callback, if it has one. If it raises, only its own request ends."""
        if request.on_output is None:
            return output
        try:
            request.on_output(output)
        except Exception as error:
            self._stats.callback_errors += 1
            if request.finish_reason is None:
                self._finish(request, "error")
            return replace(output, finish_reason="error", error=error)
        return output

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._stats.finished[reason] += 1
        self.scheduler.remove(request)

"""The engine: admits requests into slots and pages, replays steps, and reads results.

The captured step makes every decision about tokens. The host admits and frees requests, and reads
`out_token_ids` and `num_emitted`. `scheduler` chooses a step's requests; `rows` writes their rows.

Any thread may call `add`, `abort` and `step` at any moment. A request's callback may call `add` and
`abort`; a grammar's methods run in the middle of a step and may call neither.

An interrupt (KeyboardInterrupt) may arrive at any moment. `_is_torn` says that one left the queues
half-changed. The next call then builds them anew from the requests, and computes what ran again.

With `async_scheduling` the engine launches a step before it reads the previous one. The text is the
same, because no decision about tokens waits for the host. The host knows lengths one step late, so
it allocates pages for the greatest possible one.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping

from torch import Tensor

from mtpc.config import CompileOptions
from mtpc.engine.admission import check_images, check_request, longest_request
from mtpc.engine.earlier_costs import read_costs, write_costs
from mtpc.engine.grammar import Grammar, GrammarMasks
from mtpc.engine.lock import FairLock
from mtpc.engine.outbox import Outbox
from mtpc.engine.pages import FreeList, PagePool
from mtpc.engine.prompt_images import PromptImages
from mtpc.engine.prompts import token_ids
from mtpc.engine.readout import Moment, PendingStep, Readout
from mtpc.engine.request import FinishReason, OnOutput, Request, StepOutput
from mtpc.engine.rows import write_chunks, write_new_pages, write_state, write_synthetic_draws
from mtpc.engine.sampling_rows import read_logprobs
from mtpc.engine.scheduler import Scheduler, Turn
from mtpc.engine.snapshots import SlotStates
from mtpc.engine.stats import Stats
from mtpc.engine.tiers import TierPolicy, context_of
from mtpc.errors import RequestError
from mtpc.layout import NULL_PAGE, SCRATCH_SLOT, STOP_REASONS, TEXT_IDS, StepKey
from mtpc.program.program import Program
from mtpc.sampling_params import SamplingParams

MAX_FAILURES = 3
"""Steps that may fail one after another before the requests that ran in them end."""


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
        self._stats = Stats(options.spec_tokens, options.synthetic_acceptance_rates)
        write_synthetic_draws(program, options.synthetic_acceptance_rates)
        self._states = SlotStates(program, options)
        self.pages = PagePool(NULL_PAGE + 1, options.page_count - 1, self._states.count)
        self.slots = FreeList(SCRATCH_SLOT + 1, program.max_reqs)
        prefill = program.prefill_key()
        self.scheduler = Scheduler(
            self.slots,
            self.pages,
            self._states.open_prefixes(self.pages.index, self._stats.fallbacks),
            self._pages_for,
            prefill.bucket,
            options.busy_prefill_tokens,
            prefill.max_emitted,
        )
        self._ids = itertools.count()
        self.tiers = TierPolicy(program.tiers, read_costs(program, self._stats.fallbacks))
        self._masks = GrammarMasks(program, vocab_size)
        self._requests: dict[int, Request] = {}  # Those that wait or run.
        self._outbox = Outbox(self._blame)
        self._lock = FairLock()
        # A thread that has `_lock` and finds one of these taken holds it, too.
        self._stepping, self._changing = threading.Lock(), threading.Lock()
        self._is_torn, self._failures = False, 0
        self._abandoned = deque[int]()
        self._unread: PendingStep | None = None
        self._last_end: Moment | None = None

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
        program, stats = self.program, self._stats
        stats.replays, stats.host_writes = program.replays.copy(), program.host_writes
        stats.building, stats.tiers = program.building, program.ready or self.tiers.tiers
        stats.forced_drafts = self._masks.forced_drafts
        stats.fallbacks |= program.fallbacks
        self.scheduler.describe(stats)
        self._states.describe(stats, self.pages.index)
        return stats

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do. A request runs until its last step has been read."""
        return bool(self.waiting or self.running or self._outbox.has_any or self._is_torn)

    @property
    def has_requests_by_hand(self) -> bool:
        """Whether a request has no callback, so that only `step` returns its outputs."""
        with self._lock.in_turn():
            self._enter("generate")
            with self._changing:
                return any(r.on_output is None for r in self._requests.values())

    def _enter(self, name: str) -> None:
        """Begin a call under the lock. Mend what an interrupted call has left, and abort what was
        abandoned since the last call.

        Raises:
            RequestError: a grammar's method makes this call.
        """
        self._lock.arrived()
        if self._changing.locked():
            raise RequestError(
                f"engine.{name} was called inside a grammar's method, in the middle of a step; "
                "call it between steps, or in a request's callback"
            )
        if self._is_torn:
            with self._changing:
                self._mend()
        while self._abandoned:
            self._abort(self._abandoned.popleft(), "aborted")

    def _mend(self) -> None:
        """Build the queues, slots and pages anew from the requests, after an interrupt.

        If an interrupt comes here, too, the next call does this again. A running request with a
        grammar ends, because its grammar may have taken some of its tokens or none.
        """
        self._outbox.settle()
        live = [each for each in self._requests.values() if each.finish_reason is None]
        for request in live:
            if request.grammar is not None and request.slot is not None:
                self._outbox.put_failure(request, KeyboardInterrupt())
        live = [request for request in live if request.finish_reason is None]
        self.scheduler.restart(live)
        self.program.forget_batches()
        self._requests = {request.request_id: request for request in live}
        self._unread = self._last_end = None
        self._is_torn = False

    def add(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        stop_ids: tuple[int, ...] = (),
        sampling: SamplingParams | None = None,
        on_output: OnOutput | None = None,
        grammar: Grammar | None = None,
        images: PromptImages | None = None,
    ) -> int:
        """Queue a request.

        Args:
            prompt_ids: token ids, at least one, each below vocab_size.
            max_new_tokens: at least 1. The prompt and the new tokens together are at most
                `max_len`.
            stop_ids: at most MAX_STOP_IDS ids that end the request, each below vocab_size.
            sampling: how tokens are chosen; None is greedy. Other parameters need a program
                compiled with `sampling`.
            on_output: called with each `StepOutput` of the request, in the thread that calls
                `step` or `abort`. If it raises, only its own request ends, with
                finish_reason `error`.
            grammar: decides which tokens may come next. Each request needs its own object, which
                has taken no token yet. It needs a program compiled with `token_mask`. If it
                raises, only its own request ends, with finish_reason `error`.
            images: the prompt's, as `mtpc.engine.vision.Vision` makes them; needs `images=True`.

        Returns:
            The request's id.

        Raises:
            RequestError: an argument does not meet these conditions.
            CapacityError: the page pool cannot hold the request even when it is empty.
        """
        prompt, ends = token_ids("prompt_ids", prompt_ids), tuple(token_ids("stop_ids", stop_ids))
        params = SamplingParams() if sampling is None else sampling
        asked = (prompt, max_new_tokens, ends, params, on_output, grammar, images)
        return self.submit(Request(-1, *asked))

    def submit(self, request: Request) -> int:
        """Queue a `Request` object; see `add` for its fields, the result and the errors."""
        self.check(request)
        request.sampling = request.sampling.settled()
        with self._lock.in_turn():
            self._enter("add")
            with self._changing:
                grammar, others = request.grammar, self._requests.values()
                if grammar is not None and any(r.grammar is grammar for r in others):
                    raise RequestError("the grammar is another request's; give each its own")
                number = request.request_id
                if number >= 0:
                    raise RequestError(f"request {number} was added before; make a new one")
                self._is_torn = True
                request.request_id = next(self._ids)
                self._requests[request.request_id] = request
                self.scheduler.add(request)
                self._is_torn = False
        return request.request_id

    @property
    def longest(self) -> int:
        """The most tokens that `check` accepts, counting the prompt and the new tokens."""
        return longest_request(self.options, self.pages.count)

    def check(self, request: Request) -> None:
        """Refuse a request that can never be served; see `add` for the conditions and errors."""
        check_request(request, self.options, self.vocab_size, self.pages.count)
        check_images(request, self.program)

    def abort(self, request_id: int, reason: FinishReason = "aborted") -> None:
        """End a request at any moment. Ids of unknown or finished requests are ignored.

        Args:
            request_id: id of the request.
            reason: the finish reason. A callback gets it in an output without tokens. An error that
                the callback raises is counted in `Stats.callback_errors`.
        """
        with self._lock.in_turn():
            self._enter("abort")
            self._abort(request_id, reason)

    def _abort(self, request_id: int, reason: FinishReason) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        with self._changing:
            self._is_torn = True
            emission = self._outbox.put(request, StepOutput(request_id, [], reason))
            self._finish(request, reason)
            self._is_torn = False
        self._outbox.hand(emission)
        self._rest()

    def abandon(self, request_ids: Iterable[int]) -> None:
        """Abort requests whose caller is gone, now or at the end of the call that runs.

        The garbage collector may call this in the middle of any call. So this does not wait for a
        step of another thread, which may wait for what this thread holds.
        """
        self._abandoned.extend(request_ids)
        if not (self._stepping.locked() or self._changing.locked()):
            with self._lock.in_turn():
                self._enter("abandon")

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Call this after the weights change, while nothing runs."""
        with self._lock.in_turn():
            self._enter("reset_prefix_cache")
            with self._changing:
                self._is_torn = True
                self._states.forget(self.pages)
                self._is_torn = False

    def close(self) -> None:
        """Write pages and snapshots to `kv_offload_dir`, and costs of steps; it can go on."""
        with self._lock.in_turn():
            self._enter("close")
            with self._changing:
                self._states.save(self.pages)
                write_costs(self.program, self.tiers, self._stats.fallbacks)

    def step(self) -> list[StepOutput]:
        """Admit requests, then run one prefill step or one decode step (see `scheduler`).

        Returns:
            One output for each request that emitted tokens or ended. A prompt emits nothing before
            its last chunk. With `async_scheduling` these are the outputs of the previous step,
            which is read while the new one runs.

        Raises:
            Exception: whatever the replay raises. All running requests return to the queue, and
                later steps compute them again, including results that had not been read. The step
                that fails after `MAX_FAILURES` - 1 others does not raise: all requests that ran in
                it end, with finish_reason `error`, and the queue goes on without them.
            RequestError: a callback or a grammar's method calls this.
        """
        with self._lock.in_turn():
            self._enter("step")
            if self._stepping.locked():
                raise RequestError(
                    "engine.step was called inside a callback, where it would reorder the tokens "
                    "of other requests; return from the callback, and step again"
                )
            with self._stepping:
                if not self._outbox.has_any:  # Else an interrupt kept them from being handed out.
                    self._try_to_advance()
                handed = self._outbox.hand_out()
            self._enter("step")  # For what was abandoned during the step.
            self._rest()
            return handed

    def _try_to_advance(self) -> None:
        with self._changing:
            self._is_torn = True
            try:
                self._advance()
                self._failures = 0
            except Exception as error:
                self._send_back(error)
            self._is_torn = False

    def _send_back(self, error: Exception) -> None:
        """Return all running requests to the queue after a step that failed, and raise its error;
        after several failures in a row, end the requests that ran: one of them is the cause."""
        if self.options.async_scheduling:
            # The index may hold pages of a step that was launched and not completed.
            self.pages.forget_all()
        ran = list(self.running) or list(self.waiting)[:1]
        self.scheduler.preempt_all()
        self._unread = self._last_end = None
        self._failures += 1
        if self._failures < MAX_FAILURES:
            self._is_torn = False
            raise error
        self._failures = 0
        for request in ran:
            self._fail(request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request because of the engine's own error."""
        self._outbox.put_failure(request, error)
        self.pages.forget(request.pages)
        self._finish(request, "error")

    def _rest(self) -> None:
        """If no work is left, forget the unread step, and do not count the idle time as a gap."""
        if not self.has_work:
            self._unread = self._last_end = None

    def _advance(self) -> None:
        """Launch the next step, if there is one, and read it, or with async the previous one."""
        turn, unread = self.scheduler.next_turn(), self._unread
        turn = None if turn is None else self._write_rows(turn)
        launched = None if turn is None else self._launch(turn)
        if self.options.async_scheduling:
            self._unread, launched = launched, unread
        if launched is not None:
            self._collect(launched)

    def _write_rows(self, turn: Turn) -> Turn | None:
        """Write the buffer rows that changed. End and leave out requests that cannot be written."""
        failed: dict[Request, Exception] = {}
        for request in turn.placed:
            try:
                write_state(self.program, request)
                self._states.restore(request)
            except Exception as error:
                failed[request] = error
        for request, first in turn.grown:
            write_new_pages(self.program, request, first)
        for request, reason in failed.items():
            self._fail(request, reason)
        return turn.without(failed) if failed else turn

    def _launch(self, turn: Turn) -> PendingStep:
        """Write the step's own rows, and launch it."""
        start = time.perf_counter()
        if turn.phase == "prefill":
            key = self.program.prefill_key()
            chunks = (len(turn.decoding), turn.prompts, turn.chunks)
            write_chunks(self.program, key, *chunks, self.vocab_size)
        else:
            while self.program.arrived:
                self.tiers.use(self.program.take())
            num_reqs = self.program.bucket_for(len(turn.requests))
            each = [request.acceptance for request in turn.decoding]
            idle = TEXT_IDS in self.program.shared and turn.has_no_drafts
            tier = self.tiers.choose(num_reqs, context_of(turn.decoding), each, idle)
            key = StepKey.decode(num_reqs, tier)
        self._masks.write(key, turn)
        self.program.set_batch(key, [r.slot for r in turn.requests if r.slot is not None])
        readout = Readout(self.program, key)
        self._states.save_prompts(turn)
        emitting = dict.fromkeys(turn.decoding, key.max_emitted)
        emitting |= {request: 1 for request in turn.prompts if request.is_prefilled}
        for request, most in emitting.items():
            request.num_unread += most
        return PendingStep(turn, key, emitting, readout, time.perf_counter() - start)

    def _collect(self, pending: PendingStep) -> None:
        """Wait for a step's results, count them, and put its requests' outputs in the outbox."""
        start = time.perf_counter()
        results, stats, turn = pending.readout.read(), self._stats, pending.turn
        for request, most in pending.emitting.items():
            request.num_unread -= most
        if self._last_end is not None:
            stats.count_host_gap(self._last_end.seconds_until(pending.readout.begin))
        self._last_end = pending.readout.end
        stats.replay_s += pending.readout.replay_s
        if turn.phase == "prefill":
            stats.count_prefill(len(turn.decoding), turn.chunks)
        else:
            stats.decode_steps += 1
        pending.count_drafts(results, stats, self.tiers)
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
                self.scheduler.learn(request)
                continue
            emitted = ids[:count]
            reason: FinishReason | None = STOP_REASONS.get(code)
            if request.grammar is not None:
                emitted = self._masks.take(request, emitted, reason == "nonfinite")
                reason = "error" if request.error else reason
            logprobs = read_logprobs(results, row, emitted, request)
            output = StepOutput(request.request_id, emitted, reason, logprobs, request.error)
            self._outbox.put(request, output)
            self._stats.emitted_tokens += len(emitted)
            if reason in ("nonfinite", "error"):
                self.pages.forget(request.pages)
            else:
                if count == accepted + 1:  # Else a stop cut the output, and not the state.
                    self._states.save_decoded(request)
                self.scheduler.learn(request)
            if reason is not None:
                self._finish(request, reason)

    def _blame(self, request: Request, interrupt: BaseException | None) -> None:
        """End a request whose callback raised; see `Outbox`."""
        with self._changing:
            self._is_torn = True
            self._stats.callback_errors += 1
            if interrupt is not None:
                self._outbox.put_failure(request, interrupt)
            if request.request_id in self._requests:
                self._finish(request, "error")
            self._is_torn = False

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._stats.finished[reason] += 1
        self.scheduler.remove(request)
        self._requests.pop(request.request_id, None)

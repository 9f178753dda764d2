"""The engine: takes requests, runs steps, and tells what these decided.

Any thread may call `add`, `abort` and `step` at any moment. A request's callback may call `add`,
and `abort`, which then takes effect at the end of the step. A grammar's methods run in the middle
of a step and may call neither.

The requests are the truth. An exception or an interrupt (KeyboardInterrupt) ends the step or the
call in which it arrives. `_rebuild` then makes the queues, slots, pages and the outbox anew from
the requests: at once if it can, else at the begin of the next call, which finds `_phase` set.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from mtpc.engine.admission import check_images, check_request, longest_request, token_ids
from mtpc.engine.lock import FairLock
from mtpc.engine.outbox import Outbox
from mtpc.engine.pages import FreeList, PagePool
from mtpc.engine.request import FinishReason, OnOutput, Request, StepOutput
from mtpc.engine.runner import StepRunner
from mtpc.engine.scheduler import Scheduler
from mtpc.engine.snapshots import SlotStates
from mtpc.engine.stats import Stats
from mtpc.errors import RequestError
from mtpc.layout import NULL_PAGE, SCRATCH_SLOT
from mtpc.plan import Plan
from mtpc.program.program import Program
from mtpc.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mtpc.engine.grammar import Grammar
    from mtpc.engine.prompt_images import PromptImages

MAX_FAILURES = 3
"""Steps that may fail one after another before the requests that ran in them end."""


class Engine:
    """Runs requests on a program.

    Args:
        program: the captured steps.
        options: the options that the program was compiled with.
        vocab_size: number of ids in the vocabulary.

    Attributes:
        scheduler: has the queues of requests.
        pages: the KV pages.
        slots: the request slots.
        runner: runs the steps.
    """

    def __init__(self, program: Program, options: Plan, vocab_size: int):
        self.program, self.options, self.vocab_size = program, options, vocab_size
        stats = self._stats = Stats(options.spec_tokens, options.synthetic_acceptance_rates)
        states = SlotStates(program, options)
        self.pages = PagePool(NULL_PAGE + 1, options.num_pages - 1, states.count)
        self.slots = FreeList(SCRATCH_SLOT + 1, program.max_reqs)
        prefill = program.prefill_key()
        self.scheduler = Scheduler(
            self.slots,
            self.pages,
            states.open_prefixes(self.pages.index, stats.fallbacks),
            # A step begins with so many committed tokens, and adds at least one.
            lambda num_committed: options.blocks_per_request(num_committed + 1),
            prefill.bucket,
            options.busy_prefill_chunk,
            prefill.max_emitted,
        )
        self._outbox = Outbox(self.scheduler, stats)
        parts = (states, self.scheduler, self._outbox, stats)
        self.runner = StepRunner(program, options, vocab_size, *parts)
        self._ids, self._failures = itertools.count(), 0
        self._aborts = deque[tuple[int, FinishReason]]()
        self._lock = FairLock()
        # What the call that has the lock is doing. Without such a call, it was interrupted at it.
        self._phase: Literal["", "change", "tell"] = ""

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
        self.runner.describe()
        return self._stats

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do. A request runs until its last step has been read."""
        return bool(self.waiting or self.running or self._outbox.has_any or self._phase)

    @property
    def has_requests_by_hand(self) -> bool:
        """Whether a request has no callback, so that only `step` returns its outputs."""
        with self._lock.in_turn():
            self._begin("generate")
            return any(r.on_output is None for r in self._outbox.requests.values())

    def _begin(self, name: str) -> bool:
        """Begin a call under the lock, and return whether it is made inside another one. Raises
        RequestError: a grammar's method makes this call."""
        is_nested = self._lock.arrived()
        if not is_nested:
            self._settle(KeyboardInterrupt())
        elif self._phase == "change":
            raise RequestError(
                f"engine.{name} was called inside a grammar's method, in the middle of a step; "
                "call it between steps, or in a request's callback"
            )
        return is_nested

    def _settle(self, cause: BaseException) -> None:
        """Mend what an interrupted call has left (`cause` interrupted it), and abort what was put
        off."""
        if self._phase:
            self._rebuild(cause)
        while self._aborts:
            request_id, reason = self._aborts[0]
            request = self._outbox.requests.get(request_id)
            if request is not None and request.finish_reason is None:
                self._phase = "change"
                self._outbox.end(request, reason)
                self._phase = "tell"
                self._outbox.tell_end(request)
                self._phase = ""
            self._aborts.popleft()
        if not self.has_work:
            self.runner.rest()

    def _rebuild(self, cause: BaseException) -> list[Request]:
        """Build the queues, slots, pages and the outbox anew from the requests. Returns those that
        had slots.

        If an interrupt comes here, too, the next call does this again. A request ends if its
        callback was interrupted, or if its grammar was: that has taken some of its tokens or none.
        """
        self._phase = "change"
        for request in self._outbox.requests.values():
            request.settle()
        live = [each for each in self._outbox.requests.values() if each.finish_reason is None]
        ran = [request for request in live if request.slot is not None]
        self.scheduler.restart(live)
        self.program.forget_batches()
        self.runner.rest()
        self._outbox.restart(cause)
        for request in live:
            if request.is_walking and request.finish_reason is None:
                self._outbox.fail(request, cause)
        self._phase = ""
        return ran or live[:1]

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
            self._begin("add")
            grammar, requests = request.grammar, self._outbox.requests
            if grammar is not None and any(r.grammar is grammar for r in requests.values()):
                raise RequestError("the grammar is another request's; give each its own")
            number = request.request_id
            if number >= 0:
                raise RequestError(f"request {number} was added before; make a new one")
            before, self._phase = self._phase, "change"
            request.request_id = next(self._ids)
            requests[request.request_id] = request
            self.scheduler.add(request)
            self._phase = before
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
        """End a request at any moment, or at the end of the step if a callback calls this.

        Args:
            request_id: id of the request. An unknown or finished one is ignored.
            reason: the finish reason. A callback gets it in an output without tokens. An error that
                the callback raises is counted in `Stats.callback_errors`.
        """
        with self._lock.in_turn():
            is_nested = self._begin("abort")
            if request_id in self._outbox.requests:
                self._aborts.append((request_id, reason))
            if not is_nested:
                self._settle(KeyboardInterrupt())

    def abandon(self, request_ids: Iterable[int]) -> None:
        """Abort requests whose caller is gone, now or at the end of the call that runs.

        The garbage collector may call this in the middle of any call. So this does not wait for a
        step of another thread, which may wait for what this thread holds.
        """
        self._aborts.extend((request_id, "aborted") for request_id in request_ids)
        if not (self._lock.is_mine or self._phase):
            with self._lock.in_turn():
                self._begin("abandon")

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Call this after the weights change, while nothing runs."""
        with self._lock.in_turn():
            self._begin("reset_prefix_cache")
            before, self._phase = self._phase, "change"
            self.runner.states.forget(self.pages)
            self._phase = before

    def close(self) -> None:
        """Write pages and snapshots to `kv_offload_dir`, and costs of steps; it can go on."""
        with self._lock.in_turn():
            self._begin("close")
            self.runner.save()

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
            if self._begin("step"):
                raise RequestError(
                    "engine.step was called inside a callback, where it would reorder the tokens "
                    "of other requests; return from the callback, and step again"
                )
            try:
                if not self._outbox.has_any:  # Else an interrupt kept them from being handed out.
                    self._advance()
                self._phase = "tell"
                self._outbox.hand_out()
            except BaseException as error:
                self._settle(error)
                raise
            if self._phase == "tell":  # Else a callback was interrupted in a call, and went on.
                self._phase = ""
            self._settle(KeyboardInterrupt())
            return self._outbox.take()

    def _advance(self) -> None:
        """Run a step. After several failures in a row, end the requests that ran: one of them is
        the cause."""
        self._phase = "change"
        try:
            self.runner.advance()
            self._failures = 0
        except Exception as error:
            ran = self._rebuild(error)
            self._failures += 1
            if self._failures < MAX_FAILURES:
                raise
            self._failures = 0
            self._phase = "change"
            for request in ran:
                if request.finish_reason is None:
                    self._outbox.fail(request, error)

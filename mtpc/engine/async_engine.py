"""The engine for asyncio: it runs in a thread of its own, coroutines get outputs as they come.

Back-pressure: at most `max_requests` are in the engine, further calls of `generate` wait. Per
request there is one mailbox, in which outputs that were not yet taken become one. So a consumer
that is slow, or never reads, holds back nobody, not even the engine's work on its own request, and
costs at most its own max_new_tokens ids of memory; slot and pages come back when the request ends.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import TypeVar

from mtpc.engine.engine import Engine
from mtpc.engine.grammar import Grammar
from mtpc.engine.request import FinishReason, Request, StepOutput
from mtpc.engine.stream import Output, assemble, check_served
from mtpc.engine.text import TextAssembler, stop_strings
from mtpc.errors import OptionError, RequestError, ServingError
from mtpc.sampling_params import SamplingParams, TokenLogprobs
from mtpc.weights.served_model import ServedModel

_LAST_STEP_S = 10.0
"""How long the interpreter's end waits for the step that runs."""

T = TypeVar("T")
TURNS = 64
"""Steps for which the engine waits once consumers were late; then it looks again."""
MAX_TURN_S = 0.02
"""The engine waits no longer for consumers to take what a step brought."""


class _Mailbox:
    """One request's outputs, from the engine's thread to its consumer's loop.

    Args:
        loop: the consumer's.
        tell: called where something came and the loop knows of nothing yet; sees to it that
            `wake` is called there.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, tell: Callable[[_Mailbox], None]):
        self.loop = loop
        self._call, self._lock, self._filled = tell, threading.Lock(), asyncio.Event()
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._reason: FinishReason | None = None
        self._error: BaseException | None = None
        self._is_told = False

    def put(self, output: StepOutput) -> None:
        """Add an output; called by the engine."""
        with self._lock:
            self._token_ids += output.token_ids
            if output.logprobs is not None:
                self._logprobs = (self._logprobs or []) + output.logprobs
            self._reason = output.finish_reason
            self._tell()

    def fail(self, error: BaseException | None) -> None:
        """The engine has ended, by this error or because it was closed."""
        with self._lock:
            self._error = ServingError(
                "the engine was closed" if error is None else f"the engine failed: {error!r}"
            )
            self._error.__cause__ = error
            self._tell()

    def refuse(self, error: RequestError) -> None:
        """The engine did not take the request; others go on."""
        with self._lock:
            self._error = error
            self._tell()

    def _tell(self) -> None:
        # One call waits in the loop at most, however late the loop gets to it.
        if not self._is_told and not self.loop.is_closed():
            self._is_told = True
            self._call(self)

    def wake(self) -> None:
        """The consumer has something to take; called in its loop."""
        self._filled.set()

    async def take(self) -> StepOutput:
        """All that came since the last time; waits for something to come.

        Raises:
            ServingError: the engine has ended.
            RequestError: the engine did not take the request.
        """
        await self._filled.wait()
        with self._lock:
            self._filled.clear()
            self._is_told = False
            if self._error is not None and self._reason is None:
                raise self._error
            token_ids, self._token_ids = self._token_ids, []
            logprobs, self._logprobs = self._logprobs, None
            return StepOutput(-1, token_ids, self._reason, logprobs)


def _attempt(function: Callable[[], object]) -> BaseException | None:
    """Call it; returns its error, so that what comes after it is still done."""
    try:
        function()
    except BaseException as error:
        return error
    return None


class AsyncEngine:
    """Serves an engine to coroutines of one event loop.

    Use it as `async with AsyncEngine(spec.engine, spec.served) as engine`.

    Args:
        engine: runs in a thread of its own from `start` on; the model's `generate` and `stream`
            may be called meanwhile, from other threads.
        served: the model's vocabulary and tokenizer.
        max_requests: requests in the engine at once; further ones wait in `generate`.

    Raises:
        OptionError: max_requests is not a positive integer.
    """

    def __init__(self, engine: Engine, served: ServedModel, max_requests: int = 256):
        if isinstance(max_requests, bool) or not isinstance(max_requests, int) or max_requests < 1:
            raise OptionError(f"max_requests is {max_requests!r}; expected an integer >= 1")
        self.engine, self.served = engine, served
        self._places = asyncio.Semaphore(max_requests)
        self._wake = threading.Condition()
        self._commands: list[Callable[[], object]] = []
        self._mailboxes: dict[Request, _Mailbox] = {}
        self._filled: list[_Mailbox] = []
        self._turns, self._is_taken = 0, threading.Event()
        self._is_taken.set()
        self._is_closing = False
        self._ended: Future[BaseException | None] = Future()
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> AsyncEngine:
        self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def start(self) -> None:
        """Start the engine's thread, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="mtpc-engine", daemon=True)
            self._thread.start()
            atexit.register(self._end)

    def _end(self) -> None:
        """At the interpreter's end, where nobody called `aclose`: after the step that runs.

        A replay lets go of the interpreter's lock, and must not come back when there is none. A
        callback that never returns does not hold up the end.
        """
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(_LAST_STEP_S)

    async def aclose(self) -> None:
        """Stop after the step that runs; requests are aborted, their consumers told.

        An error that ended the engine before is not raised here: its consumers have it.
        """
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.shield(asyncio.wrap_future(self._ended))

    @property
    def has_ended(self) -> bool:
        """Whether the engine failed or was closed: it takes no more requests."""
        return self._is_closing

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, between two steps, and give its result.

        What it reads is not written meanwhile, as `engine.stats` else is. Where no thread runs,
        or runs any more, it is called here.

        Args:
            function: short; the engine waits for it.
        """
        result: Future[T] = Future()

        def settle() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function())
                except BaseException as error:
                    result.set_exception(error)

        with self._wake:
            is_over = self._thread is None or self._is_closing
            if not is_over:
                self._commands.append(settle)
                self._wake.notify()
        if not is_over:
            return await asyncio.wrap_future(result)
        if self._thread is not None:
            await asyncio.shield(asyncio.wrap_future(self._ended))
        return function()

    async def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        *,
        stop_ids: Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams | None = None,
        grammar: Grammar | None = None,
        text: TextAssembler | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Continue one prompt.

        Leaving the loop over it, by cancellation or otherwise, aborts the request; its slot and
        pages are free before the engine's next step.

        Args:
            prompt: text (where the checkpoint has a tokenizer) or token ids.
            max_new_tokens: new tokens.
            stop_ids: ids that end the continuation; None takes the model's end-of-sequence ids.
            stop: strings that end the text, for text prompts.
            sampling: how tokens are chosen; None is greedy.
            grammar: which tokens may come next, an object of this request's own; its methods are
                called in the engine's thread. See `Engine.add`.
            text: for prompts of ids, what makes text of the continuation; with its own stop
                strings. For servers, which encode prompts themselves.

        Raises:
            RequestError: an argument cannot be served.
            CapacityError: the prompt needs more pages than the pool has.
            NumericsError: the model produced non-finite logits.
            GrammarError: the grammar raised, allows no token, or contradicts itself.
            ServingError: the engine failed, was closed, or is not running.
        """
        strings = stop_strings(stop)
        if isinstance(prompt, str):
            if text is not None:
                raise RequestError("text is for prompts of token ids; a text prompt has its own")
            text, prompt = TextAssembler(self.served.decode, strings), self.served.encode(prompt)
        elif strings:
            raise RequestError("stop strings need a text prompt; give stop_ids for token ids")
        ends = self.served.stop_ids if stop_ids is None else tuple(stop_ids)
        params = sampling or SamplingParams()
        request = Request(-1, list(prompt), max_new_tokens, ends, sampling=params, grammar=grammar)
        self.engine.check(request)
        async with self._places:
            mailbox = self._post(request)
            reason: FinishReason | None = None
            try:
                while True:
                    output = assemble(0, await mailbox.take(), text)
                    check_served(output, request)
                    reason = output.finish_reason
                    yield output
                    if reason is not None:
                        return
            finally:
                self._withdraw(request, reason or "aborted")

    def _post(self, request: Request) -> _Mailbox:
        mailbox = _Mailbox(asyncio.get_running_loop(), self._tell)
        request.on_output = mailbox.put
        with self._wake:
            if self._thread is None:
                raise ServingError("the engine is not running; use it in `async with`, or start()")
            if self._is_closing or self._ended.done():
                error = self._ended.result() if self._ended.done() else None
                raise ServingError("the engine has ended; make a new AsyncEngine") from error
            self._mailboxes[request] = mailbox
            self._commands.append(lambda: self._submit(request, mailbox))
            self._wake.notify()
        return mailbox

    def _submit(self, request: Request, mailbox: _Mailbox) -> None:
        """Queue a request; one that another's grammar came to refuse is its consumer's matter."""
        try:
            self.engine.submit(request)
        except RequestError as error:
            mailbox.refuse(error)

    def _withdraw(self, request: Request, reason: FinishReason) -> None:
        """Forget a request, wherever it is: not yet in the engine, in it, or finished."""
        with self._wake:
            self._mailboxes.pop(request, None)
            if request.finish_reason is None:
                self._commands.append(lambda: self.engine.abort(request.request_id, reason))
                self._wake.notify()

    def _serve(self) -> None:
        """The thread: do what was asked for, step, and again."""
        error: BaseException | None = None
        try:
            while self._do_commands():
                self.engine.step()
                self._give_turn()
        except BaseException as caught:
            error = caught
            self._give_turn()
        with self._wake:
            self._is_closing = True
            mailboxes, self._mailboxes = self._mailboxes, {}
            commands, self._commands = self._commands, []
        # All are told, and the end is, whatever fails on the way; the first error is told.
        # Among the commands is what was withdrawn meanwhile.
        errors = [error, *(_attempt(command) for command in commands)]
        for request in mailboxes:
            request.on_output = None
            errors.append(_attempt(partial(self.engine.abort, request.request_id)))
        first = next((one for one in errors if one is not None), None)
        failed = [_attempt(partial(mailbox.fail, first)) for mailbox in mailboxes.values()]
        atexit.unregister(self._end)
        self._ended.set_result(next((one for one in (first, *failed) if one is not None), None))

    def _tell(self, mailbox: _Mailbox) -> None:
        """Wake a consumer: with all others of this step, or now where another thread steps."""
        if threading.current_thread() is self._thread and not self._is_closing:
            self._filled.append(mailbox)
        else:
            mailbox.loop.call_soon_threadsafe(mailbox.wake)

    def _give_turn(self) -> None:
        """Wake the consumers of what the last step brought; where they are late, let them run.

        A replay may hold the interpreter's lock, as one of the eager backend does most of the time.
        Consumers that have to get it between two replays would get it late, and one after the
        other. Where a replay lets go of it, they run beside it, and the engine waits for nobody.
        """
        filled, self._filled = self._filled, []
        if not filled:
            return
        if not self._is_taken.is_set():  # What the step before brought, after a whole replay.
            self._turns = TURNS
        done = self._is_taken = threading.Event()

        def wake_all() -> None:
            for mailbox in filled:
                mailbox.wake()
            loop.call_soon(done.set)  # Behind the tasks that were woken.

        loop = filled[0].loop
        if not loop.is_closed():
            loop.call_soon_threadsafe(wake_all)
        if self._turns:
            self._turns -= 1
            done.wait(MAX_TURN_S)

    def _do_commands(self) -> bool:
        """Wait until there is something to do; returns whether to go on."""
        with self._wake:
            self._wake.wait_for(lambda: self._commands or self._is_closing or self.engine.has_work)
            count, is_closing = len(self._commands), self._is_closing
        for _ in range(count):
            with self._wake:  # One by one: should it fail, the others are there at the end.
                command = self._commands.pop(0)
            command()
        self._give_turn()  # An abort tells its consumer, too.
        return not is_closing

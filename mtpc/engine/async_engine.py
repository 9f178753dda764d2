"""The engine for asyncio. It runs in its own thread; coroutines receive outputs as they arrive.

Back-pressure: the engine holds at most `max_requests` requests, and further calls of `generate`
wait. Each request has one mailbox, which merges the outputs that its consumer has not taken yet. A
slow consumer therefore delays neither other requests nor its own. It costs the memory of at most
max_new_tokens token ids. The request's slot and pages become free when the request ends.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar, Unpack

from mtpc.arguments import SamplingArguments
from mtpc.engine.engine import Engine
from mtpc.engine.grammar import Grammar
from mtpc.engine.prompt_images import PromptImages
from mtpc.engine.prompts import encode, end_ids, sampling_each
from mtpc.engine.request import FinishReason, Request, StepOutput
from mtpc.engine.stream import Output, assemble, check_served
from mtpc.engine.text import TextAssembler, stop_strings
from mtpc.errors import MtpcError, RequestError, ServingError
from mtpc.option_checks import check_int
from mtpc.sampling_params import SamplingParams
from mtpc.weights.served_model import ServedModel

_LAST_STEP_S = 10.0
"""Seconds that interpreter shutdown waits for the running step."""

T = TypeVar("T")
TURNS = 64
"""The number of steps that the engine waits for its consumers after they were late once."""
MAX_TURN_S = 0.02
"""The longest time, in seconds, that the engine waits for consumers after one step."""


class _Model(Protocol):
    engine: Engine
    served: ServedModel


class _Mailbox:
    """Carries one request's outputs from the engine's thread to its consumer's event loop. `notify`
    is called when the mailbox has something to take and no notification is pending. It arranges a
    call of `wake` in `loop`, the consumer's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, notify: Callable[[_Mailbox], None]):
        self.loop, self._notify = loop, notify
        self._lock, self._filled = threading.Lock(), asyncio.Event()
        self._outputs: list[StepOutput] = []
        self._error: MtpcError | None = None

    def put(self, output: StepOutput) -> None:
        """Add an output. The engine calls this."""
        with self._lock:
            self._notify_once()
            self._outputs.append(output)

    def fail(self, error: MtpcError) -> None:
        """Record that there will be no more outputs, and why."""
        with self._lock:
            self._notify_once()
            self._error = error

    def _notify_once(self) -> None:
        # At most one notification is pending in the loop, however late the loop runs it.
        is_empty = not self._outputs and self._error is None
        if is_empty and not self.loop.is_closed():
            self._notify(self)

    def wake(self) -> None:
        """Wake the consumer. Must be called in the consumer's loop."""
        self._filled.set()

    async def take(self) -> StepOutput:
        """Wait for an output, then return everything since the last call as one output.

        Raises:
            ServingError: the engine has ended.
            RequestError: the engine refused the request.
        """
        await self._filled.wait()
        with self._lock:
            self._filled.clear()
            outputs, self._outputs = self._outputs, []
        reason = outputs[-1].finish_reason if outputs else None
        if self._error is not None and reason is None:
            raise self._error
        token_ids = [token for output in outputs for token in output.token_ids]
        logprobs = [entry for output in outputs for entry in output.logprobs or ()]
        return StepOutput(-1, token_ids, reason, None if outputs[0].logprobs is None else logprobs)


def _ended(error: BaseException | None) -> ServingError:
    """What consumers are told when the engine has ended. Without an error, it was closed."""
    told = ServingError(
        "the engine was closed" if error is None else f"the engine failed: {error!r}"
    )
    told.__cause__ = error
    return told


def _attempt(function: Callable[[], object]) -> BaseException | None:
    """Call a function and return the error that it raises, or None."""
    try:
        function()
    except BaseException as error:
        return error
    return None


class AsyncEngine:
    """Runs an engine for the coroutines of one event loop.

    Use it as `async with AsyncEngine(spec) as engine`.

    Args:
        model: a `mtpc.SpecModel`. After `start` its engine runs in its own thread. Other threads
            may still call the model's `generate` and `stream`.
        max_requests: the most requests in the engine at once. Further requests wait in `generate`.

    Raises:
        OptionError: max_requests is not a positive integer.
    """

    def __init__(self, model: _Model, max_requests: int = 256):
        check_int("max_requests", max_requests, 1)
        self.engine, self.served = model.engine, model.served
        self._places = asyncio.Semaphore(max_requests)
        # `with` enters this lock in C, so that no interrupt leaves it taken; see `FairLock`.
        self._mutex = threading.RLock()
        self._wake = threading.Condition(self._mutex)
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

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def start(self) -> None:
        """Start the engine's thread, once.

        Raises:
            ServingError: the system gives no thread.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="mtpc-engine", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                self._thread = None
                raise ServingError(
                    f"cannot start the engine's thread: {error}; free threads or memory of this "
                    "machine"
                ) from None
            atexit.register(self._end)

    def _end(self) -> None:
        """Stop at interpreter shutdown, if `aclose` was not called.

        A replay releases the GIL and takes it again when it returns, so it must return before the
        interpreter is gone. The wait has a limit: a callback that never returns does not block
        the shutdown.
        """
        with self._mutex:
            self._is_closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(_LAST_STEP_S)

    async def aclose(self) -> None:
        """Stop after the running step, abort all requests, and notify their consumers.

        If the engine failed earlier, this does not raise the error; the consumers receive it.
        """
        with self._mutex:
            self._is_closing = True
            self._wake.notify()
        if self._thread is not None:
            await self.until_ended()

    async def until_ended(self) -> BaseException | None:
        """Wait until the engine's thread has ended. Returns what it failed with; None: closed."""
        return await asyncio.shield(asyncio.wrap_future(self._ended))

    @property
    def has_ended(self) -> bool:
        """Whether the engine failed or was closed. It then accepts no requests."""
        return self._is_closing

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, between two steps, and return its result. The
        engine waits until it returns.

        The function reads a consistent state, for example of `engine.stats`, because no step runs
        at the same time. If the engine's thread does not run, the calling thread runs the function.

        Raises:
            Exception: whatever the function raises.
        """
        result: Future[T] = Future()

        def settle() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function())
                except BaseException as error:
                    result.set_exception(error)

        with self._mutex:
            is_over = self._thread is None or self._is_closing
            if not is_over:
                self._commands.append(settle)
                self._wake.notify()
        if not is_over:
            return await asyncio.wrap_future(result)
        if self._thread is not None:
            await self.until_ended()
        return function()

    async def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        *,
        stop_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        stop: str | Sequence[str] | None = (),
        sampling: SamplingParams | None = None,
        grammar: Grammar | None = None,
        images: PromptImages | None = None,
        text: TextAssembler | None = None,
        **params: Unpack[SamplingArguments],
    ) -> AsyncGenerator[Output, None]:
        """Continue one prompt, and yield its outputs as they arrive.

        Leaving the loop early, by cancellation or otherwise, aborts the request. Its slot and
        pages are free before the engine's next step.

        Args:
            prompt: text (if the checkpoint has a tokenizer) or token ids.
            max_new_tokens: the most new tokens.
            stop_ids: ids that end the continuation; None means the model's end-of-sequence ids.
            ignore_eos: do not stop at the model's end-of-sequence ids.
            stop: strings that end the text; only for text prompts.
            sampling: how tokens are chosen; None is greedy.
            grammar: decides which tokens may come next. Each request needs its own object. The
                engine's thread calls its methods. See `Engine.add`.
            images: of a prompt of ids; see `Engine.add`.
            text: for prompts of ids, turns the new tokens into text and has its own stop strings.
                Servers use it, because they encode prompts themselves.
            **params: fields of `mtpc.SamplingParams`, in place of `sampling`: temperature=0.8.

        Raises:
            RequestError: an argument cannot be served.
            CapacityError: the prompt needs more pages than the pool has.
            NumericsError: the model produced non-finite logits.
            GrammarError: the grammar raised, allows no token, or contradicts itself.
            ServingError: the engine failed, was closed, or does not run.
        """
        strings = stop_strings(stop)
        if isinstance(prompt, str):
            if text is not None:
                raise RequestError("text is for prompts of token ids; a text prompt has its own")
            text = TextAssembler(self.served.decode, strings)
        elif strings:
            raise RequestError("stop strings need a text prompt; give stop_ids for token ids")
        ends = end_ids(self.served, stop_ids, ignore_eos)
        (chosen,) = sampling_each(sampling, params, 1)
        prompt_ids = encode(self.served, prompt)
        asked = (prompt_ids, max_new_tokens, ends, chosen)
        request = Request(-1, *asked, grammar=grammar, images=images)
        self.engine.check(request)
        async with self._places:
            mailbox = self._post(request)
            reason: FinishReason | None = None
            try:
                while True:
                    output = assemble(0, await mailbox.take(), text, request)
                    check_served(output, request)
                    reason = output.finish_reason
                    yield output
                    if reason is not None:
                        return
            finally:
                self._withdraw(request, reason or "aborted")

    def _post(self, request: Request) -> _Mailbox:
        mailbox = _Mailbox(asyncio.get_running_loop(), self._notify)
        request.on_output = mailbox.put
        with self._mutex:
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
        """Queue a request. If the engine refuses it, only its own consumer gets the error.

        `generate` has checked the request, but its grammar may have come into use since then.
        """
        try:
            self.engine.submit(request)
        except RequestError as error:
            mailbox.fail(error)

    def _withdraw(self, request: Request, reason: FinishReason) -> None:
        """Forget a request, and abort it unless it has ended. It may not be in the engine yet."""
        with self._mutex:
            self._mailboxes.pop(request, None)
            if request.finish_reason is None:
                self._commands.append(lambda: self.engine.abort(request.request_id, reason))
                self._wake.notify()

    def _serve(self) -> None:
        """The thread's loop: run the commands, then a step, and repeat."""
        error: BaseException | None = None
        try:
            while self._do_commands():
                self.engine.step()
                self._give_turn()
        except BaseException as caught:
            error = caught
            self._give_turn()
        with self._mutex:
            self._is_closing = True
            mailboxes, self._mailboxes = self._mailboxes, {}
            commands, self._commands = self._commands, []
        # Whatever fails here, every consumer is notified, and `_ended` gets a result. Consumers
        # receive the first error. The commands include the aborts of withdrawn requests.
        errors = [error, *(_attempt(command) for command in commands)]
        for request in mailboxes:
            request.on_output = None
            errors.append(_attempt(partial(self.engine.abort, request.request_id)))
        first = next((one for one in errors if one is not None), None)
        failed = [_attempt(partial(mailbox.fail, _ended(first))) for mailbox in mailboxes.values()]
        atexit.unregister(self._end)
        self._ended.set_result(next((one for one in (first, *failed) if one is not None), None))

    def _notify(self, mailbox: _Mailbox) -> None:
        """Wake a consumer: after this step with the others, or at once from another thread."""
        if threading.current_thread() is self._thread and not self._is_closing:
            self._filled.append(mailbox)
        else:
            mailbox.loop.call_soon_threadsafe(mailbox.wake)

    def _give_turn(self) -> None:
        """Wake the consumers that the last step has outputs for. If they are late, let them run.

        A replay may hold the GIL; the eager backend does so most of the time. Consumers would then
        get the GIL only between two replays, late and one after another. If a replay releases the
        GIL, consumers run beside it, and the engine does not wait for them.
        """
        filled, self._filled = self._filled, []
        if not filled:
            return
        if not self._is_taken.is_set():  # Consumers have not run during a whole replay.
            self._turns = TURNS
        done = self._is_taken = threading.Event()

        def wake_all() -> None:
            for mailbox in filled:
                mailbox.wake()
            loop.call_soon(done.set)  # Runs after the tasks that were woken.

        loop = filled[0].loop
        if not loop.is_closed():
            loop.call_soon_threadsafe(wake_all)
        if self._turns:
            self._turns -= 1
            done.wait(MAX_TURN_S)

    def _do_commands(self) -> bool:
        """Wait for work, run the commands, and return whether the loop continues."""
        with self._mutex:
            self._wake.wait_for(lambda: self._commands or self._is_closing or self.engine.has_work)
            count, is_closing = len(self._commands), self._is_closing
        for _ in range(count):
            with self._mutex:  # One at a time: if a command fails, `_serve` still runs the rest.
                command = self._commands.pop(0)
            command()
        self._give_turn()  # An abort notifies its consumer, too.
        return not is_closing

"""The state of a server: its engine, its requests, and whether it is shutting down."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property

from mtpc import AsyncEngine
from mtpc.engine.prompt_images import PromptImages
from mtpc.engine.vision import Vision
from mtpc.server.bodies import Bodies
from mtpc.server.chat import ChatTemplate
from mtpc.server.conversation import Conversation, Conversations
from mtpc.server.counters import ServerCounters
from mtpc.server.errors import ApiError, no_token_masks
from mtpc.server.grammars import Grammars, Matcher
from mtpc.server.options import ServerOptions

log = logging.getLogger("mtpc.server")
TOKENISERS = 2
"""The number of long texts that are tokenised at the same time, and of bodies that are parsed."""
CHARS_PER_TOKEN, MIN_CHARS = 32, 2**16
"""A text is refused before it is tokenised if it has more than `MIN_CHARS` characters, and more
than `CHARS_PER_TOKEN` for each token that the engine has room for."""


class Service:
    """One engine, which `run` starts, behind one server.

    Attributes:
        is_draining: whether the server refuses new requests and only completes the running ones.
        in_flight: number of choices that wait or run.
        created: Unix time at which the service was made, in seconds.
        bodies: the bodies of requests that are not prompts yet.
        parsers: threads that only parse and check long bodies.
        tokenisers: threads that only tokenise long texts, so that other work in the event loop's
            own threads does not wait for them.
        renderers: threads that only prepare conversations. They wait for the process that renders
            the chat template.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        model_name: str,
        options: ServerOptions,
        template: ChatTemplate | None,
        vision: Vision | None = None,
    ):
        self.engine, self.model_name = engine, model_name
        self.options, self._vision = options, vision
        self._template = template
        self._grammars = Grammars(engine.served)
        self.counters = ServerCounters()
        self.created = int(time.time())
        self.bodies = Bodies(max(options.max_total_body_bytes, options.max_body_bytes))
        self.parsers = ThreadPoolExecutor(TOKENISERS, "mtpc-parser")
        self.tokenisers = ThreadPoolExecutor(TOKENISERS, "mtpc-tokeniser")
        self.renderers = ThreadPoolExecutor(TOKENISERS, "mtpc-renderer")
        self._ignored = set[str]()
        self.is_draining = False
        self.in_flight = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @cached_property
    def conversations(self) -> Conversations:
        """Turns chat requests into prompts, grammars and parsers.

        Raises:
            ApiError: 400, the model has no chat template.
        """
        if self._template is None:
            raise ApiError(
                400,
                f"{self.model_name} has no chat template: use /v1/completions, or start the "
                "server with --chat-template FILE",
                code="no_chat_template",
            )
        parsers = (self.options.tool_call_parser, self.options.reasoning_parser)
        most = self.options.max_images if self._vision is not None else 0
        return Conversations(self._template, self.engine.served, *parsers, most)

    def encode_chat(self, made: Conversation) -> tuple[list[int], PromptImages | None]:
        """The token ids of a conversation, and its images."""
        # A chat template writes special tokens itself.
        (ids,) = self.encode([made.prompt], special_tokens=False)
        if not made.images or self._vision is None:
            return ids, None
        return self._vision.place(ids, made.images, self.engine.engine.longest)

    def encode(
        self, prompts: Sequence[str | list[int]], special_tokens: bool = True
    ) -> list[list[int]]:
        """The token ids of prompts; if a text is too long, none is tokenised.

        Raises:
            ApiError: 400, a text is far too long.
        """
        longest = self.engine.engine.longest
        most = max(MIN_CHARS, CHARS_PER_TOKEN * longest)
        for prompt in prompts:
            if isinstance(prompt, str) and len(prompt) > most:
                raise ApiError(
                    400,
                    f"a prompt of {len(prompt)} characters; this server has room for {longest} "
                    f"tokens, and tokenises at most {most} characters",
                    code="context_length_exceeded",
                )
        encode = self.engine.served.encode
        return [encode(p, special_tokens) if isinstance(p, str) else p for p in prompts]

    def matchers(self, lark: str | None, param: str, count: int) -> Sequence[Matcher]:
        """The grammars of `count` texts; none without `lark`, which comes from the field `param`.

        Raises:
            ApiError: 400, the model was compiled without masks, or the grammar is invalid.
        """
        if lark is None:
            return ()
        if not self.engine.engine.options.token_mask:
            raise no_token_masks(param, param)
        return self._grammars.matchers(lark, count, param)

    def note_ignored(self, names: set[str]) -> None:
        """Log the names of fields that the server ignores, each of them once."""
        new = names - self._ignored
        if new:
            self._ignored |= new
            log.info("requests have fields that change no answer here: %s", ", ".join(sorted(new)))

    def check_ready(self) -> None:
        """Check that the server can serve requests.

        Raises:
            ApiError: 503, the server is shutting down or its engine has failed.
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if self.engine.has_ended:
            message = "the engine has failed; restart the server"
            raise ApiError(503, message, code="engine_ended")

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """A context in which `count` choices count as in flight.

        Raises:
            ApiError: 429, too many choices are in flight; 400, the server never has room for so
                many; 503, see `check_ready`.
        """
        self.check_ready()
        most = self.options.max_requests + self.options.max_queue
        if count > most:
            raise ApiError(400, f"the request makes {count} texts; this server has room for {most}")
        if self.in_flight + count > most:
            raise ApiError(
                429,
                f"{self.in_flight} texts run or wait, and the request makes {count}; this server "
                f"has room for {most}: retry later",
                code="too_many_requests",
            )
        self.in_flight += count
        self._is_idle.clear()
        try:
            yield
        finally:
            self.in_flight -= count
            if not self.in_flight:
                self._is_idle.set()

    async def drain(self, at_once: asyncio.Event) -> None:
        """Refuse new requests, wait for the running ones, then close the engine.

        The wait ends after `drain_seconds` or when `at_once` is set. The remaining requests then
        end with the error that the engine was closed.
        """
        self.is_draining = True
        waiting = [asyncio.create_task(event.wait()) for event in (self._is_idle, at_once)]
        limit = self.options.drain_seconds
        await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await self.engine.aclose()
        for threads in (self.parsers, self.tokenisers, self.renderers):
            threads.shutdown(wait=False, cancel_futures=True)
        if self.in_flight:
            await self._is_idle.wait()

    def metrics(self) -> str:
        """The server's part of /metrics, in Prometheus' text format."""
        is_ready = not self.is_draining and not self.engine.has_ended
        return self.counters.prometheus(is_ready, self.in_flight)

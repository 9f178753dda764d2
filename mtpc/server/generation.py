"""Turns a request into choices, and runs the choices on the engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from mtpc import AsyncEngine, SamplingParams
from mtpc.engine.forced import scoring_request
from mtpc.engine.prompt_images import PromptImages
from mtpc.engine.request import Request
from mtpc.engine.text import Decode, TextAssembler
from mtpc.errors import ServingError
from mtpc.sampling_params import MAX_SEED, TokenLogprobs
from mtpc.server.answers import Piece, Unscored, Usage
from mtpc.server.chat_parser import ChatParser
from mtpc.server.conversation import Conversation
from mtpc.server.errors import ApiError, no_token_masks
from mtpc.server.grammars import Matcher

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions. A chat may use all tokens that are left."""

_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)} - {"logprobs"}
"""Fields of a request that `SamplingParams` has, too. `logprobs` has another meaning in a chat."""
Sink = Callable[[int, Piece], Awaitable[None]]
"""Receives a choice's index and its next piece."""


@dataclass(frozen=True)
class Choice:
    """One text to generate. It becomes one request of the engine.

    With `echo`, the answer begins with that text of the prompt. With log-probabilities, too,
    another request scores the prompt first. `max_tokens` is 0 only with `echo`.
    """

    index: int
    prompt_ids: list[int]
    max_tokens: int
    sampling: SamplingParams
    grammar: Matcher | None = None
    echo: str | None = None
    images: PromptImages | None = None

    @property
    def scores_prompt(self) -> bool:
        return self.echo is not None and self.sampling.logprobs is not None

    def check(self, engine: AsyncEngine, stop_ids: tuple[int, ...]) -> None:
        """Check that the engine can serve this; raises what `Engine.check` does."""
        if self.scores_prompt and not engine.engine.options.token_mask:
            raise no_token_masks("echo with logprobs", "echo")
        row = (self.prompt_ids, max(self.max_tokens, 1), stop_ids, self.sampling)
        engine.engine.check(Request(-1, *row, grammar=self.grammar, images=self.images))


@dataclass(frozen=True)
class Job:
    """All choices of a request, and the parameters that they share.

    Attributes:
        choices: the `n` choices of the first prompt, then those of the next prompts.
        prompt_tokens: tokens of all prompts together.
        num_copies: number of choices of each prompt.
        parser: makes the parser of a choice's text, or None: the text is the content.
        keeps_stop: whether a text ends with its stop string instead of before it.
        returns_ids: whether the answer has token ids.
    """

    choices: tuple[Choice, ...]
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    prompt_tokens: int
    num_copies: int
    decode: Decode
    parser: Callable[[], ChatParser] | None = None
    keeps_stop: bool = False
    returns_ids: bool = False


def make_job(
    fields: dict[str, Any],
    prompts: Sequence[list[int]],
    matchers: Sequence[Matcher],
    engine: AsyncEngine,
    max_tokens: int | None,
    chat: Conversation | None,
    images: PromptImages | None,
) -> Job:
    """Make a job, and check that the engine can serve each of its choices.

    `fields` is the result of `check_fields`. There is a grammar for each text, or none;
    `max_tokens` is the server's limit. Without `chat`, the prompts are texts to continue. Images
    are those of the only prompt.

    Raises:
        ApiError: the request asks for more tokens than the server allows, or a field needs another
            field that is missing.
        RequestError: a parameter is out of range.
        CapacityError: the page pool cannot hold the request.
    """
    sampling = _sampling(fields, engine, chat is not None)
    requested = fields.get("max_completion_tokens", fields.get("max_tokens"))
    if requested is not None and max_tokens is not None and requested > max_tokens:
        message = f"max_tokens is {requested}; this server allows at most {max_tokens}"
        raise ApiError(400, message, "max_tokens")
    stop_ids = () if fields.get("ignore_eos") else engine.served.stop_ids
    if matchers and fields.get("ignore_eos"):
        message = "ignore_eos is true; expected false where a grammar says where the text ends"
        raise ApiError(400, message, "ignore_eos")
    choices: list[Choice] = []
    grammars = iter(matchers)
    decode = engine.served.decode_keeping(chat.texts if chat else ())
    for place, prompt in enumerate(prompts):
        limit = requested
        if limit is None:
            # At least 1, so that the engine's own check reports a prompt that is too long.
            left = engine.engine.longest - len(prompt)
            usual = DEFAULT_COMPLETION_TOKENS if chat is None else left
            limit = max(min(left, max_tokens or left, usual), 1)
        given = fields["prompt"][place] if fields.get("echo") else None
        echo = decode(given) if isinstance(given, list) else given
        for number in range(fields.get("n", 1)):
            seed = None if sampling.seed is None else (sampling.seed + number) & MAX_SEED
            params = replace(sampling, seed=seed)
            row = (len(choices), prompt, limit, params, next(grammars, None), echo)
            choices.append(Choice(*row, images))
    for choice in choices[:: fields.get("n", 1)]:
        choice.check(engine, stop_ids)
    total, copies = sum(map(len, prompts)), fields.get("n", 1)
    flags = (fields.get(name, False) for name in ("include_stop_str_in_output", "return_token_ids"))
    rest = (fields.get("stop", ()), stop_ids, total, copies, decode, chat and chat.parser, *flags)
    return Job(tuple(choices), *rest)


def _sampling(fields: dict[str, Any], engine: AsyncEngine, is_chat: bool) -> SamplingParams:
    """The request's sampling parameters.

    The default temperature is 1, as OpenAI's, or 0 for a model compiled without sampling.
    """
    given = {name: value for name, value in fields.items() if name in _SAMPLING}
    given.setdefault("temperature", 1.0 if engine.engine.options.sampling else 0.0)
    logprobs = fields.get("logprobs")
    if is_chat:
        if fields.get("top_logprobs") and not logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        logprobs = fields.get("top_logprobs", 0) if logprobs else None
    return SamplingParams(logprobs=logprobs, **given)


async def run_choices(engine: AsyncEngine, job: Job, sink: Sink) -> Usage:
    """Generate all choices concurrently, and return the numbers of tokens.

    An error in one choice cancels the others. OpenAI counts a prompt once for all of its choices,
    so the cached tokens are those that none of them had to compute.

    Raises:
        ServingError: the engine failed or was closed.
        NumericsError: the model produced non-finite logits.
    """
    if len(job.choices) == 1:
        return Usage(job.prompt_tokens, *await _run_choice(engine, job, job.choices[0], sink))
    tasks = [asyncio.create_task(_run_choice(engine, job, c, sink)) for c in job.choices]
    try:
        counts = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    new, cached = zip(*counts, strict=True)
    firsts = range(0, len(cached), job.num_copies)
    reused = sum(min(cached[first : first + job.num_copies]) for first in firsts)
    return Usage(job.prompt_tokens, sum(new), reused)


async def _run_choice(engine: AsyncEngine, job: Job, choice: Choice, sink: Sink) -> tuple[int, int]:
    """Generate one choice; returns the number of new tokens, and of cached prompt tokens."""
    if choice.echo is not None:
        await sink(choice.index, await _echo(engine, choice))
        if not choice.max_tokens:
            return 0, 0
    text = TextAssembler(job.decode, job.stop, job.keeps_stop)
    parser = job.parser() if job.parser else None
    outputs = engine.generate(
        choice.prompt_ids,
        choice.max_tokens,
        stop_ids=job.stop_ids,
        sampling=choice.sampling,
        grammar=choice.grammar,
        images=choice.images,
        text=text,
    )
    counted = cached = 0
    async with aclosing(outputs):  # If the sink fails, this aborts the engine's request.
        async for output in outputs:
            reason = output.finish_reason
            if reason not in (None, "stop", "length"):
                raise ServingError(f"the engine ended the request: {reason}")
            counted, cached = counted + len(output.token_ids), output.num_cached_tokens
            piece = _piece(parser, output.text or "", output.logprobs or (), reason)
            ids = output.token_ids if job.returns_ids else ()
            await sink(choice.index, replace(piece, token_ids=ids))
    return counted, cached


async def _echo(engine: AsyncEngine, choice: Choice) -> Piece:
    """The prompt as the answer's first piece, with its log-probabilities if they are asked for."""
    assert choice.echo is not None
    reason = None if choice.max_tokens else "length"
    if not choice.scores_prompt:
        return Piece(choice.echo, (), reason)
    ids = choice.prompt_ids
    entries: list[TokenLogprobs | Unscored] = [Unscored(ids[0])]
    if len(ids) > 1:
        scored = scoring_request(ids, 1, choice.sampling.logprobs or 0, engine.served.vocab_size)
        outputs = engine.generate(
            scored.prompt_ids,
            scored.max_new_tokens,
            stop_ids=(),
            sampling=scored.sampling,
            grammar=scored.grammar,
        )
        async with aclosing(outputs):
            async for output in outputs:
                entries += output.logprobs or ()
    return Piece(choice.echo, entries, reason)


def _piece(
    parser: ChatParser | None, text: str, logprobs: Sequence[TokenLogprobs], reason: str | None
) -> Piece:
    """New text as a piece; a parser, if there is one, splits it."""
    if parser is None:
        return Piece(text, logprobs, reason)
    delta = parser.push(text, last=reason is not None)
    if reason == "stop" and parser.has_calls:
        reason = "tool_calls"
    return Piece(delta.content, logprobs, reason, delta.reasoning, tuple(delta.calls))

"""A request as choices, and the choices as pieces of text from the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from mtpc.engine.async_engine import AsyncEngine
from mtpc.engine.request import Request
from mtpc.engine.text import TextAssembler
from mtpc.errors import ServingError
from mtpc.sampling_params import MAX_SEED, SamplingParams
from mtpc.server.answers import Piece
from mtpc.server.errors import ApiError

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, for completions; a chat may use all that is left."""

Sink = Callable[[int, Piece], Awaitable[None]]
"""Takes the pieces of a choice, by its index."""


@dataclass(frozen=True)
class Choice:
    """One text to be generated."""

    index: int
    prompt_ids: list[int]
    max_tokens: int
    sampling: SamplingParams


@dataclass(frozen=True)
class Job:
    """All choices of a request, and what they share."""

    choices: tuple[Choice, ...]
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    prompt_tokens: int


def make_job(
    fields: dict[str, Any],
    prompts: Sequence[list[int]],
    engine: AsyncEngine,
    is_chat: bool,
    max_tokens: int | None,
) -> Job:
    """A job whose every choice the engine will take.

    Args:
        fields: as `check_fields` gives them.
        prompts: token ids of each prompt.
        engine: whose.
        is_chat: how long an answer may get where the client does not say.
        max_tokens: the server's own limit.

    Raises:
        ApiError: more tokens than the server allows, or a field that needs another one.
        RequestError: parameters out of range.
        CapacityError: longer than the pool of pages.
    """
    sampling = _sampling(fields, engine, is_chat)
    asked = fields.get("max_completion_tokens", fields.get("max_tokens"))
    if asked is not None and max_tokens is not None and asked > max_tokens:
        raise ApiError(400, f"max_tokens is {asked}; this server gives {max_tokens}", "max_tokens")
    stop_ids = () if fields.get("ignore_eos") else engine.served.stop_ids
    choices: list[Choice] = []
    for prompt in prompts:
        limit = asked or _default_tokens(len(prompt), engine, is_chat, max_tokens)
        for number in range(fields.get("n", 1)):
            seed = None if sampling.seed is None else (sampling.seed + number) & MAX_SEED
            choices.append(Choice(len(choices), prompt, limit, replace(sampling, seed=seed)))
    for choice in choices[:: fields.get("n", 1)]:
        params = choice.sampling
        request = Request(-1, choice.prompt_ids, choice.max_tokens, stop_ids, sampling=params)
        engine.engine.check(request)
    total = sum(len(prompt) for prompt in prompts)
    return Job(tuple(choices), fields.get("stop", ()), stop_ids, total)


def _default_tokens(
    prompt_tokens: int, engine: AsyncEngine, is_chat: bool, max_tokens: int | None
) -> int:
    """What max_len and the pool leave, or less; at least one: the engine says what is wrong."""
    left = engine.engine.longest - prompt_tokens
    limits = [left, max_tokens or left, left if is_chat else DEFAULT_COMPLETION_TOKENS]
    return max(min(limits), 1)


_SAMPLING = (
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
)


def _sampling(fields: dict[str, Any], engine: AsyncEngine, is_chat: bool) -> SamplingParams:
    """OpenAI's temperature is 1 unless said otherwise; a model compiled without sampling has 0."""
    given = {name: fields[name] for name in _SAMPLING if name in fields}
    default = 1.0 if engine.engine.options.sampling else 0.0
    logprobs = fields.get("logprobs")
    if is_chat:
        if "top_logprobs" in fields and not logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        logprobs = fields.get("top_logprobs", 0) if logprobs else None
    temperature = fields.get("temperature", default)
    return SamplingParams(temperature=temperature, logprobs=logprobs, **given)


async def run_choices(engine: AsyncEngine, job: Job, sink: Sink) -> int:
    """Generate all choices at once; returns the number of new tokens.

    An error of one ends the others; so does cancellation.

    Raises:
        ServingError: the engine failed or was closed.
        NumericsError: the model produced non-finite logits.
    """
    if len(job.choices) == 1:
        return await _run_choice(engine, job, job.choices[0], sink)
    tasks = [asyncio.create_task(_run_choice(engine, job, c, sink)) for c in job.choices]
    try:
        return sum(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_choice(engine: AsyncEngine, job: Job, choice: Choice, sink: Sink) -> int:
    text = TextAssembler(engine.served.decode, job.stop)
    outputs = engine.generate(
        choice.prompt_ids,
        choice.max_tokens,
        stop_ids=job.stop_ids,
        sampling=choice.sampling,
        text=text,
    )
    counted = 0
    async with aclosing(outputs):  # Also where the sink fails: the request must not outlive it.
        async for output in outputs:
            reason = output.finish_reason
            if reason not in (None, "stop", "length"):
                raise ServingError(f"the engine ended the request: {reason}")
            # Tokens that a step emitted behind a stop string are nobody's.
            logprobs = (output.logprobs or ())[: text.num_tokens - counted]
            counted = text.num_tokens
            await sink(choice.index, Piece(output.text or "", logprobs, reason))
    return counted

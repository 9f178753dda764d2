"""What `generate` returns: the new text or the new token ids, and how they came about."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mtpc.engine.request import FinishReason
from mtpc.engine.stream import Output
from mtpc.sampling_params import TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor


class _Facts:
    """The fields of both kinds of completions.

    Attributes:
        finish_reason: why it ended: "length", "stop" (a stop id or stop string), or "aborted" (by
            `Engine.abort`).
        logprobs: one entry per token if the parameters ask for log-probabilities, else None.
        hidden_states: see `mtpc.engine.stream.Output`.
        first_token_s: seconds from the call to the first new token.
        total_s: seconds from the call to the end.
    """

    finish_reason: FinishReason = "aborted"
    logprobs: list[TokenLogprobs] | None = None
    hidden_states: Tensor | None = None
    first_token_s: float = 0.0
    total_s: float = 0.0


class Completion(_Facts, str):
    """The new text of a text prompt. It is a `str`, so it can be used as one.

    Attributes:
        token_ids: all new tokens. They include a stop token, or those of a stop string up to the
            one that completes it.
    """

    token_ids: list[int]

    @property
    def text(self) -> str:
        return str(self)


class TokenCompletion(_Facts, list[int]):
    """The new token ids of a prompt of ids, a stop token included. It is a `list`."""

    @property
    def token_ids(self) -> list[int]:
        return list(self)


class Collector:
    """Puts the outputs of one prompt, text or token ids, together."""

    def __init__(self, is_text: bool):
        self._is_text, self._start_s = is_text, time.perf_counter()
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._facts = _Facts()

    def add(self, output: Output) -> None:
        facts, seconds = self._facts, time.perf_counter() - self._start_s
        if output.token_ids and not self._token_ids:
            facts.first_token_s = seconds
        facts.total_s = seconds
        self._token_ids += output.token_ids
        self._texts.append(output.text or "")
        if output.logprobs is not None:
            facts.logprobs = (facts.logprobs or []) + output.logprobs
        facts.hidden_states = output.hidden_states
        facts.finish_reason = output.finish_reason or facts.finish_reason

    def completion(self) -> Completion | TokenCompletion:
        made: Completion | TokenCompletion
        if self._is_text:
            made = Completion("".join(self._texts))
            made.token_ids = self._token_ids
        else:
            made = TokenCompletion(self._token_ids)
        vars(made).update(vars(self._facts))
        return made

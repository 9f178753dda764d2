"""Sampling parameters of a request. This module does not import torch.

docs/sampling.md defines each field, and the order in which the step applies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from secrets import randbits
from typing import Any

from mtpc.errors import RequestError
from mtpc.option_checks import check_int

MAX_LOGIT_BIAS = 256
"""The largest number of entries of a request's logit_bias."""
MAX_SEED = 2**63 - 1
MIN_TEMPERATURE = 1e-3
"""Below this, sampling practically is the argmax, and divided logits overflow."""

FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Columns of `state.sampling_floats`."""
INTS = ("seed", "top_k", "first_stop", "masked", "penalised", "logprobs")
"""Columns of `state.sampling_ints`. `first_stop` is the first position that may hold a stop token.
`logprobs` is how many of the most probable tokens to report, or -1 to report nothing."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request; the default is greedy decoding.

    Attributes:
        temperature: 0 decodes greedily; otherwise 0.001..1000, the logits are divided by it.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the most probable tokens whose probabilities reach this sum, in (0, 1].
        min_p: keep tokens whose probability is at least this fraction of the largest one, 0..1.
        seed: seed of the random numbers, 0..2**63 - 1; None draws one. The same seed and prompt
            give the same text, for any batch and any number of drafts.
        logprobs: report the log-probability of each emitted token and of this many most probable
            tokens, under the model's own distribution; None reports nothing.
        repetition_penalty: in (0, 10]. Positive logits of tokens in the prompt or the output are
            divided by it, and negative ones multiplied.
        presence_penalty: subtracted from the logits of tokens in the output, -2..2.
        frequency_penalty: subtracted once for each occurrence of the token in the output, -2..2.
        logit_bias: token id -> number that is added to its logit, -100..100; at most
            MAX_LOGIT_BIAS entries.
        allowed_ids: only these tokens may be emitted; None allows all.
        banned_ids: these tokens may not be emitted.
        min_tokens: no stop token is emitted before this many new tokens.
        stop_token_ids: these tokens end the text, in addition to the model's end-of-sequence ids.

    Raises:
        RequestError: a value is of the wrong type or out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    banned_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, 1000)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature is {self.temperature}; expected 0 (greedy) or at least "
                f"{MIN_TEMPERATURE}"
            )
        _check_number("top_p", self.top_p, 0, 1, above=True)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0, 10, above=True)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        check_int("top_k", self.top_k, 0, 2**31 - 1, RequestError)
        check_int("min_tokens", self.min_tokens, 0, 2**31 - 1, RequestError)
        if self.seed is not None:
            check_int("seed", self.seed, 0, MAX_SEED, RequestError)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, 2**31 - 1, RequestError)
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        for name in ("banned_ids", "stop_token_ids"):
            object.__setattr__(self, name, _id_row(name, getattr(self, name)))
        if self.allowed_ids is not None:
            allowed = _id_row("allowed_ids", self.allowed_ids)
            if not set(allowed) - set(self.banned_ids):
                raise RequestError(
                    "allowed_ids leaves no token after banned_ids are removed; expected at least "
                    "one"
                )
            object.__setattr__(self, "allowed_ids", allowed)

    @property
    def is_plain(self) -> bool:
        """Whether this is plain greedy decoding, which every program can do."""
        return replace(self, seed=None, stop_token_ids=()) == SamplingParams()

    @property
    def has_penalties(self) -> bool:
        """Whether penalties change the logits of tokens in the prompt or the output."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    @property
    def has_mask(self) -> bool:
        """Whether some tokens must not be emitted."""
        return self.allowed_ids is not None or bool(self.banned_ids)

    def named_ids(self) -> Iterable[tuple[str, int]]:
        """All token ids of these parameters, each with the name of its field."""
        yield from (("logit_bias", token_id) for token_id in dict(self.logit_bias))
        yield from (("allowed_ids", token_id) for token_id in self.allowed_ids or ())
        yield from (("banned_ids", token_id) for token_id in self.banned_ids)

    def settled(self) -> SamplingParams:
        """These parameters with a seed, so that a request that runs again gives the same text."""
        return self if self.seed is not None else replace(self, seed=randbits(63))


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities under the model's own distribution, before penalties and temperature.

    Attributes:
        token_id: the emitted token.
        logprob: its natural log-probability.
        top: (token id, log-probability) of the most probable tokens, the most probable first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def _check_number(name: str, value: Any, low: float, high: float, above: bool = False) -> None:
    """Check that a value is a finite number in low..high; `above` excludes low itself."""
    wanted = f"a number in {'(' if above else '['}{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} is {value!r} ({type(value).__name__}); expected {wanted}")
    # A NaN fails every comparison.
    if not low <= value <= high or (above and value == low):
        raise RequestError(f"{name} is {value}; expected {wanted}")


def _id_row(name: str, ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise RequestError(f"{name} is {ids!r}; expected token ids, such as (1, 2)")
    row = tuple(ids)
    for token_id in row:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestError(f"{name} has {token_id!r}; expected token ids (integers)")
    return tuple(sorted({int(token_id) for token_id in row}))


def _bias_pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = dict(bias)
    except (TypeError, ValueError):
        raise RequestError(
            f"logit_bias is {bias!r}; expected numbers by token id, such as {{7: 1.5}}"
        ) from None
    ids = _id_row("logit_bias", pairs)
    if len(ids) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(ids)} entries; expected at most {MAX_LOGIT_BIAS}")
    for value in pairs.values():
        _check_number("a value of logit_bias", value, -100, 100)
    return tuple((token_id, float(pairs[token_id])) for token_id in ids)

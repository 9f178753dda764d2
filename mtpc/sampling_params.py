"""How a request's tokens are chosen. Imports no torch: servers form these at their front door.

docs/sampling.md says what each field means and in which order they act.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from secrets import randbits
from typing import Any

from mtpc.errors import RequestError

MAX_LOGIT_BIAS = 256
"""Entries that a request's logit_bias may have."""
MAX_SEED = 2**63 - 1
MIN_TEMPERATURE = 1e-3
"""Below this the distribution is the argmax in all but name, and quotients overflow."""

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
"""Columns of `state.sampling_ints`. `first_stop`: position from which stop tokens may stand;
`logprobs`: how many of the most probable tokens to report, -1 to report nothing."""


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen; the default is greedy decoding.

    Attributes:
        temperature: 0 is greedy; else the logits are divided by it, 0.001..1000.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the most probable tokens that together reach this mass, in (0, 1].
        min_p: keep tokens at least this many times as probable as the most probable one, 0..1.
        seed: 0..2**63 - 1, of the random numbers; None draws one. The same seed and prompt give
            the same text, whatever runs beside the request and however many drafts are made.
        logprobs: report the log-probability of each emitted token and of this many most probable
            ones, under the model's own distribution; None reports none.
        repetition_penalty: logits of tokens in prompt or output are divided by it where positive,
            multiplied where negative; in (0, 10].
        presence_penalty: subtracted from logits of tokens in the output, -2..2.
        frequency_penalty: subtracted as often as the token is in the output, -2..2.
        logit_bias: added to logits by token id, -100..100; at most MAX_LOGIT_BIAS entries.
        allowed_ids: only these may be emitted; None allows all.
        banned_ids: these may not be emitted.
        min_tokens: no stop token before this many new tokens.
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
        _check_int("top_k", self.top_k, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 2**31 - 1)
        if self.seed is not None:
            _check_int("seed", self.seed, MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 2**31 - 1)
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        object.__setattr__(self, "banned_ids", _id_row("banned_ids", self.banned_ids))
        if self.allowed_ids is not None:
            allowed = _id_row("allowed_ids", self.allowed_ids)
            if not set(allowed) - set(self.banned_ids):
                raise RequestError(
                    "allowed_ids leaves no token once banned_ids are taken out; allow at least one"
                )
            object.__setattr__(self, "allowed_ids", allowed)

    @property
    def is_plain(self) -> bool:
        """Whether this is greedy decoding as any program does it: only the seed may differ."""
        return replace(self, seed=None) == SamplingParams()

    @property
    def has_penalties(self) -> bool:
        """Whether choices depend on what was said before, other than through the model."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    @property
    def has_mask(self) -> bool:
        """Whether some tokens may never be emitted."""
        return self.allowed_ids is not None or bool(self.banned_ids)

    def named_ids(self) -> Iterable[tuple[str, int]]:
        """All token ids in here, with the field they stand in."""
        yield from (("logit_bias", token_id) for token_id, _ in dict(self.logit_bias).items())
        yield from (("allowed_ids", token_id) for token_id in self.allowed_ids or ())
        yield from (("banned_ids", token_id) for token_id in self.banned_ids)

    def settled(self) -> SamplingParams:
        """These with a seed: drawn once, so that a request that is run again says the same."""
        return self if self.seed is not None else replace(self, seed=randbits(63))


@dataclass(frozen=True)
class TokenLogprobs:
    """An emitted token under the model's own distribution: before penalties and temperature.

    Attributes:
        token_id: the token.
        logprob: its natural log-probability.
        top: the most probable ids with theirs, the most probable first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def _check_number(name: str, value: Any, low: float, high: float, above: bool = False) -> None:
    """A finite number in low..high; `above` excludes low."""
    wanted = f"a number in {'(' if above else '['}{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} is {value!r} ({type(value).__name__}); expected {wanted}")
    # A NaN fails every comparison.
    if not low <= value <= high or (above and value == low):
        raise RequestError(f"{name} is {value}; expected {wanted}")


def _check_int(name: str, value: Any, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(
            f"{name} is {value!r} ({type(value).__name__}); expected an integer in 0..{high}"
        )
    if not 0 <= value <= high:
        raise RequestError(f"{name} is {value}; expected an integer in 0..{high}")


def _id_row(name: str, ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise RequestError(f"{name} is {ids!r}; expected token ids, as (1, 2)")
    row = tuple(ids)
    for token_id in row:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestError(f"{name} has {token_id!r}; expected token ids (integers)")
    return tuple(sorted({int(token_id) for token_id in row}))


def _bias_pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = dict(bias)
    except (TypeError, ValueError):
        raise RequestError(f"logit_bias is {bias!r}; expected numbers by token id") from None
    ids = _id_row("logit_bias", pairs)
    if len(ids) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(ids)} entries; at most {MAX_LOGIT_BIAS} are supported"
        )
    for value in pairs.values():
        _check_number("a value of logit_bias", value, -100, 100)
    return tuple((token_id, float(pairs[token_id])) for token_id in ids)

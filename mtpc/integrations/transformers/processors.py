"""Translates transformers' logits processors into sampling parameters.

`generate` passes one list: the processors that it makes from the GenerationConfig, and the user's
own. The classes in `READERS` are translated into fields of `SamplingParams`; other classes are
refused by name. The step applies bias, repetition penalty, temperature and filters in this order,
so the list must have the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import generation

from mtpc import SamplingParams
from mtpc.errors import RequestError

MASK, BIAS, REPETITION, TEMPERATURE, TOP_K, TOP_P, MIN_P, NORMALISED = range(8)
"""Stages, in the step's order. A mask may come at any place before the first filter (`TOP_K`)."""


@dataclass
class Wanted:
    """The parameters that the processors ask for.

    Attributes:
        length: length of the prompt tensor, including padding.
        padding: int64 [rows], the number of padding tokens at the left of each row.
        stop_ids: end-of-sequence ids.
        params: fields of `SamplingParams` so far.
        banned: ids that must not be emitted.
        min_tokens: number of new tokens before which no end-of-sequence token is allowed.
    """

    length: int
    padding: Tensor
    stop_ids: tuple[int, ...]
    params: dict[str, Any] = field(default_factory=dict)
    banned: set[int] = field(default_factory=set)
    min_tokens: int = 0


def _bias(processor: Any, wanted: Wanted) -> None:
    """Read a bias of single tokens. Bad words have the bias -inf, which bans a token."""
    is_bad_words = isinstance(processor, generation.NoBadWordsLogitsProcessor)
    name = "bad_words_ids" if is_bad_words else "sequence_bias"
    bias: Mapping[tuple[int, ...], float] = processor.sequence_bias
    finite: dict[int, float] = {}
    for ids, value in bias.items():
        if len(ids) != 1:
            raise RequestError(
                f"{name} has the sequence {tuple(ids)}; mtpc takes single ids, because the step's "
                "bias does not depend on previous tokens: leave longer sequences out"
            )
        if value == -math.inf:
            wanted.banned.add(int(ids[0]))
        else:
            finite[int(ids[0])] = float(value)
    if finite:
        wanted.params["logit_bias"] = finite


def _repetition(processor: Any, wanted: Wanted) -> None:
    ignored = processor.prompt_ignore_length
    if isinstance(ignored, Tensor):
        ignored = None if torch.equal(ignored.cpu().long(), wanted.padding) else ignored
    if ignored is not None:
        raise RequestError(
            f"RepetitionPenaltyLogitsProcessor has prompt_ignore_length {ignored}; the step's "
            "penalty covers the whole prompt and the output: leave it None"
        )
    wanted.params["repetition_penalty"] = float(processor.penalty)


def _minimum(processor: Any, wanted: Wanted, count: int) -> None:
    """Allow no end-of-sequence token before `count` new tokens."""
    if count <= 0:
        return
    ids = set(processor.eos_token_id.tolist())
    if ids != set(wanted.stop_ids):
        raise RequestError(
            f"{type(processor).__name__} holds back the ids {sorted(ids)}, rows end with "
            f"{sorted(wanted.stop_ids)}; expected the same ids: give the processor the latter"
        )
    wanted.min_tokens = max(wanted.min_tokens, count)


def _min_length(processor: Any, wanted: Wanted) -> None:
    _minimum(processor, wanted, processor.min_length - wanted.length)


def _min_new_tokens(processor: Any, wanted: Wanted) -> None:
    skipped = processor.prompt_length_to_skip
    _minimum(processor, wanted, skipped + processor.min_new_tokens - wanted.length)


def _suppress(processor: Any, wanted: Wanted) -> None:
    wanted.banned |= {int(token_id) for token_id in processor.suppress_tokens}


def _number(name: str, kind: Callable[[Any], Any]) -> Callable[[Any, Wanted], None]:
    """Make a reader of one number. It refuses filters with other than the usual arguments."""

    def read(processor: Any, wanted: Wanted) -> None:
        value = getattr(processor, "filter_value", -math.inf)
        kept = getattr(processor, "min_tokens_to_keep", 1)
        if value != -math.inf or (kept != 1 and name != "top_k"):
            raise RequestError(
                f"{type(processor).__name__} has filter_value {value} and min_tokens_to_keep "
                f"{kept}; mtpc takes -inf and 1: leave them at their defaults"
            )
        wanted.params[name] = kind(getattr(processor, name))

    return read


def _nothing(processor: Any, wanted: Wanted) -> None:
    """Read nothing: this processor changes neither the argmax nor the distribution."""


READERS: dict[type, tuple[int, Callable[[Any, Wanted], None]]] = {
    generation.NoBadWordsLogitsProcessor: (MASK, _bias),
    generation.SuppressTokensLogitsProcessor: (MASK, _suppress),
    generation.MinLengthLogitsProcessor: (MASK, _min_length),
    generation.MinNewTokensLengthLogitsProcessor: (MASK, _min_new_tokens),
    generation.SequenceBiasLogitsProcessor: (BIAS, _bias),
    generation.RepetitionPenaltyLogitsProcessor: (REPETITION, _repetition),
    generation.TemperatureLogitsWarper: (TEMPERATURE, _number("temperature", float)),
    generation.TopKLogitsWarper: (TOP_K, _number("top_k", int)),
    generation.TopPLogitsWarper: (TOP_P, _number("top_p", float)),
    generation.MinPLogitsWarper: (MIN_P, _number("min_p", float)),
    generation.LogitNormalization: (NORMALISED, _nothing),
}
"""For each exact class (a subclass may do anything) its stage and its reader."""
_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def sampling_params(
    processors: Sequence[Any], wanted: Wanted, do_sample: bool, max_new_tokens: int
) -> SamplingParams:
    """Translate processors into the parameters of a request, without a seed.

    Args:
        processors: the processors of `generate` and of the user, in order.
        wanted: facts about the batch; the processors' parameters are added to it.
        do_sample: whether to sample. If not, the most probable token is chosen, and parameters that
            only concern sampling are dropped.
        max_new_tokens: upper limit of the minimum number of tokens.

    Raises:
        RequestError: a processor's class is unknown, the order differs from the step's, or a number
            is out of range.
    """
    stage = MASK
    for processor in processors:
        if type(processor) not in READERS:
            known = ", ".join(sorted(kind.__name__ for kind in READERS))
            raise RequestError(
                f"the logits processor {type(processor).__name__} cannot run inside the step; "
                f"expected one of: {known}"
            )
        own, read = READERS[type(processor)]
        is_late = stage >= TOP_K if own == MASK else own <= stage
        if is_late:
            raise RequestError(
                f"{type(processor).__name__} stands after {_name_of(stage)}; the step applies "
                "each once, in this order: "
                + ", ".join(_name_of(s) for s in range(BIAS, NORMALISED + 1))
                + "; set its field of GenerationConfig instead"
            )
        stage = max(stage, own)
        read(processor, wanted)
    params = dict(wanted.params)
    if not do_sample:
        params = {name: value for name, value in params.items() if name not in _OF_SAMPLING}
    elif params.get("top_p", 1.0) < 1 and params.get("min_p", 0.0) > 0:
        raise RequestError(
            "top_p and min_p are both given; transformers applies top_p first, the step min_p "
            "first, which keeps other tokens: give one of them"
        )
    params.setdefault("temperature", 1.0 if do_sample else 0.0)
    params["banned_ids"] = tuple(wanted.banned)
    params["min_tokens"] = min(wanted.min_tokens, max_new_tokens)
    try:
        return SamplingParams(**params)
    except RequestError as error:
        raise RequestError(f"{error} (sequence_bias is logit_bias here)") from None


def _name_of(stage: int) -> str:
    return next(kind.__name__ for kind, (own, _) in READERS.items() if own == stage)

"""The arguments of `generate` and `stream`: one prompt or several, with parameters for each."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from mtpc.arguments import SamplingArguments
from mtpc.engine.admission import UNORDERED, kind_of, shown, token_ids
from mtpc.errors import RequestError
from mtpc.sampling_params import SamplingParams
from mtpc.weights.served_model import ServedModel

if TYPE_CHECKING:
    from mtpc.engine.grammar import Grammar

Prompt = str | Sequence[int] | torch.Tensor | Sequence[Mapping[str, Any]]
"""A text, token ids, or a conversation's messages."""


class GenerateArguments(SamplingArguments, total=False):
    """Keyword arguments of `mtpc.SpecModel.generate`, which says what each means."""

    stop_ids: Sequence[int] | None
    ignore_eos: bool
    stop: str | Sequence[str] | None
    sampling: SamplingParams | Sequence[SamplingParams] | None
    grammar: Grammar | Sequence[Grammar | None] | None


_OTHER_NAMES = {
    "max_new_tokens": ("max_tokens", "max_completion_tokens", "max_length", "num_predict"),
    "stop_ids": ("eos_token_id", "eos_token_ids"),
    "ignore_eos": ("ignore_eos_token",),
    "stop": ("stop_strings", "stop_sequences", "stop_words"),
    "sampling": ("sampling_params", "generation_config", "params"),
    "grammar": ("response_format", "guided_json", "guided_grammar", "structured_outputs"),
    "temperature": ("temp", "do_sample"),
    "repetition_penalty": ("repeat_penalty",),
    "min_tokens": ("min_new_tokens", "min_length"),
    "seed": ("random_seed", "manual_seed", "generator"),
    "logprobs": ("top_logprobs", "num_logprobs", "output_logprobs", "output_scores"),
    "allowed_ids": ("allowed_token_ids",),
    "banned_ids": ("bad_words_ids", "suppress_tokens", "bad_words"),
}
"""What other libraries call an argument."""


def is_single(prompts: Any) -> bool:
    """Whether `prompts` is one prompt: text, a list of ids or messages, or a tensor [length].

    Raises:
        RequestError: `prompts` is neither a prompt nor a sequence.
    """
    if isinstance(prompts, str):
        return True
    is_scalar = isinstance(prompts, torch.Tensor) and prompts.dim() == 0
    if is_scalar or isinstance(prompts, UNORDERED) or not hasattr(prompts, "__len__"):
        found = "None" if prompts is None else kind_of(prompts)
        raise RequestError(f"prompts is {found}; expected text, token ids, or a list of prompts")
    if isinstance(prompts, torch.Tensor):
        return prompts.dim() == 1
    return len(prompts) > 0 and isinstance(prompts[0], (numbers.Integral, Mapping))


def is_conversation(prompt: Any) -> bool:
    is_row = isinstance(prompt, (list, tuple))
    return is_row and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or is_conversation(prompt)


def end_ids(
    served: ServedModel, stop_ids: Sequence[int] | None, ignore_eos: bool
) -> tuple[int, ...]:
    """The ids that end a continuation: those that are given, else the model's, or none."""
    if stop_ids is not None:
        return tuple(token_ids("stop_ids", stop_ids))
    return () if ignore_eos else served.stop_ids


def encode(served: ServedModel, prompt: Any) -> list[int]:
    """The token ids of one prompt.

    Raises:
        RequestError: the prompt is neither text nor token ids; it is text with a lone surrogate,
            which no tokenizer takes; or the checkpoint has no tokenizer.
    """
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt has {prompt[error.start]!r} at character {error.start}, a lone "
                "surrogate, which is no text; decode it with errors='replace'"
            ) from None
        return served.encode(prompt)
    if isinstance(prompt, torch.Tensor) and prompt.dim() != 1:
        shape = tuple(prompt.shape)
        raise RequestError(f"a prompt tensor has shape {shape}; expected [length]")
    try:
        return token_ids("it", prompt)
    except RequestError as error:
        kind = kind_of(prompt)
        raise RequestError(f"a prompt is neither text nor token ids, but {kind}: {error}") from None


def sampling_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    params: Mapping[str, Any],
    count: int,
) -> list[SamplingParams]:
    """The sampling parameters of each of `count` prompts.

    `sampling` is for all prompts, or has one for each; None is greedy. `params` are fields of
    `SamplingParams` for all prompts, instead of it.

    Raises:
        RequestError: a name in `params` is unknown; both `sampling` and `params` are given;
            `sampling` is something else; or the number of parameters is not `count`.
    """
    known = ["max_new_tokens", *GenerateArguments.__annotations__]
    for name in params.keys() - set(known):
        other = next((right for right, names in _OTHER_NAMES.items() if name in names), None)
        near = difflib.get_close_matches(name, known, n=1)
        if other is not None:
            hint = f"use {other}"
        else:
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise RequestError(f"unknown argument {name!r}; {hint}")
    if params:
        if sampling is not None:
            raise RequestError(
                f"sampling was given, and {next(iter(params))} too; give one of them"
            )
        sampling = SamplingParams(**params)
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if isinstance(sampling, str) or not isinstance(sampling, Sequence):
        raise RequestError(
            f"sampling is {shown(sampling)}; expected mtpc.SamplingParams, or a list with one for "
            "each prompt"
        )
    each = list(sampling)
    if len(each) != count:
        raise RequestError(
            f"{len(each)} sampling parameters for {count} prompts; give one for each"
        )
    return each


def grammar_each(
    grammar: Grammar | Sequence[Grammar | None] | None, count: int
) -> list[Grammar | None]:
    """The grammar of each of `count` prompts, or None.

    Raises:
        RequestError: the number of grammars is not `count`; or two prompts have the same object,
            which can follow only one text.
    """
    if not isinstance(grammar, list | tuple):
        each: list[Grammar | None] = [cast("Grammar | None", grammar)] * count
    elif len(grammar) == count:
        each = list(grammar)
    else:
        raise RequestError(
            f"{len(grammar)} grammars for {count} prompts; give one, or None, for each"
        )
    objects = [id(one) for one in each if one is not None]
    if len(set(objects)) < len(objects):
        raise RequestError(
            "several prompts have the same grammar, which follows one text; give each its own"
        )
    return each

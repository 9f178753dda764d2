"""The arguments of `generate` and `stream`: one prompt or several, with parameters for each."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

import torch

from mtpc.engine.grammar import Grammar
from mtpc.errors import RequestError
from mtpc.sampling_params import SamplingParams

Prompt = str | Sequence[int] | torch.Tensor


def is_single(prompts: Any) -> bool:
    """Whether `prompts` is one prompt: a text, a list of ids, or a one-dimensional tensor."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, torch.Tensor):
        return prompts.dim() == 1
    return len(prompts) > 0 and isinstance(prompts[0], numbers.Integral)


def sampling_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, params: dict[str, Any], count: int
) -> list[SamplingParams]:
    """The sampling parameters of each of `count` prompts.

    Args:
        sampling: parameters for all prompts, or one for each; None is greedy.
        params: fields of `SamplingParams` for all prompts, instead of `sampling`.
        count: number of prompts.

    Raises:
        RequestError: a name in `params` is unknown; both `sampling` and `params` are given; or
            the number of parameters is not `count`.
    """
    if params:
        known = [field.name for field in fields(SamplingParams)]
        for name in params:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise RequestError(f"unknown sampling parameter {name!r}; {hint}")
        if sampling is not None:
            raise RequestError(
                f"sampling was given, and {next(iter(params))} too; give one of them"
            )
        sampling = SamplingParams(**params)
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
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

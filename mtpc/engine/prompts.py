"""What `generate` and `stream` are given: one prompt or several, and what each is to have."""

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
    """Whether `prompts` is one prompt: text, a row of ids, or a one-dimensional tensor."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, torch.Tensor):
        return prompts.dim() == 1
    return len(prompts) > 0 and isinstance(prompts[0], numbers.Integral)


def sampling_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, params: dict[str, Any], count: int
) -> list[SamplingParams]:
    """Sampling parameters for each of `count` prompts, of `sampling` or of single `params`.

    Raises:
        RequestError: a parameter is unknown; both were given; or there are not `count`.
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
    """A grammar, or none, for each of `count` prompts.

    Raises:
        RequestError: there are not `count`, or one is there twice: it stands behind one text.
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

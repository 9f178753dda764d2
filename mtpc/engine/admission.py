"""Checks that an otherwise idle engine can serve a request. `scheduler` decides when it runs."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch

from mtpc.engine.request import Request
from mtpc.engine.sampling_rows import check_sampling
from mtpc.errors import CapacityError, RequestError
from mtpc.layout import MAX_STOP_IDS, PROMPT_EMBEDS, ROPE_OFFSETS
from mtpc.option_checks import check_int
from mtpc.plan import Plan
from mtpc.program.program import Program
from mtpc.weights.served_model import ServedModel

UNORDERED = (bytes, bytearray, Mapping, Set)
"""No rows of token ids, though some can be iterated over."""


def longest_request(options: Plan, num_pages: int) -> int:
    """The most tokens that a request may have, counting its prompt and its new tokens."""
    room = num_pages * options.page_size - 2 * options.spec_tokens
    return min(options.max_len, room)


def usable_ends(served: ServedModel, fallbacks: Counter[str]) -> ServedModel:
    """A model without the end-of-sequence ids that its vocabulary lacks. `fallbacks` counts a
    reason for each.

    Files may name such ids. They end no text, and a tensor might not hold them.
    """
    ends = tuple(i for i in served.stop_ids if _is_token(i, served.vocab_size))
    for token_id in served.stop_ids:
        if token_id not in ends:
            fallbacks[
                f"no end of text at the end-of-sequence id {token_id!r}: it is outside the "
                f"vocabulary of {served.vocab_size} ids"
            ] += 1
    return served if ends == served.stop_ids else replace(served, stop_ids=ends)


def check_request(request: Request, options: Plan, vocab_size: int, num_pages: int) -> None:
    """Refuse a request that can never be served. `num_pages` counts those of the pool, used or
    free.

    Raises:
        RequestError: a field does not meet the conditions that `Engine.add` lists.
        CapacityError: the page pool cannot hold the request even when it is empty.
    """
    if not request.prompt_ids:
        raise RequestError("the prompt is empty; expected at least one token")
    _check_ids("prompt id", request.prompt_ids, vocab_size)
    length, new, limit = len(request.prompt_ids), request.max_new_tokens, options.max_len
    check_int("max_new_tokens", new, 1, refusal=RequestError)
    if length + new > limit:
        raise RequestError(
            f"prompt of {length} + max_new_tokens {new} = {length + new} tokens; "
            f"max_len is {limit}: shorten it, or compile with a larger max_len"
        )
    if request.on_output is not None and not callable(request.on_output):
        raise RequestError(f"on_output is {request.on_output!r}; expected a callable or None")
    check_sampling(request, options, vocab_size)
    _check_ids("stop_ids has", request.stop_ids, vocab_size)
    _check_ids("stop_token_ids has", request.sampling.stop_token_ids, vocab_size)
    if len(request.ends) > MAX_STOP_IDS:
        raise RequestError(f"{len(request.ends)} stop ids; at most {MAX_STOP_IDS} are supported")
    if request.grammar is not None:
        from mtpc.engine.grammar_rows import check_grammar  # Not above: few requests have one.

        check_grammar(request, options)
    pages = options.blocks_per_request(length + new)
    if pages > num_pages:
        raise CapacityError(
            f"a request of {length + new} tokens needs {pages} pages of {options.page_size} "
            f"tokens, the pool has {num_pages}: raise num_pages"
        )


def check_images(request: Request, program: Program) -> None:
    """Refuse a request whose images a program cannot take.

    Raises:
        RequestError: the program was compiled without images, or they do not fit.
    """
    images = request.images
    if images is None:
        return
    from mtpc.engine.prompt_images import PromptImages  # Not above: few requests have images.

    if not isinstance(images, PromptImages):
        raise RequestError(f"images is a {type(images).__name__}; expected mtpc's PromptImages")
    if PROMPT_EMBEDS not in program.shared:
        raise RequestError("the prompt has images; compile the model with images=True")
    offsets = program.shared.get(ROPE_OFFSETS)
    grids = 0 if offsets is None else offsets.shape[2]
    images.check(len(request.prompt_ids), program.shared[PROMPT_EMBEDS], grids)


def _is_token(value: object, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _check_ids(what: str, ids: Sequence[object], vocab_size: int) -> None:
    invalid = [i for i in ids if not _is_token(i, vocab_size)]
    if invalid:
        raise RequestError(f"{what} {invalid[0]!r}; expected ids in 0..{vocab_size - 1}")


def token_ids(name: str, ids: Any) -> list[int]:
    """The ids of an argument as a list of integers. `check_request` looks at their range.

    Raises:
        RequestError: `ids` is no sequence of integers. The message begins with `name`.
    """
    values = ids.tolist() if isinstance(ids, torch.Tensor) and ids.dim() == 1 else ids
    if isinstance(values, (str, *UNORDERED)) or not isinstance(values, Iterable):
        raise RequestError(f"{name} is {shown(ids)}; expected token ids, such as [1, 2]")
    return [_token_id(name, token_id) for token_id in values]


def _token_id(name: str, token_id: Any) -> int:
    try:
        if isinstance(token_id, bool):
            raise TypeError
        return operator.index(token_id)
    except TypeError:
        found = f"{shown(token_id)}, {kind_of(token_id)}"
        raise RequestError(f"{name} has {found}; expected token ids (integers)") from None


def kind_of(value: Any) -> str:
    """A value's type in a message, with its article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

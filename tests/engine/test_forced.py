"""Log-probabilities of given tokens: transformers' own, for every K, in any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.oracles import Oracle
from helpers.records import MASKED
from helpers.schedules import PRESSED
from helpers.theorem import PROMPTS
from helpers.uncached import logits_of

from mtpc.errors import RequestError

TEXTS = [[*PROMPTS[5], 31, 1, 63], PROMPTS[2] + PROMPTS[8][:9], [3, 4]]
"""One holds the end-of-sequence id, and bit 31 of a mask's word is among the tokens."""


def by_transformers(plain: Oracle, ids: list[int]) -> tuple[list[float], list[int]]:
    """The log-probability of each token but the first, and the most probable token there."""
    logits = logits_of(plain.model, plain.hidden(ids))[0, :-1].double().log_softmax(-1)
    following = torch.tensor(ids[1:])
    return logits.gather(1, following[:, None])[:, 0].tolist(), logits.argmax(-1).tolist()


@pytest.mark.parametrize("spec_tokens", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_they_are_those_of_a_whole_forward(
    spec_tokens: int, compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    spec, plain = compiled("mimo", spec_tokens, **MASKED), oracle("mimo")
    starts = [1, 4, 1]
    rows = spec.prompt_logprobs(TEXTS, starts)
    for ids, start, row in zip(TEXTS, starts, rows, strict=True):
        numbers, likeliest = by_transformers(plain, ids)
        assert [entry.token_id for entry in row] == ids[start:]
        assert [entry.logprob for entry in row] == pytest.approx(numbers[start - 1 :], abs=2e-6)
        assert [entry.top[0][0] for entry in row] == likeliest[start - 1 :]


def test_a_step_scores_all_its_rows(compiled: Callable[..., Any]) -> None:
    """Forced tokens replace the drafts, so every draft is accepted."""
    spec = compiled("mimo", 3, **MASKED)
    before, accepted = spec.stats.decode_steps, sum(spec.stats.accepted)
    spec.prompt_logprobs([list(range(5, 14))])  # Eight tokens, one of them by the prefill.
    assert spec.stats.decode_steps - before == 2
    assert sum(spec.stats.accepted) - accepted == 6  # All drafts of both.


@pytest.mark.parametrize(
    ("prompts", "starts", "message"),
    [
        ([[5]], None, "start is 1 in a text of 1 tokens; expected 1 or more, and a token after"),
        ([[5, 6]], [0], "start is 0 in a text of 2 tokens"),
        ([[5, 96]], None, "token id 96; expected ids in 0..95"),
    ],
)
def test_what_cannot_be_scored(
    compiled: Callable[..., Any], prompts: Any, starts: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        compiled("mimo", 3, **MASKED).prompt_logprobs(prompts, starts)


def test_masks_must_be_compiled(compiled: Callable[..., Any]) -> None:
    with pytest.raises(RequestError, match="compile with sampling=True"):
        compiled("mimo", 2, **PRESSED).prompt_logprobs([[5, 6, 7]])

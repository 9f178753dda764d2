"""Bounds of every sampling parameter: one clear error each, before anything runs."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from helpers.plans import plan_of
from helpers.theorem import PROMPTS

from mtpc import CompileOptions, SamplingParams
from mtpc.errors import OptionError, RequestError

BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, r"temperature is -0.1; expected a number in \[0, 1000\]"),
    ({"temperature": 1001}, "temperature is 1001; expected"),
    ({"temperature": 1e-4}, "expected 0 \\(greedy\\) or at least 0.001"),
    ({"temperature": math.nan}, "temperature is nan; expected"),
    ({"temperature": "hot"}, r"temperature is 'hot' \(str\); expected a number"),
    ({"temperature": True}, r"temperature is True \(bool\)"),
    ({"top_k": -1}, "top_k is -1; expected an integer in 0.."),
    ({"top_k": 2.5}, r"top_k is 2.5 \(float\); expected an integer"),
    ({"top_p": 0}, r"top_p is 0; expected a number in \(0, 1\]"),
    ({"top_p": 1.01}, "top_p is 1.01"),
    ({"min_p": -0.1}, "min_p is -0.1"),
    ({"min_p": 2}, "min_p is 2"),
    ({"seed": -1}, "seed is -1; expected an integer in 0.."),
    ({"seed": 2**63}, "seed is 9223372036854775808"),
    ({"logprobs": -1}, "logprobs is -1"),
    ({"repetition_penalty": 0}, r"repetition_penalty is 0; expected a number in \(0, 10\]"),
    ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
    ({"presence_penalty": 2.1}, "presence_penalty is 2.1"),
    ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1"),
    ({"logit_bias": {3: 101}}, "a value of logit_bias is 101"),
    ({"logit_bias": {"3": 1}}, "logit_bias has '3'; expected token ids"),
    ({"logit_bias": 3}, "logit_bias is 3; expected numbers by token id"),
    ({"logit_bias": dict.fromkeys(range(257), 1.0)}, "257 entries; expected at most 256"),
    ({"allowed_ids": ()}, "allowed_ids leaves no token"),
    ({"allowed_ids": (3,), "banned_ids": (3,)}, "allowed_ids leaves no token"),
    ({"allowed_ids": "abc"}, "allowed_ids is 'abc'; expected token ids"),
    ({"banned_ids": (1.5,)}, "banned_ids has 1.5"),
    ({"min_tokens": -1}, "min_tokens is -1"),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {96: 1.0}}, r"logit_bias has 96; expected ids in 0..95"),
    ({"allowed_ids": (-1,)}, "allowed_ids has -1"),
    ({"banned_ids": (200,)}, "banned_ids has 200"),
    ({"banned_ids": tuple(range(96))}, "whole vocabulary"),
    ({"min_tokens": 6}, "min_tokens is 6, above max_new_tokens 5"),
    ({"min_tokens": 2, "allowed_ids": (1,)}, "only stop tokens are allowed"),
    ({"logprobs": 21}, "at most 20: compile with a larger max_logprobs"),
    ({"temprature": 1}, "unknown argument 'temprature'; did you mean 'temperature'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bounds(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)


def test_edges_are_inside() -> None:
    SamplingParams(0.001, 0, 1, 0, 0, 0, 10, -2, 2, {0: -100}, (0,), (1,), 0)
    SamplingParams(1000, 2**31 - 1, 1e-300, 1, 2**63 - 1, 64, 1e-3, 2, -2, ((7, 100),))


def test_normal_forms() -> None:
    params = SamplingParams(logit_bias={9: 1, 2: 3}, banned_ids=[5, 4, 5], allowed_ids=(8, 7))
    assert (params.logit_bias, params.banned_ids, params.allowed_ids) == (
        ((2, 3.0), (9, 1.0)), (4, 5), (7, 8))  # fmt: skip
    assert hash(params) == hash(SamplingParams(**vars(params)))
    assert SamplingParams(seed=3).is_plain
    assert not any(SamplingParams(**f).is_plain for f in ({"temperature": 1}, {"logprobs": 0}))
    assert SamplingParams().settled().seed != SamplingParams().settled().seed
    assert SamplingParams(seed=5).settled().seed == 5


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_a_program_cannot_serve(
    fields: dict[str, Any], message: str, compiled: Callable[..., Any]
) -> None:
    spec = compiled("mimo", 2, sampling=True)
    with pytest.raises(RequestError, match=message):
        spec.generate([PROMPTS[3], PROMPTS[4]], 5, **fields)
    assert not spec.engine.has_work


def test_arguments_of_generate(compiled: Callable[..., Any]) -> None:
    spec = compiled("mimo", 2, sampling=True)
    with pytest.raises(RequestError, match="1 sampling parameters for 2 prompts"):
        spec.generate(PROMPTS[3:5], 5, sampling=[SamplingParams()])
    with pytest.raises(RequestError, match="sampling was given, and top_k too"):
        spec.generate(PROMPTS[3:5], 5, sampling=SamplingParams(), top_k=3)
    with pytest.raises(RequestError, match=r"expected mtpc\.SamplingParams"):
        spec.generate(PROMPTS[3:5], 5, sampling=[{"top_k": 3}] * 2)


@pytest.mark.parametrize("fields", [{"temperature": 0.8}, {"logprobs": 0}, {"min_tokens": 1}])
def test_a_greedy_program_names_the_option(
    fields: dict[str, Any], compiled: Callable[..., Any]
) -> None:
    spec = compiled("mimo", 2)
    with pytest.raises(RequestError, match="compile with sampling=True"):
        spec.generate(PROMPTS[3], 5, **fields)
    spec.generate(PROMPTS[3], 2, seed=4)
    assert not any(name.startswith("state.sampling") for name in spec.program.shared)


def test_options() -> None:
    with pytest.raises(OptionError, match="token_mask needs sampling=True"):
        CompileOptions(sampling=False, token_mask=True)
    assert plan_of().token_mask
    assert not plan_of(sampling=False).token_mask
    assert not plan_of(synthetic_acceptance_rates=(1, 1, 1)).token_mask
    with pytest.raises(OptionError, match="token_mask is 1; expected True, False or None"):
        CompileOptions(token_mask=1)  # type: ignore[arg-type]
    for wrong in (0, 65, "5"):
        with pytest.raises(OptionError, match="max_logprobs is"):
            CompileOptions(max_logprobs=wrong)  # type: ignore[arg-type]


def test_importing_parameters_needs_no_torch() -> None:
    code = "import sys, mtpc; mtpc.SamplingParams(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

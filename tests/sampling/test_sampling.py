"""Sampling: one text a seed, whatever K, batch, bucket or chunk, and an oracle that says which."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.compiled import capture_split, in_turn
from helpers.families import TINY
from helpers.oracles import Oracle
from helpers.plans import plan_of
from helpers.sampling_oracle import FILTERS, NEW, WARM, V
from helpers.theorem import PROMPTS, poison

from mtpc import SamplingParams
from mtpc.api import SpecModel
from mtpc.backends import make_backend
from mtpc.engine.request import Request
from mtpc.engine.sampling_rows import pack_bits, write_sampling_rows
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler
from mtpc.sampling_params import INTS, MAX_LOGIT_BIAS


def sampler(compiled: Callable[..., Any], family: str, spec_tokens: int, **options: Any) -> Any:
    return compiled(family, spec_tokens, **{"sampling": True, "token_mask": False, **options})


@pytest.mark.parametrize(
    "spec_tokens", [0, 3, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 4))]
)
def test_every_parameter_equals_the_oracle(
    spec_tokens: int, compiled: Callable[..., Any], sampling_oracle: Callable[..., Any]
) -> None:
    """All parameters at once in mixed, padded, poisoned batches: K changes no token of any."""
    spec, plain = sampler(compiled, "mimo", spec_tokens), sampling_oracle("mimo")
    names = list(FILTERS)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(names))]
    poison(spec)
    found = spec.generate(prompts, NEW, sampling=list(FILTERS.values()))
    wanted = [plain.generate(p, NEW, FILTERS[n]) for p, n in zip(prompts, names, strict=True)]
    assert dict(zip(names, found, strict=True)) == dict(zip(names, wanted, strict=True))
    if spec_tokens:
        assert 0 < sum(spec.stats.accepted) < sum(spec.stats.drafted)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_other_families(
    family: str, compiled: Callable[..., Any], sampling_oracle: Callable[..., Any]
) -> None:
    spec, plain = sampler(compiled, family, 2), sampling_oracle(family)
    names = ("temperature", "everything", "greedy")
    found = spec.generate(PROMPTS[4:7], NEW, sampling=[FILTERS[name] for name in names])
    wanted = [plain.generate(p, NEW, FILTERS[n]) for p, n in zip(PROMPTS[4:7], names, strict=True)]
    assert found == wanted


def test_company_buckets_chunks_and_late_arrival_change_nothing(
    compiled: Callable[..., Any], sampling_oracle: Callable[..., Any]
) -> None:
    """Requests join one by one, in other buckets and chunks than above, greedy ones among them."""
    spec = sampler(compiled, "mimo", 3, batch_buckets=(1, 3), prefill_chunk=3)
    plain, chosen = sampling_oracle("mimo"), list(FILTERS.values())
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(chosen))]
    stops = tuple(spec.served.stop_ids)
    poison(spec)
    outputs: dict[int, list[int]] = {}
    waiting = list(zip(prompts, chosen, strict=True))
    while waiting or spec.engine.has_work:
        if waiting:
            prompt, params = waiting.pop()
            outputs[spec.engine.add(prompt, NEW, stops, params)] = []
        for output in spec.engine.step():
            outputs[output.request_id] += output.token_ids
    wanted = [
        plain.generate(*pair) for pair in zip(prompts, [NEW] * len(chosen), chosen, strict=True)
    ]
    assert list(outputs.values()) == wanted[::-1]


def test_greedy_requests_are_what_they_are_without_sampling(
    compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    spec, greedy = sampler(compiled, "mimo", 3), SamplingParams()
    found = spec.generate(PROMPTS[3:9], NEW, sampling=[greedy, WARM] * 3)
    assert found[::2] == [oracle("mimo").generate(prompt, NEW) for prompt in PROMPTS[3:9:2]]


def test_seeds(compiled: Callable[..., Any]) -> None:
    """A seed repeats a text, another or none gives another."""
    spec = sampler(compiled, "mimo", 3)
    hot = {"temperature": 5.0, "ignore_eos": True}
    first = spec.generate(PROMPTS[5], NEW, seed=1, **hot)
    assert spec.generate([PROMPTS[5]] * 2, NEW, seed=1, **hot) == [first] * 2
    others = [spec.generate(PROMPTS[5], NEW, **hot) for _ in range(2)]
    others.append(spec.generate(PROMPTS[5], NEW, seed=2, **hot))
    assert len({tuple(ids) for ids in (first, *others)}) == 4


@pytest.mark.parametrize("spec_tokens", [0, 3])
def test_logprobs_are_the_models_own(
    spec_tokens: int, compiled: Callable[..., Any], sampling_oracle: Callable[..., Any]
) -> None:
    """Of emitted tokens and of the most probable ones, before temperature, bias and penalties."""
    spec, plain = sampler(compiled, "mimo", spec_tokens), sampling_oracle("mimo")
    prompt, everything = PROMPTS[6], FILTERS["everything"]
    poison(spec)
    for params, count in ((dataclasses.replace(everything, logprobs=4), 4), (everything, None)):
        spec.engine.add(prompt, NEW, (), params)
        (request,) = spec.engine.waiting
        streamed: list[Any] = []
        while spec.engine.has_work:
            for output in spec.engine.step():
                assert (output.logprobs is None) == (count is None)
                streamed += output.logprobs or []
        assert streamed == request.logprobs
        assert len(request.output_ids) == NEW
        assert [token.token_id for token in streamed] == (request.output_ids if count else [])
        for i, token in enumerate(streamed):
            logits = torch.from_numpy(plain.logits([*prompt, *request.output_ids[:i]]))
            expected = logits.log_softmax(-1)
            assert math.isclose(token.logprob, float(expected[token.token_id]), rel_tol=1e-6)
            top = expected.topk(4)
            assert [i for i, _ in token.top] == top.indices.tolist()
            assert np.allclose([v for _, v in token.top], top.values.tolist(), rtol=1e-6)


@pytest.mark.parametrize("spec_tokens", [0, 2])
def test_a_mask_written_by_the_host(
    spec_tokens: int, compiled: Callable[..., Any], sampling_oracle: Callable[..., Any]
) -> None:
    """Rows of `batch.token_mask` act as allowed_ids do; all are set until somebody writes."""
    spec, plain = sampler(compiled, "mimo", spec_tokens, token_mask=True), sampling_oracle("mimo")
    masks = [step.buffers["batch.token_mask"] for step in spec.program.steps.values()]
    names = ("temperature", "greedy", "top_p")
    chosen = [FILTERS[name] for name in names]
    prompts = PROMPTS[3:6]
    free = [plain.generate(*pair) for pair in zip(prompts, [NEW] * 3, chosen, strict=True)]
    assert spec.generate(prompts, NEW, sampling=chosen) == free
    for mask in masks:
        mask.copy_(pack_bits(range(10, 50), V).expand_as(mask))
    only = [dataclasses.replace(p, allowed_ids=tuple(range(10, 50))) for p in chosen]
    wanted = [plain.generate(*pair) for pair in zip(prompts, [NEW] * 3, only, strict=True)]
    assert wanted != free
    assert spec.generate(prompts, NEW, sampling=chosen) == wanted
    for mask in masks:
        mask.fill_(-1)


def test_a_request_that_is_placed_again_gets_its_counts_back(compiled: Callable[..., Any]) -> None:
    """What preemption needs: rows follow from the request alone, whatever the slot held."""
    spec = sampler(compiled, "mimo", 2)
    poison(spec)
    params = dataclasses.replace(FILTERS["everything"], logprobs=2)
    request = Request(0, PROMPTS[7], 30, (1,), params, output_ids=[5, 9, 5])
    write_sampling_rows(spec.program, request, 3)
    state = {
        n.removeprefix("state."): t[3] for n, t in spec.program.shared.items() if "kv." not in n
    }
    wanted = torch.zeros(V, dtype=torch.int32)
    wanted[5], wanted[9] = 2, 1
    assert torch.equal(state["output_counts"], wanted)
    assert torch.equal(state["prompt_tokens"], pack_bits(PROMPTS[7], V))
    ints = dict(zip(INTS, state["sampling_ints"].tolist(), strict=True))
    assert ints == {"seed": 77, "top_k": 30, "first_stop": len(PROMPTS[7]) + 3, "masked": 1,
                    "penalised": 1, "logprobs": 2}  # fmt: skip
    assert state["bias_ids"].tolist() == [3] + [-1] * (MAX_LOGIT_BIAS - 1)


def test_counts_are_those_of_the_output(compiled: Callable[..., Any]) -> None:
    """After every step, however many drafts it accepted."""
    spec = sampler(compiled, "mimo", 3)
    poison(spec)
    spec.engine.add(PROMPTS[6], 20, (), dataclasses.replace(FILTERS["repetition"]))
    (request,) = spec.engine.waiting
    while spec.engine.has_work:
        slot = spec.engine.running[0].slot if spec.engine.running else None
        spec.engine.step()
        if slot is not None:
            counts = spec.program.shared["state.output_counts"][slot]
            assert Counter(dict(enumerate(counts.tolist()))) == Counter(request.output_ids)


@pytest.mark.parametrize("how", ["split", "null"])
def test_split_steps_and_a_recorded_tape(
    how: str, checkpoint: Callable[..., Any], sampling_oracle: Callable[..., Any]
) -> None:
    """Verify and propose as graphs of their own; and a device that can only repeat a capture."""
    options = plan_of(**{**TINY, "sampling": True}, spec_tokens=2, batch_buckets=(3,))
    loaded = load(checkpoint("mimo"), "float64", True)
    compiler = StepCompiler(loaded, options, make_backend("eager" if how == "split" else "null"))
    program = compiler.compile()
    if how == "split":
        key = StepKey.decode(3, 2)
        whole = in_turn(*capture_split(compiler, key))
        program = dataclasses.replace(program, steps={**program.steps, key: whole})
    spec, plain = SpecModel(loaded.served(), compiler.plan, program), sampling_oracle("mimo")
    chosen = [FILTERS[name] for name in ("everything", "greedy", "temperature")]
    poison(spec)
    found = spec.generate(PROMPTS[4:7], NEW, sampling=chosen)
    assert found == [plain.generate(p, NEW, c) for p, c in zip(PROMPTS[4:7], chosen, strict=True)]

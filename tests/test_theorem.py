"""The theorem: greedy speculative output is token-identical to the model's own plain decoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from conftest import CPU_FAMILY_NAMES, FAMILY_NAMES
from helpers.oracles import Oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mtpc
from mtpc.layout import SCRATCH_SLOT

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 15, 16, 17, 21)
"""Prompt lengths on both sides of page edges (4) and prefill chunk edges (8)."""
PROMPTS = [
    torch.randint(2, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in LENGTHS
]

requests = st.lists(
    st.tuples(
        st.integers(0, len(PROMPTS) - 1),
        st.integers(1, 20),  # max_new_tokens
        st.integers(0, 9),  # joins after this many steps
        st.sampled_from([None, 0, 2, 5]),  # output token, by place, that is its stop token
    ),
    min_size=1,
    max_size=9,
)


def poison(spec: mtpc.SpecModel) -> None:
    """Fill everything a padded row or an unwritten page could read with garbage."""
    assert not spec.engine.has_work
    spec.engine.reset_prefix_cache()
    wild = {torch.int32: 2**30, torch.int64: -(2**40)}

    def fill(tensor: torch.Tensor) -> None:
        tensor.fill_(math.nan if tensor.is_floating_point() else wild[tensor.dtype])

    spec.program.forget_batches()
    for tensor in spec.program.shared.values():
        fill(tensor)
    spec.program.shared["state.remaining_tokens"].fill_(0)
    spec.program.shared["state.remaining_tokens"][SCRATCH_SLOT] = 99
    for step in spec.program.steps.values():
        for name, tensor in step.buffers.items():
            if name.startswith("batch.") and name != "batch.state_indices":
                fill(tensor)
        step.buffers["batch.state_indices"].fill_(SCRATCH_SLOT)


Drawn: TypeAlias = "list[tuple[int, int, int, int | None]]"
"""Requests as `requests` has them."""


def serve(spec: mtpc.SpecModel, drawn: Drawn, stops: list[tuple[int, ...]]) -> list[list[int]]:
    """Run requests that join at their own times; returns their finished outputs in order."""
    outputs: dict[int, list[int]] = {}
    order: list[int] = []
    pending = sorted(range(len(drawn)), key=lambda i: drawn[i][2])
    ids: dict[int, int] = {}
    step = 0
    while pending or spec.engine.has_work:
        while pending and drawn[pending[0]][2] <= step:
            index = pending.pop(0)
            prompt, new, _, _ = drawn[index]
            ids[index] = spec.engine.add(PROMPTS[prompt], new, stops[index])
            outputs[ids[index]] = []
        for output in spec.engine.step():
            outputs[output.request_id] += output.token_ids
        step += 1
    order = [ids[i] for i in range(len(drawn))]
    return [outputs[request_id] for request_id in order]


@pytest.mark.parametrize(
    ("family", "spec_tokens"),
    [
        pytest.param(family, k, marks=[pytest.mark.slow] if is_slow else [])
        for family in FAMILY_NAMES
        for k in range(5)
        for is_slow in [family not in CPU_FAMILY_NAMES and k != 3]
    ],
)
def test_speculative_output_equals_plain_decoding(
    family: str, spec_tokens: int, compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """K = 0..4, batches 1..9 over buckets 1, 2, 4, 8, ragged, joins and leaves, poisoned."""
    check_theorem(compiled(family, spec_tokens), oracle(family), max_examples=6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("spec_tokens", range(5))
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_same_at_length(
    family: str,
    spec_tokens: int,
    backend: str,
    compiled: Callable[..., Any],
    oracle: Callable[..., Oracle],
) -> None:
    """Many more examples, and every K compiled."""
    spec = compiled(family, spec_tokens, backend=backend)
    check_theorem(spec, oracle(family), max_examples=60)


def check_theorem(spec: mtpc.SpecModel, plain: Oracle, max_examples: int) -> None:
    """Draw batches of requests and compare each output with plain decoding; some stop early."""
    stopped = 0

    def wanted(prompt: int, new: int, stops: tuple[int, ...]) -> list[int]:
        truth = plain.generate(PROMPTS[prompt], new, stop=False)
        ends = [place for place, token in enumerate(truth) if token in stops]
        return truth[: ends[0] + 1] if ends else truth

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn=requests)
    def check(drawn: Drawn) -> None:
        nonlocal stopped
        stops: list[tuple[int, ...]] = [
            () if at is None else (plain.generate(PROMPTS[p], at + 1, stop=False)[at],)
            for p, _, _, at in drawn
        ]
        expected = [wanted(p, new, s) for (p, new, _, _), s in zip(drawn, stops, strict=True)]
        poison(spec)
        assert serve(spec, drawn, stops) == expected
        stopped += sum(len(e) < new for e, (_, new, _, _) in zip(expected, drawn, strict=True))

    check()
    assert stopped > 0


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_trained_drafts_are_accepted_in_part(family: str, compiled: Callable[..., Any]) -> None:
    """The models under the theorem reach every outcome: none, some and all drafts accepted."""
    spec = compiled(family, 3)
    spec.generate(PROMPTS, max_new_tokens=20, ignore_eos=True)
    rates = spec.stats.acceptance_by_position
    assert 0.05 < rates[2] < rates[0] < 1.0


@pytest.mark.parametrize("num_accepted", range(4))
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_step_after_a_partial_rejection(
    family: str, num_accepted: int, compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """Plant drafts of which exactly `num_accepted` are right; that step and the next are exact."""
    check_after_rejection(compiled(family, 3), oracle(family), num_accepted)


def check_after_rejection(spec: mtpc.SpecModel, plain: Oracle, num_accepted: int) -> None:
    """One request alone, K = 3: the planted step accepts what is right, then all is plain."""
    prompt = PROMPTS[8]
    truth = plain.generate(prompt, 12, stop=False)
    poison(spec)
    request_id = spec.engine.add(prompt, 12)
    emitted: list[int] = []
    while not emitted:
        emitted += [t for o in spec.engine.step() for t in o.token_ids]
    slot = spec.engine.running[0].slot
    planted = [t if i < num_accepted else (t + 1) % 96 for i, t in enumerate(truth[1:4])]
    spec.program.shared["state.token_ids"][slot, 1:4] = torch.tensor(planted)
    first = spec.engine.step()[0].token_ids
    assert first == truth[1 : 2 + num_accepted]
    emitted += first
    while spec.engine.has_work:
        emitted += [t for o in spec.engine.step() for t in o.token_ids]
    assert emitted == truth
    assert request_id is not None


def test_full_acceptance(compiled: Callable[..., Any]) -> None:
    """Drafts that are always right are always accepted: K + 1 tokens a step."""
    spec = compiled("mimo", 3, kind="full")
    out = spec.generate(PROMPTS[3:6], max_new_tokens=17, ignore_eos=True)
    assert [len(ids) for ids in out] == [17, 17, 17]
    assert spec.stats.acceptance_rate == 1.0
    assert spec.stats.acceptance_length == 4.0


@pytest.mark.parametrize("chunk", [1, 3, 8, 32])
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_prefill_chunking_changes_nothing(
    family: str, chunk: int, compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """A prompt cut into chunks of any size continues alike."""
    spec = compiled(family, 2, prefill_chunk=chunk, batch_buckets=(1,))
    poison(spec)
    for prompt in (PROMPTS[0], PROMPTS[6], PROMPTS[12]):
        assert spec.generate(prompt, 8, ignore_eos=True) == oracle(family).generate(
            prompt, 8, stop=False
        )


def test_float32_random_weights(
    compiled: Callable[..., Any], checkpoint: Callable[..., Any]
) -> None:
    """float32, where margins are wide enough: the deepest K against K = 0 of the same graph."""
    for family in CPU_FAMILY_NAMES:
        plain = compiled(family, 0, dtype="float32", batch_buckets=(1, 4))
        spec = compiled(family, 4, dtype="float32", batch_buckets=(1, 4))
        prompts = [PROMPTS[4], PROMPTS[9], PROMPTS[11]]
        assert spec.generate(prompts, 12) == plain.generate(prompts, 12)

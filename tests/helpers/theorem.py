"""The theorem as a check of any model: prompts, random requests, and poisoned memory."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mtpc
from helpers.oracles import DraftOracle, Oracle
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


def check_drafts(spec: Any, oracle: DraftOracle, prompts: list[list[int]], new: int) -> int:
    """Compare the drafts in the state buffers with the oracle's; returns comparisons made."""
    poison(spec)
    compared = 0
    texts = {spec.engine.add(prompt, new): list(prompt) for prompt in prompts}
    while spec.engine.has_work:
        for output in spec.engine.step():
            texts[output.request_id] += output.token_ids
        for request in spec.engine.running:
            if not request.is_prefilled:
                continue
            found = spec.program.shared["state.token_ids"][request.slot].tolist()
            text = texts[request.request_id]
            assert found[0] == text[-1]
            assert found[1:] == oracle.drafts(text, spec.options.spec_tokens)
            compared += 1
    return compared

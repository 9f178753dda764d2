"""What a step emits is distributed as the target says: chi-square of exact joint distributions.

The target is a table of six tokens, so that the joint distribution of three tokens is known
exactly, and its draft layer another table, so that drafts are mostly wrong. Everything else is
the real step: traced, fused, acceptance, sampling, penalties, state. Each trial is a request with
a seed of its own; drafts of the first step are planted, further ones are the draft layer's.

Power: with N = 49,152 trials and 216 cells, a deviation d of the emitted from the exact joint p is
found with probability 0.99 at the level 1e-4 used here once N sum(d^2 / p) reaches about 130
(normal approximation of the noncentral chi-square at 215 degrees), that is once cells are off by
5 % in the root mean square.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers.plans import plan_of
from helpers.sampling_oracle import distribution
from torch import Tensor, nn

from mtpc import SamplingParams
from mtpc.backends.eager import EagerBackend
from mtpc.backends.pipeline import select_passes
from mtpc.capture import trace
from mtpc.capture.graph import set_tensor
from mtpc.capture.trace import ModelTraces, trace_step
from mtpc.engine.request import Request
from mtpc.engine.sampling_rows import write_sampling_rows
from mtpc.layout import Layout, StepKey
from mtpc.layout.buffers import (
    K_MAX,
    B,
    E,
    K,
    L,
    M,
    N,
    P,
    Q,
    R,
    S,
    V,
    batch_specs,
    sampling_specs,
    state_specs,
)
from mtpc.ops.accept import REPORTS
from mtpc.passes import Verifier, run_pipeline
from mtpc.program.program import CapturedStep, Program
from mtpc.step.accept import Accept
from mtpc.step.drafting import Drafting
from mtpc.weights.weights import Weights

TOKENS, REQUESTS, ROUNDS, START = 6, 256, 192, 2
LEVEL = 1e-4
CASES = {
    "temperature": SamplingParams(temperature=1.0),
    "top_k": SamplingParams(temperature=1.4, top_k=3),
    "top_p": SamplingParams(temperature=1.0, top_p=0.75),
    "min_p": SamplingParams(temperature=1.5, min_p=0.2),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.6, presence_penalty=0.4, frequency_penalty=0.7
    ),
    "bias": SamplingParams(temperature=1.0, logit_bias={0: 1.5, 3: -1.0}, banned_ids=(5,)),
}


class Table(nn.Module):
    """Features of a token, which are its row of next-token logits; as target and draft layer."""

    def __init__(self, rows: torch.Tensor, is_draft: bool):
        super().__init__()
        self.rows, self.is_draft = nn.Parameter(rows), is_draft

    def forward(self, ids: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        features = self.rows[ids]
        return features + 0 * rest[0] if self.is_draft else features


class TableModel(nn.Module):
    """A `StepModel` without attention: the next token depends on the last one alone."""

    def __init__(self) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(5)
        target, draft = torch.randn(2, TOKENS, TOKENS, generator=gen, dtype=torch.float64)
        self.target, self.drafts = Table(target, False), nn.ModuleList([Table(draft, True)])
        self.target_head = nn.Linear(TOKENS, TOKENS, bias=False).double()
        nn.init.eye_(self.target_head.weight)
        self.draft_heads = nn.ModuleList([self.target_head])
        self.vocab_size = TOKENS
        self.drafting = Drafting(1)
        self.draft_entry = self.draft_tokens = self.draft_logits = None
        self.later_draft = self.draft_bias = None


@lru_cache
def build(spec_tokens: int, rule: type[Accept]) -> tuple[Program, CapturedStep, np.ndarray]:
    """The real decode step around the table; and the table. `rule` is what `trace` has now."""
    assert trace.Accept is rule
    key, model = StepKey.decode(REQUESTS, spec_tokens), TableModel()
    sizes = {R: REQUESTS, Q: spec_tokens + 1, K: spec_tokens, K_MAX: spec_tokens, M: 2, P: 8, N: 2,
             S: REQUESTS + 1, E: 8, V: TOKENS, B: 2, L: 1}  # fmt: skip
    specs = (*state_specs(), *batch_specs(key), *sampling_specs(key, False))
    layout, module = Layout(specs, sizes), nn.Module()
    shared = {name: layout.allocate(name) for name, spec in layout.items() if spec.shared}
    for name, tensor in shared.items():
        set_tensor(module, name, tensor)
    weights = Weights(dict(model.named_parameters()))
    graph = trace_step(key, ModelTraces(model, layout), layout, module, weights)
    names = {id(tensor): name for name, tensor in shared.items()}
    run_pipeline(graph, select_passes(plan_of(), buffer_names=names), Verifier(propagate=False))
    backend = EagerBackend()
    step = CapturedStep(key, graph.layout, graph.buffers() | shared, backend.lower(graph), 0.0)
    return Program({key: step}, shared), step, model.target.rows.detach().numpy()


def emitted_triples(spec_tokens: int, params: SamplingParams) -> tuple[np.ndarray, np.ndarray, Any]:
    """How often each triple was emitted [6, 6, 6]; the table; accepted drafts by step and trial."""
    program, step, table = build(spec_tokens, trace.Accept)
    state, buffers = program.shared, step.buffers
    slots = torch.arange(1, REQUESTS + 1)
    for slot in slots.tolist():
        write_sampling_rows(program, Request(0, [START], 3, (), params), slot)
    buffers["batch.state_indices"].copy_(slots)
    tally, accepted = np.zeros((TOKENS,) * 3), []
    for round_ in range(ROUNDS):
        state["state.sampling_ints"][1:, 0] = slots + round_ * REQUESTS
        state["state.committed_lens"][1:] = 0
        state["state.remaining_tokens"][1:] = 3
        state["state.output_counts"].zero_()
        state["state.token_ids"][1:, 0] = START
        planted = torch.randint(0, TOKENS, (REQUESTS, spec_tokens),
                                generator=torch.Generator().manual_seed(round_))  # fmt: skip
        state["state.token_ids"][1:, 1:] = planted
        rows: list[list[int]] = [[] for _ in range(REQUESTS)]
        while state["state.remaining_tokens"][1:].any():
            live = state["state.remaining_tokens"][1:] > 0
            step.replay()
            accepted += buffers["batch.num_accepted"][live].tolist()
            tokens, counts = buffers["batch.out_token_ids"], buffers["batch.num_emitted"].tolist()
            for row, new, count in zip(rows, tokens.tolist(), counts, strict=True):
                row += new[:count]
        np.add.at(tally, tuple(np.array(rows).T), 1)
    return tally, table, accepted


def exact_joint(table: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The probability of each triple, by the chain rule."""
    joint = np.ones((TOKENS,) * 3)
    for triple in itertools.product(range(TOKENS), repeat=3):
        out: list[int] = []
        for token in triple:
            x = distribution(table[out[-1] if out else START], [START], out, params, set())
            p = np.exp(x - x.max())
            joint[triple] *= p[token] / p.sum()
            out.append(token)
    assert math.isclose(joint.sum(), 1)
    return joint


def p_value(tally: np.ndarray, joint: np.ndarray) -> float:
    """Of the chi-square, cells that expect fewer than five pooled; Wilson-Hilferty's normal."""
    assert tally[joint == 0].sum() == 0, "a token that is filtered out was emitted"
    expected = joint[joint > 0] * tally.sum()
    found = tally[joint > 0]
    few = expected < 5
    cells = np.append(found[~few], found[few].sum()), np.append(expected[~few], expected[few].sum())
    keep = cells[1] > 0
    found, expected = cells[0][keep], cells[1][keep]
    df = len(found) - 1
    chi_square = ((found - expected) ** 2 / expected).sum()
    z = ((chi_square / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return 0.5 * math.erfc(z / math.sqrt(2))


LATE = ("bias", "min_p", "penalties", "top_k", "top_p")
"""Cases of the slow run: test_sampling.py has their texts."""


@pytest.mark.parametrize(
    "spec_tokens", [*(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2)), 3]
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in LATE)) for n in CASES],
)
def test_emitted_joint_is_the_targets(name: str, spec_tokens: int) -> None:
    params = CASES[name]
    tally, table, accepted = emitted_triples(spec_tokens, params)
    assert tally.sum() == REQUESTS * ROUNDS
    assert set(accepted) == set(range(spec_tokens + 1)), "no, some and all drafts were accepted"
    assert np.mean(np.array(accepted) == 0) > 0.4, "drafts are often wrong"
    assert p_value(tally, exact_joint(table, params)) > LEVEL


class AcceptAlways(Accept):
    """A wrong rule: every draft is taken for the target's own choice."""

    def forward(self, *arguments):  # type: ignore[no-untyped-def]
        return super().forward(*_take(arguments, lambda drafts, chosen, lens: drafts))


class AcceptAlmost(Accept):
    """A subtle wrong rule: one draft in sixteen (by its value and position) is let through."""

    def forward(self, *arguments):  # type: ignore[no-untyped-def]
        def lucky(drafts: Tensor, chosen: Tensor, lens: Tensor) -> Tensor:
            luck = (torch.arange(drafts.shape[0])[:, None] + lens[:, None]) % 16 == 0
            return torch.where(luck, drafts, chosen)

        return super().forward(*_take(arguments, lucky))


def _take(arguments: tuple[Tensor, ...], rule: Callable[..., Tensor]) -> list[Tensor]:
    """Arguments of `mtpc::accept` with other choices: by a rule from drafts, choices, lengths."""
    *reports, chosen, finite, ids, starts, context_lens = arguments[: len(REPORTS) + 5]
    rows, drafts = (t.view(len(context_lens), -1) for t in (chosen, ids))
    drafts = torch.cat([drafts[:, 1:], rows[:, -1:]], 1)
    taken = rule(drafts, rows, context_lens).reshape(-1)
    return [*reports, taken, finite, ids, starts, context_lens, *arguments[len(REPORTS) + 5 :]]


@pytest.mark.parametrize(
    "wrong", [pytest.param(AcceptAlways, marks=pytest.mark.slow), AcceptAlmost]
)
def test_a_wrong_acceptance_rule_is_caught(
    wrong: type[Accept], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "Accept", wrong)
    params = CASES["temperature"]
    tally, table, _ = emitted_triples(2, params)
    assert p_value(tally, exact_joint(table, params)) < LEVEL / 1000

"""GLM-5.2: the indexer of an MTP layer runs for a step's first draft; later ones take its choice.

The oracle is the page of plain code, uncached: later rows attend to the last certain row's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import TINY
from helpers.oracles import DraftOracle, Oracle
from helpers.plans import changed
from helpers.released import PAGES
from helpers.reuse import Conversations, check_reuse
from helpers.sampling_oracle import FILTERS
from helpers.theorem import PROMPTS, check_caches, check_drafts, check_theorem, poison
from helpers.tiny import make_checkpoint

import mtpc
from mtpc.capture.graph import operators
from mtpc.engine.engine import Engine
from mtpc.engine.request import Request

FAMILY = "glm_moe_dsa@shared"
CHOICE, WRITE = torch.ops.mtpc.choose_slots.default, torch.ops.mtpc.write_cache.default
RAGGED = [PROMPTS[0], PROMPTS[4], PROMPTS[9], PROMPTS[12]]
"""1, 5, 15 and 21 tokens: fewer than `index_topk`, 6, and more."""


def runs(spec: Any) -> set[tuple[int, int]]:
    """How often a step chooses, and how often it writes keys of an indexer; of all steps."""
    found = set()
    for step in spec.program.steps.values():
        calls = list(operators(step.graph.graph))
        written = [str(node.args[0]) for node, op in calls if op is WRITE]
        keys = sum(name.endswith("_index") for name in written)
        found.add((sum(op is CHOICE for _, op in calls), keys))
    return found


@pytest.mark.parametrize(
    "spec_tokens", [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 4))]
)
def test_drafts_equal_the_wiring(
    spec_tokens: int, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """Random weights, whose drafts rest on all that a row attends to; four requests at once."""
    spec = compiled(FAMILY, spec_tokens, "random", batch_buckets=(4,))
    assert check_drafts(spec, DraftOracle(oracle(FAMILY, "random")), RAGGED, 12) >= 30
    assert runs(spec) == {(2, 2)}  # The target's layer with an indexer, and the first draft.


@pytest.mark.parametrize(
    ("layers", "changes"),
    [
        pytest.param(1, {"index_topk": 99}, marks=pytest.mark.slow),
        pytest.param(2, {"num_nextn_predict_layers": 2}, marks=pytest.mark.slow),
    ],
)
def test_other_models(layers: int, changes: dict[str, int], tmp_path: Path) -> None:
    """A choice that is as wide as the longest text; two layers, of which the last hands its on."""
    directory = make_checkpoint(FAMILY, tmp_path, **changes)
    spec = mtpc.compile(
        directory, backend="eager", dtype="float64", spec_tokens=4, batch_buckets=(4,), **TINY
    )
    expected = DraftOracle(Oracle(FAMILY, directory))
    expected.page = PAGES["glm_moe_dsa"](expected.oracle.model, directory, layers)
    assert check_drafts(spec, expected, RAGGED, 12) >= 30
    assert runs(spec) == {(1 + layers, 1 + layers)}


@pytest.mark.slow
def test_without_the_entry_each_draft_chooses(compiled: Callable[..., Any]) -> None:
    spec = compiled("glm_moe_dsa", 4, "random", batch_buckets=(4,))
    assert runs(spec) == {(1 + 4, 1 + 4)}


def test_the_choice_matters(oracle: Callable[..., Any]) -> None:
    """The same weights without the entry draft something else."""
    anew, shared = (DraftOracle(oracle(name, "random")) for name in ("glm_moe_dsa", FAMILY))
    texts = [prompt for prompt in PROMPTS if len(prompt) > 1]
    pairs = [(anew.drafts(text, 4), shared.drafts(text, 4)) for text in texts]
    assert all(one[0] == other[0] for one, other in pairs)
    assert sum(one != other for one, other in pairs) >= 4


def test_text_equals_plain_decoding(
    compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    spec = compiled(FAMILY, 3, "random", batch_buckets=(4,))
    check_theorem(spec, oracle(FAMILY, "random"), max_examples=2)
    check_caches(spec, PROMPTS[7])


@pytest.mark.slow
def test_text_of_accepted_drafts(compiled: Callable[..., Any], oracle: Callable[..., Any]) -> None:
    """The trained model, whose drafts are accepted in part."""
    spec = compiled(FAMILY, 3, batch_buckets=(4,))
    check_theorem(spec, oracle(FAMILY), max_examples=2).check_all_happened()
    check_caches(spec, PROMPTS[7])


@pytest.mark.slow
def test_reuse_and_preemption(compiled: Callable[..., Any]) -> None:
    """Turns on a cached beginning, forks, and requests that wait for pages: text, drafts and rows
    of latents and indexer keys are those of fresh runs."""
    check_reuse(Conversations(compiled(FAMILY, 3, "random", batch_buckets=(4,))), 3)


def sampled(spec: Any, asks: list[Request], **options: Any) -> tuple[list[Any], Engine]:
    """Texts of requests that an engine of its own serves, with the drafts after each step."""
    engine = Engine(spec.program, changed(spec.options, **options), spec.engine.vocab_size)
    drafts: list[dict[int, list[int]]] = [{} for _ in asks]
    for ask in asks:
        engine.submit(ask)
    while engine.has_work:
        engine.step()
        for ask, seen in zip(asks, drafts, strict=True):
            if ask.slot is not None and ask.is_prefilled and ask.remaining_tokens:
                row = spec.program.shared["state.token_ids"][ask.slot].tolist()
                assert row[0] == ask.output_ids[-1]
                seen[len(ask.output_ids)] = row[1:]
    return [(ask.output_ids, seen) for ask, seen in zip(asks, drafts, strict=True)], engine


@pytest.mark.slow
def test_sampling(compiled: Callable[..., Any], sampling_oracle: Callable[..., Any]) -> None:
    """Text of plain sampling by seed; in company, from cached pages and after preemption, text and
    drafts are those of a request alone."""
    spec = compiled(FAMILY, 3, batch_buckets=(4,), sampling=True)
    names = ("temperature", "greedy", "hot", "everything", "top_p", "repetition")
    prompts = [PROMPTS[12] + [7, 8, 9, token] for token in range(3, 9)]

    def asks() -> list[Request]:
        pairs = zip(prompts, names, strict=True)
        return [Request(-1, list(p), 14, (), FILTERS[name]) for p, name in pairs]

    poison(spec)
    wanted = [sampled(spec, [ask], prefix_caching=False)[0][0] for ask in asks()]
    poison(spec)
    for _ in range(2):
        found, engine = sampled(spec, asks(), num_pages=26)
        for (text, seen), (plain, drafts) in zip(found, wanted, strict=True):
            assert text == plain
            both = seen.keys() & drafts.keys()
            assert both
            assert {count: seen[count] for count in both} == {c: drafts[c] for c in both}
        assert engine.scheduler.num_preemptions > 0 < engine.stats.reused_tokens
    oracle = sampling_oracle(FAMILY)
    for prompt, name, (text, _) in zip(prompts, names, wanted, strict=True):
        end = next((i + 1 for i, token in enumerate(text) if token == 1), len(text))
        assert text[:end] == oracle.generate(prompt, 14, FILTERS[name])
    assert 0 < sum(engine.stats.accepted) < sum(engine.stats.drafted)

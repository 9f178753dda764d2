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
from helpers.released import PAGES
from helpers.theorem import PROMPTS, check_caches, check_drafts, check_theorem
from helpers.tiny import make_checkpoint

import mtpc
from mtpc.capture.graph import operators

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


@pytest.mark.parametrize("spec_tokens", [1, 3, 4])
def test_drafts_equal_the_wiring(
    spec_tokens: int, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """Random weights, whose drafts rest on all that a row attends to; four requests at once."""
    spec = compiled(FAMILY, spec_tokens, "random", batch_buckets=(4,))
    assert check_drafts(spec, DraftOracle(oracle(FAMILY, "random")), RAGGED, 12) >= 30
    assert runs(spec) == {(2, 2)}  # The target's layer with an indexer, and the first draft.


@pytest.mark.parametrize(
    ("layers", "changes"), [(1, {"index_topk": 99}), (2, {"num_nextn_predict_layers": 2})]
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


def test_the_choice_matters(compiled: Callable[..., Any], oracle: Callable[..., Any]) -> None:
    """The same weights without the entry choose for each draft, and draft something else."""
    spec = compiled("glm_moe_dsa", 4, "random", batch_buckets=(4,))
    assert runs(spec) == {(1 + 4, 1 + 4)}
    anew, shared = (DraftOracle(oracle(name, "random")) for name in ("glm_moe_dsa", FAMILY))
    texts = [prompt for prompt in PROMPTS if len(prompt) > 1]
    pairs = [(anew.drafts(text, 4), shared.drafts(text, 4)) for text in texts]
    assert all(one[0] == other[0] for one, other in pairs)
    assert sum(one != other for one, other in pairs) >= 4


def test_text_equals_plain_decoding(
    compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    spec = compiled(FAMILY, 3, batch_buckets=(4,))
    check_theorem(spec, oracle(FAMILY), max_examples=2).check_all_happened()
    check_caches(spec, PROMPTS[7])

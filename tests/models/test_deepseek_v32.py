"""DeepSeek-V3.2: what its indexer adds to text and drafts (test_theorem, test_drafts)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.explained import explained
from helpers.families import TINY
from helpers.oracles import Oracle
from helpers.theorem import PROMPTS, check_theorem, poison

import mtpc
from mtpc.layout import Layout
from mtpc.layout.buffers import N, P
from mtpc.layout.slot_state import slot_state
from mtpc.models.families.deepseek_v32 import SparseLatentAttention
from mtpc.models.load import load

FAMILY = "deepseek_v32"


def test_the_choice_decides(oracle: Callable[..., Oracle]) -> None:
    """Rows beyond `index_topk` positions see fewer than all: attention to all is another model."""
    plain = oracle(FAMILY, "random")
    indexers = [layer.self_attn.indexer for layer in plain.model.get_decoder().layers]
    chosen = plain.hidden(PROMPTS[12])[0]
    for indexer in indexers:
        assert indexer.index_topk == 6
        indexer.index_topk = 99
    try:
        all_seen = plain.hidden(PROMPTS[12])[0]
    finally:
        for indexer in indexers:
            indexer.index_topk = 6
    torch.testing.assert_close(chosen[:6], all_seen[:6], rtol=1e-12, atol=1e-12)
    assert not torch.isclose(chosen[6:], all_seen[6:], rtol=1e-3).all(1).any()


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 64])
def test_other_choices(topk: int, tmp_path: Path) -> None:
    """A single position, and as many as a request can have: text as transformers decodes it."""
    directory = tiny.make_checkpoint(FAMILY, tmp_path, index_topk=topk)
    spec = mtpc.compile(
        directory, spec_tokens=2, backend="eager", dtype="float64", batch_buckets=(4,), **TINY
    )
    check_theorem(spec, Oracle(FAMILY, directory), max_examples=2)


def test_all_of_it_is_in_pages(checkpoint: Callable[..., Path]) -> None:
    """Latents and indexer keys: a request may begin with another's pages."""
    loaded = load(checkpoint(FAMILY, "random"), "bfloat16", True)
    layout = Layout(loaded.state_specs, {N: 1, P: 1})
    assert slot_state(layout) == ()


def test_a_prefix_is_used_again(
    compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """Indexer keys are shared with their pages: the second request reuses those of the first."""
    spec = compiled(FAMILY, 3)
    poison(spec)
    wanted = oracle(FAMILY).generate(PROMPTS[12], 8, stop=False)
    before = spec.stats.reused_tokens
    for reused in (0, 16):
        assert spec.generate(PROMPTS[12], 8, ignore_eos=True) == wanted
        assert spec.stats.reused_tokens - before == reused


def test_every_weight_has_a_recipe(checkpoint: Callable[..., Path]) -> None:
    """A warm start reads all weights, indexers included."""
    loaded = load(checkpoint(FAMILY, "random"), "bfloat16", needs_mtp=True)
    recipes = explained(loaded)
    assert recipes.keys() == loaded.weights().keys()
    assert all("inv_freq" in name for name, recipe in recipes.items() if recipe is None)


def test_layers_are_shared_not_copied(checkpoint: Callable[..., Path]) -> None:
    """Canonical attention in target and MTP layer holds transformers' parameters by their names."""
    loaded = load(checkpoint(FAMILY, "random"), None, needs_mtp=True)
    ours = [m for m in loaded.target.modules() if isinstance(m, SparseLatentAttention)]
    assert len(ours) == 2
    attention = loaded.mtp_layers[0].block.self_attn
    assert isinstance(attention, SparseLatentAttention)
    theirs = tiny.build_target(FAMILY).get_decoder().layers[0].self_attn
    assert attention.state_dict().keys() == theirs.state_dict().keys()

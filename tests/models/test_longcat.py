"""LongCat-Flash: zero experts, two caches a layer, embeddings of the MTP layer, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import eagle, longcat, tiny
from helpers.families import TINY
from helpers.oracles import DraftOracle, Oracle
from helpers.refused import check_refused
from helpers.theorem import PROMPTS, check_drafts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

import mtpc
from mtpc.errors import CheckpointError
from mtpc.models.families.longcat_flash import ZeroExperts
from mtpc.models.layer_pattern import find_pattern
from mtpc.models.load import load

FAMILY = "longcat_flash"
EAGER: dict[str, Any] = {**TINY, "backend": "eager", "batch_buckets": (2,)}


@torch.no_grad()
def test_zero_experts_are_the_identity() -> None:
    """Rows that chose none of them, some and nothing else, against transformers' own experts."""
    torch.manual_seed(0)
    config = transformers.LongcatFlashConfig(**longcat.CONFIG)
    module = LongcatFlashExperts(config).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.tensor([[0, 3, 2], [6, 1, 4], [5, 4, 6], [3, 5, 0]])
    x, weights = torch.randn(4, 64).double(), torch.rand(4, 3).double()
    found, wanted = ZeroExperts(module)(x, ids, weights), module(x, ids, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[2], x[2] * weights[2].sum(), rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_the_tiny_model_has_all_kinds_of_rows(oracle: Callable[..., Oracle]) -> None:
    """Else the theorem would say nothing of zero experts."""
    seen: set[int] = set()
    model = oracle(FAMILY, "random").model
    hooks = [
        layer.mlp.router.register_forward_hook(
            lambda module, args, out: seen.update((out[-1] >= 4).sum(1).tolist())
        )
        for layer in model.model.layers
    ]
    model(torch.tensor([PROMPTS[12]]))
    for hook in hooks:
        hook.remove()
    assert seen == {0, 1, 2, 3}


def test_a_layer_has_two_caches(checkpoint: Callable[..., Path]) -> None:
    """And the MTP layer one; the caches are those that its modules write."""
    loaded = load(checkpoint(FAMILY, "random"), None, True)
    assert [spec.name for spec in loaded.state_specs] == [f"kv.{i}.latent" for i in range(5)]
    layers = loaded.target.get_decoder().layers
    numbers = [attention.layer_idx for layer in layers for attention in layer.self_attn]
    assert [*numbers, loaded.mtp_layers[0].block.self_attn[0].layer_idx] == [0, 1, 2, 3, 4]


def test_layers_are_copied_with_both_caches(tmp_path: Path) -> None:
    """A layer copied k layers on has its caches 2 k on; later ones and the MTP layer's stay."""
    tiny.make_checkpoint(FAMILY, tmp_path, num_layers=6)
    pattern = find_pattern(load(tmp_path, None, True, headers_only=True), lambda name: None)
    assert pattern is not None
    assert (pattern.first, pattern.period, pattern.traced, pattern.total) == (0, 1, 4, 6)
    names = ("kv.6.latent", "kv.7.latent", "kv.8.latent", "model.layers.3.mlps.1.up_proj.weight")
    moved = ("kv.8.latent", "kv.9.latent", "kv.8.latent", "model.layers.4.mlps.1.up_proj.weight")
    assert tuple(pattern.shifted(name, 1) for name in names) == moved


def test_an_embedding_of_its_own(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A copy of the target's, as released, takes no memory of its own; another one is kept."""
    source = checkpoint(FAMILY, "random")
    for name, noise in (("copy", 0.0), ("own", 0.3)):
        loaded = load(longcat.with_own_embedding(source, tmp_path / name, noise), "float64", True)
        target = loaded.target.get_input_embeddings().weight
        own = loaded.mtp_layers[0].embedding.weight
        assert (own.data_ptr() == target.data_ptr()) == torch.equal(own, target) == (not noise)


@pytest.mark.slow
def test_drafts_of_an_embedding_of_its_own(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = longcat.with_own_embedding(checkpoint(FAMILY, "random"), tmp_path / "own", 0.3)
    spec = mtpc.compile(directory, spec_tokens=2, dtype="float64", **EAGER)
    drafts = DraftOracle(Oracle(FAMILY, directory))
    assert check_drafts(spec, drafts, [PROMPTS[4], PROMPTS[9]], 6) >= 2


@pytest.mark.slow
def test_an_object_of_transformers_class() -> None:
    """It holds projections for zero experts, which nothing reads."""
    torch.manual_seed(0)
    config = transformers.LongcatFlashConfig(**longcat.CONFIG)
    model = transformers.LongcatFlashForCausalLM(config).eval()
    assert len(model.model.layers[0].mlp.experts.gate_up_proj) == 7
    spec = mtpc.compile(model, spec_tokens=0, **EAGER)
    ids = torch.tensor([PROMPTS[9]])
    out = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=-1)
    assert spec.generate(PROMPTS[9], 8, ignore_eos=True) == out[0, len(PROMPTS[9]) :].tolist()


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"mla_scale_q_lora": False}, "has mla_scale_q_lora False; expected True"),
        ({"zero_expert_type": "drop"}, "has zero_expert_type 'drop'; expected 'identity'"),
        ({"router_bias": True}, "has router_bias True; expected False"),
        ({"hidden_act": "gelu"}, "has hidden_act 'gelu'; expected 'silu'"),
        ({"nextn_use_scmoe": True}, "has nextn_use_scmoe True; expected False"),
    ],
)
def test_configs_of_other_models(
    entries: dict[str, Any], said: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    check_refused(checkpoint(FAMILY, "random"), tmp_path / "other", entries, said)


def test_layers_that_an_eagle_head_may_name(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The decoder has two layers, and its config counts four."""
    entries = {**eagle.CONFIG, "eagle_config": None}
    entries["eagle_aux_hidden_state_layer_ids"] = [0, 1, 3]
    eagle.save_head(eagle.new_head(entries, 64), entries, tmp_path / "head")
    with pytest.raises(CheckpointError, match=r"are \[0, 1, 3\]; expected"):
        load(checkpoint(FAMILY, "random"), None, True, draft=tmp_path / "head")
    entries["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    eagle.save_head(eagle.new_head(entries, 64), entries, tmp_path / "fits")
    assert load(checkpoint(FAMILY, "random"), None, True, draft=tmp_path / "fits").captures_layers

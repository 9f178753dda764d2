"""What a rank holds, without other ranks: recipes, cut steps, and the rules that follow a cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.families import TINY
from helpers.plans import plan_of
from torch import Tensor

from mtpc.backends import make_backend
from mtpc.capture.graph import operators
from mtpc.errors import OptionError
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler
from mtpc.ranks.group import Ranks
from mtpc.weights.recipes import Packed, Rows, allocate, from_json, make, to_json

aten = torch.ops.aten
WHOLE = torch.arange(24.0).reshape(4, 6)


def compiler(directory: Path, rank: int, ranks: int = 2, spec_tokens: int = 2) -> StepCompiler:
    """That of one rank; it builds steps without the others."""
    loaded = load(str(directory), "float64", spec_tokens > 0)
    options = plan_of(spec_tokens=spec_tokens, batch_buckets=(2,), **TINY)
    return StepCompiler(loaded, options, make_backend("eager"), ranks=Ranks(rank, ranks, "0"))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_part_of_a_weight(dim: int) -> None:
    """Runs along either dimension, in memory of their own, and through JSON."""
    recipe = Rows(((0, 1), (2, 4)), "w", dim)
    part = make(recipe, lambda name: WHOLE)
    assert torch.equal(part, WHOLE.index_select(dim, torch.tensor([0, 2, 3])))
    assert part.untyped_storage().data_ptr() != WHOLE.untyped_storage().data_ptr()
    assert allocate(recipe, lambda name: WHOLE).shape == part.shape
    packed = Packed(recipe)
    assert from_json(to_json(packed)) == packed


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_is_cut(ranks: int, checkpoint: Callable[..., Path]) -> None:
    """Weights and caches by rank, two sums a layer, one message for each choice of tokens."""
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    for rank in (0, ranks - 1):
        built = compiler(checkpoint("deepseek_v3", "random"), rank, ranks)
        graph = built.rewritten(built.keys[0])
        named: dict[str, Tensor] = dict(graph.module.named_buffers(remove_duplicate=False))
        shapes[rank] = {n: tuple(t.shape) for n, t in named.items() if n.startswith("shard.")}
        found = Counter(op.overloadpacket.__name__ for _, op in operators(graph.graph))
        assert found["vocab_embedding"] == found["vocab_max"] == 3
        # A dense layer, an expert layer with shared experts, and the MTP layer twice.
        assert found["all_reduce"] == 1 + 2 + 2 + 2
        assert built.shared["kv.0.latent"].shape[-1] == 40, "latents are whole"
    assert shapes[0] == shapes[ranks - 1]
    assert shapes[0]["shard.lm_head_weight"] == (96 // ranks, 64)
    assert shapes[0]["shard.model_layers_1_mlp_experts_down_proj"] == (4, 64, 32 // ranks)


def test_rings_are_cut_by_heads(checkpoint: Callable[..., Path]) -> None:
    """As pages are; those of the MTP layer, too."""
    built = compiler(checkpoint("exaone_moe", "random"), 1, spec_tokens=1)
    caches = ("kv.0.ring_k", "kv.0.ring_v", "kv.1.k", "kv.1.v", "kv.2.ring_k", "kv.2.ring_v")
    assert {tuple(built.shared[name].shape[2:]) for name in caches} == {(1, 16)}
    built.rewritten(built.keys[0])


def test_a_table_is_cut_by_columns(checkpoint: Callable[..., Path]) -> None:
    """Of n-grams, whose rows are gathered before they stand side by side."""
    built = compiler(checkpoint("qwen4_exp", "random"), 1, spec_tokens=0)
    graph = built.rewritten(built.keys[0])
    (row,) = (node for node, op in operators(graph.graph) if op is aten.embedding.default)
    assert row.meta["val"].shape[1:] == (4, 6 // 2)
    (whole,) = row.users
    assert whole.target is torch.ops.mtpc.all_gather.default
    assert whole.meta["val"].shape[1:] == (4, 6)


def test_heads_of_latent_attention_are_cut(checkpoint: Callable[..., Path]) -> None:
    """In layers with two attentions and in the MTP layer; latents are whole."""
    built = compiler(checkpoint("longcat_flash", "random"), 1)
    graph = built.rewritten(built.keys[0])
    named: dict[str, Tensor] = dict(graph.module.named_buffers(remove_duplicate=False))
    blocks = ("model_layers_0_self_attn_0", "model_layers_1_self_attn_1", "mtp_0_block_self_attn_0")
    for block in blocks:
        assert named[f"shard.{block}_kv_b_proj_weight"].shape == (4 * (16 + 12) // 2, 32)
        assert named[f"shard.{block}_o_proj_weight"].shape == (64, 4 * 12 // 2)
    assert {built.shared[f"kv.{i}.latent"].shape[-1] for i in range(5)} == {40}
    found = Counter(op.overloadpacket.__name__ for _, op in operators(graph.graph))
    # An attention and a feed-forward, four times in the target, with two layers' experts beside
    # them, and twice in drafts.
    assert found["all_reduce"] == 4 * 2 + 2 + 2 * 2
    with pytest.raises(OptionError, match="layer 0 has 4 attention heads for 3 ranks"):
        compiler(checkpoint("longcat_flash", "random"), 0, 3)

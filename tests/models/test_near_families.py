"""Families whose parts are others': their released configs, and what is theirs alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import longcat, qwen4
from helpers.explained import explained
from helpers.families import NEAR_FAMILIES, TINY
from helpers.oracles import Oracle
from helpers.theorem import PROMPTS
from helpers.tiny import family_of, with_entries

import mtpc
from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.integrations.draft import TracedDraft
from mtpc.models.hf import model_class
from mtpc.models.load import load

NAMED_BY_TRANSFORMERS = (
    "rope_parameters",
    "mlp_layer_types",
    "indexer_types",
    "layers_block_type",
    "mtp_layers_block_type",
    "dtype",
)
"""Entries that transformers writes, and released configs say in other words or not at all."""
RELEASED: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {
        "first_k_dense_replace": 1,
        "rope_theta": 2.5e4,
        "rope_scaling": None,
        "partial_rotary_factor": 1.0,
        "topk_method": "noaux_tc",
        "torch_dtype": "float32",
    },
    "glm_moe_dsa": {
        "first_k_dense_replace": 1,
        "rope_parameters": {"rope_theta": 2.5e4, "rope_type": "default"},
        "head_dim": 24,  # Of a query without its rotated part, in GLM-5.2.
        "index_topk_freq": 2,
        "index_skip_topk_offset": 1,
        "index_topk_pattern": None,
        "index_share_for_mtp_iteration": True,
        "indexer_rope_interleave": True,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "dtype": "float32",
    },
    "ernie4_5_moe": {
        "rope_theta": 2.5e4,
        "moe_gate": "topk",
        "moe_use_aux_free": True,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
        "torch_dtype": "float32",
    },
    "exaone_moe": {
        "rope_parameters": {"rope_theta": 2.5e4, "rope_type": "default"},
        "first_k_dense_replace": 1,
        "is_moe_layer": [False, True],
        "scoring_func": "sigmoid",
        "sliding_window_pattern": "LG",
        "dtype": "float32",
    },
    "nemotron_h": {
        "hybrid_override_pattern": "ME*-M",
        "mtp_hybrid_override_pattern": "*E",
        "num_hidden_layers": 5,
        "norm_eps": 1e-5,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "mamba_proj_bias": False,
        "torch_dtype": "float32",
    },
    "longcat_flash": longcat.RELEASED,
    "qwen4_exp": qwen4.RELEASED,
}
"""Entries of the authors' config.json, with the sizes of the tiny models."""


def made_of(loaded: Any) -> Any:
    """The modules and the frequencies of a loaded model, without its weights."""
    kinds = [(name, type(module).__name__) for name, module in loaded.target.named_modules()]
    rotary = getattr(loaded.target.get_decoder(), "rotary_emb", None)
    return kinds, rotary and rotary.inv_freq.tolist()


@pytest.mark.parametrize("family", NEAR_FAMILIES)
def test_released_entries(family: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The authors' config.json builds the model that transformers' own entries build."""
    plain = checkpoint(family, "random")
    own = {"rope_parameters": {"rope_theta": 2.5e4, "rope_type": "default"}}
    usual = load(with_entries(plain, tmp_path / "own", (), **own), "float32", True)
    directory = with_entries(plain, tmp_path / "new", NAMED_BY_TRANSFORMERS, **RELEASED[family])
    released = load(directory, None, needs_mtp=True)
    assert made_of(released) == made_of(usual)
    for mine, theirs in zip(released.mtp_layers, usual.mtp_layers, strict=True):
        assert [type(m) for m in mine.modules()] == [type(m) for m in theirs.modules()]
    recipes = explained(released)
    assert recipes.keys() == released.weights().keys()
    assert all("inv_freq" in name for name, recipe in recipes.items() if recipe is None)


@pytest.mark.slow
@pytest.mark.parametrize("spec_tokens", [0, 3])
@pytest.mark.parametrize("family", [*NEAR_FAMILIES, "glm4v_moe"])
def test_text_is_transformers_generation(
    family: str, spec_tokens: int, checkpoint: Callable[..., Path], cpu_cache: Path
) -> None:
    """In float32, compiled for the cpu, by transformers' own caches."""
    directory = checkpoint(family)
    options = {**TINY, "batch_buckets": (2,), "backend": "cpu", "cache_dir": cpu_cache}
    spec = mtpc.compile(directory, spec_tokens=spec_tokens, dtype="float32", **options)
    model = model_class(family_of(family)).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    for prompt in (PROMPTS[0], PROMPTS[4], PROMPTS[12]):
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=-1)
        assert spec.generate(prompt, 16, ignore_eos=True) == out[0, len(prompt) :].tolist()
    assert spec_tokens == 0 or sum(spec.stats.accepted) > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", [*NEAR_FAMILIES, "glm4v_moe"])
def test_drafts_change_no_text_in_bfloat16(
    family: str, checkpoint: Callable[..., Path], cpu_cache: Path
) -> None:
    """Compiled for the cpu, with all passes."""
    options = {**TINY, "batch_buckets": (2,), "backend": "cpu", "cache_dir": cpu_cache}
    plain, drafted = (
        mtpc.compile(checkpoint(family), spec_tokens=k, dtype="bfloat16", **options) for k in (0, 3)
    )
    prompts = [PROMPTS[0], PROMPTS[4], PROMPTS[12]]
    found = drafted.generate(prompts, 24, ignore_eos=True)
    assert found == plain.generate(prompts, 24, ignore_eos=True)
    assert 0 < sum(drafted.stats.accepted) < sum(drafted.stats.drafted)


def test_a_shared_choice_decides(oracle: Callable[..., Oracle]) -> None:
    """GLM-5: a layer without an indexer attends to fewer positions than all, as the one before."""
    plain = oracle("glm_moe_dsa", "random")
    first, second = (layer.self_attn for layer in plain.model.get_decoder().layers)
    assert (first.indexer.index_topk, second.indexer) == (6, None)
    chosen = plain.hidden(PROMPTS[12])[0]
    first.indexer.index_topk = 99
    try:
        all_seen = plain.hidden(PROMPTS[12])[0]
    finally:
        first.indexer.index_topk = 6
    assert not torch.isclose(chosen[6:], all_seen[6:], rtol=1e-3).all(1).any()


def test_the_first_layer_has_an_indexer(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    """GLM-5: indexers of another order than the tensors say are named."""
    entries = {"indexer_types": ["shared", "full"]}
    directory = with_entries(checkpoint("glm_moe_dsa", "random"), tmp_path, (), **entries)
    with pytest.raises(CheckpointError, match="indexer"):
        load(directory, None, needs_mtp=True)


def test_an_mtp_layer_that_sees_the_whole_text(
    tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    """K-EXAONE 2.0 may have one, which rotates, and transformers' full attention does not."""
    entries = {"mtp_layer_types": ["full_attention"]}
    directory = with_entries(checkpoint("exaone_moe", "random"), tmp_path, (), **entries)
    load(directory, None, needs_mtp=False)
    with pytest.raises(UnsupportedModelError, match="attention type 'full_attention'"):
        load(directory, None, needs_mtp=True)


@pytest.mark.parametrize("name", ["sliding_windows", "mtp_sliding_windows", "swiglu_limits"])
def test_entries_that_transformers_does_not_read(
    name: str, tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    """K-EXAONE 2.0: what transformers would leave out is refused."""
    entries = {name: [4, 4]}
    directory = with_entries(checkpoint("exaone_moe", "random"), tmp_path, (), **entries)
    with pytest.raises(UnsupportedModelError, match=f"the config has {name}"):
        load(directory, None, needs_mtp=True)


def test_an_mtp_layer_of_other_parts(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    """Nemotron 3: the error gives the entry, what it holds, what it may hold, and what to do."""
    entries = {"mtp_layers_block_type": ["full_attention", "mlp"]}
    directory = with_entries(checkpoint("nemotron_h", "random"), tmp_path, (), **entries)
    load(directory, None, needs_mtp=False)
    said = r"mtp_layers_block_type is .*'mlp'.*expected .*'moe'.*use spec_tokens=0"
    with pytest.raises(UnsupportedModelError, match=said):
        load(directory, None, needs_mtp=True)


def test_no_norm_for_a_host(checkpoint: Callable[..., Path]) -> None:
    """ERNIE: the MTP layer's norm is the target's, which a draft inside another server lacks."""
    with pytest.raises(UnsupportedModelError, match="no final norm of its own"):
        TracedDraft(checkpoint("ernie4_5_moe", "random"), lambda site: torch.nn.Identity())

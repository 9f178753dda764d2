"""What `save_checkpoint` writes is what loaders read, under the names that were released."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import tiny
from helpers.families import EACH_FAMILY
from safetensors.torch import load_file

from mtpc.errors import CheckpointError
from mtpc.models.load import load
from mtpc.models.save import save_checkpoint

_INDEXER = ("layers.0.self_attn.indexer.index_qk_proj", "layers.0.mlp.experts.3.down_proj")
SOME_NAMES = {
    "mimo": ("model.mtp_layers.0.", ("input_proj", "token_layernorm", "self_attn.q_proj")),
    "glm4_moe": ("model.layers.2.", ("eh_proj", "shared_head.norm", "mlp.experts.3.down_proj")),
    "deepseek_v3": ("model.layers.2.", ("enorm", "hnorm", "mlp.experts.0.gate_proj")),
    "qwen3_next": ("mtp.", ("fc", "norm", "layers.0.mlp.experts.3.down_proj")),
    "mimo_v2": ("model.mtp.layers.2.", ("eh_proj", "final_layernorm", "pre_mlp_layernorm")),
    "step3p7": (
        "model.layers.4.",
        ("eh_proj", *(f"transformer.shared_head.{n}" for n in ("norm", "output")), "moe.gate_proj"),
    ),
    "deepseek_v32": ("model.layers.2.", ("eh_proj", "self_attn.indexer.wk", "mlp.gate")),
    "glm_moe_dsa": ("model.layers.2.", ("eh_proj", "self_attn.indexer.wq_b", "mlp.gate")),
    "ernie4_5_moe": ("model.mtp_", ("emb_norm.0", "linear_proj.0", "block.0.mlp.up_proj")),
    "nemotron_h": ("mtp.", ("layers.0.eh_proj", "layers.1.mixer.experts.3.up_proj")),
    "longcat_flash": ("model.mtp.", ("layers.0.enorm.m", "layers.0.eh_proj", "norm")),
    "qwen4_exp": (
        "mtp.",
        ("fc_hidden", "pre_fc_norm_hidden", "hyper_connection_mixer.hc_norm", *_INDEXER),
    ),
    "exaone_moe": ("mtp.", ("fc", "norm", "layers.0.self_attn.q_norm")),
    "glm4_moe_lite": ("model.layers.2.", ("hnorm", "self_attn.kv_b_proj", "mlp.gate")),
    "deepseek_v4": ("mtp.0.", ("e_proj", "attn.kv_norm", "ffn.experts.3.w2")),
}
"""Of the released checkpoints: the prefix of the last MTP layer, and a few names."""


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_public_names_and_the_way_back(family: str, tmp_path: Path) -> None:
    target = tiny.build_target(family)
    layers = tiny.build_mtp_layers(family, target)
    tiny.save_checkpoint(family, target, layers, tmp_path)
    prefix, names = SOME_NAMES[family]
    stored = load_file(tmp_path / "model.safetensors")
    assert {f"{prefix}{name}.weight" for name in names} <= stored.keys()
    loaded = load(tmp_path, "float32", needs_mtp=True)
    for found, layer in zip(loaded.mtp_layers, layers, strict=True):
        state = found.state_dict()
        assert state.keys() == layer.state_dict().keys()
        for name, tensor in layer.state_dict().items():
            assert torch.equal(state[name], tensor), name
    for name, tensor in target.state_dict().items():
        assert torch.equal(loaded.target.state_dict()[name], tensor), name


def test_a_sharded_model_gets_one_more_shard(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The index names all; a shard that it names and that is gone is an error with its name."""
    target = tiny.build_target("glm4_moe")
    layer = tiny.build_mtp_layer("glm4_moe", target)
    write = target.save_pretrained
    monkeypatch.setattr(target, "save_pretrained", lambda path: write(path, max_shard_size="60KB"))
    save_checkpoint(target, (layer,), tmp_path, tiny.family_of("glm4_moe"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    sizes = [t.nbytes for shard in shards for t in load_file(tmp_path / shard).values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    loaded = load(tmp_path, "float32", needs_mtp=True)
    assert torch.equal(loaded.mtp_layers[0].projection.weight, layer.projection.weight)
    (tmp_path / shards[1]).unlink()
    with pytest.raises(CheckpointError, match=f"{shards[1]} is named in the index but missing"):
        load(tmp_path, "float32", needs_mtp=True)


def test_without_mtp_layers(tmp_path: Path) -> None:
    target = tiny.build_target("mimo")
    save_checkpoint(target, (), tmp_path, tiny.family_of("mimo"))
    assert load(tmp_path, None, needs_mtp=False).mtp_layers == ()
    with pytest.raises(CheckpointError, match="use spec_tokens=0 to decode without drafts"):
        load(tmp_path, None, needs_mtp=True)

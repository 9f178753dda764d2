"""One factory for the tiny models of all tests: saved checkpoints with MTP layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from mtpc.models import FAMILIES
from mtpc.models.hf import MTPLayer

_COMMON: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=512,
    num_nextn_predict_layers=1,
    eos_token_id=1,
    bos_token_id=0,
    pad_token_id=None,
    tie_word_embeddings=False,
    initializer_range=0.08,
)
_MOE: dict[str, Any] = dict(
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
CONFIGS: dict[str, dict[str, Any]] = {
    "mimo": {**_COMMON, "num_key_value_heads": 2},
    "glm4_moe": {**_COMMON, **_MOE, "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True},
    "deepseek_v3": {
        **_COMMON,
        **_MOE,
        "n_group": 2,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
    },
}


def family_of(name: str):  # type: ignore[no-untyped-def]
    """The family table's row of this name."""
    return next(f for f in FAMILIES if f.name == name)


def build_target(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random float32 target model of a family, in eval mode."""
    torch.manual_seed(seed)
    family = family_of(name)
    config = getattr(transformers, family.hf_config_class)(**{**CONFIGS[name], **changes})
    model = getattr(transformers, family.hf_class)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def build_mtp_layer(name: str, target: Any, seed: int = 1) -> MTPLayer:
    """A random MTP layer that fits a target."""
    torch.manual_seed(seed)
    family = family_of(name)
    sample = target.get_decoder().layers[-1]
    block = type(sample)(family.block_config(target.config), target.config.num_hidden_layers)
    layer = MTPLayer(family.wiring, target.config, block, type(sample.input_layernorm))
    std = target.config.initializer_range
    with torch.no_grad():
        for parameter_name, parameter in layer.named_parameters():
            if "norm" not in parameter_name:
                nn.init.normal_(parameter, std=std)
    return layer.eval()


def save_checkpoint(name: str, target: Any, layer: MTPLayer | None, directory: Path) -> Path:
    """Write a checkpoint in the family's public format, MTP tensors under their released names."""
    target.save_pretrained(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    if layer is not None:
        tensors.update(_mtp_tensors(name, target, layer))
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = list(family_of(name).architectures)[:1]
    config["num_nextn_predict_layers"] = 0 if layer is None else 1
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _mtp_tensors(name: str, target: Any, layer: MTPLayer) -> dict[str, torch.Tensor]:
    family = family_of(name)
    prefix = family.layer_prefix(target.config.num_hidden_layers, 0)
    joints = {
        "embedding_norm": family.wiring.embedding_norm,
        "hidden_norm": family.wiring.hidden_norm,
        "projection": family.wiring.projection,
        "final_norm": family.wiring.final_norm,
    }
    out = {}
    for key, tensor in layer.state_dict().items():
        stem, _, leaf = key.rpartition(".")
        if stem in joints:
            out[f"{prefix}{joints[stem]}.{leaf}"] = tensor
        elif key.endswith("experts.gate_up_proj"):
            for i, rows in enumerate(tensor):
                gate, up = rows.chunk(2)
                base = f"{prefix}{key.removeprefix('block.').removesuffix('gate_up_proj')}{i}."
                out[base + "gate_proj.weight"], out[base + "up_proj.weight"] = gate, up
        elif key.endswith("experts.down_proj"):
            for i, rows in enumerate(tensor):
                base = f"{prefix}{key.removeprefix('block.').removesuffix('down_proj')}{i}."
                out[base + "down_proj.weight"] = rows
        else:
            out[prefix + key.removeprefix("block.")] = tensor
    return {k: v.detach().clone().contiguous() for k, v in out.items()}


def make_checkpoint(
    name: str, directory: Path, seed: int = 0, mtp: bool = True, **changes: Any
) -> Path:
    """A random checkpoint of a family, with or without MTP layer."""
    target = build_target(name, seed, **changes)
    layer = build_mtp_layer(name, target, seed + 1) if mtp else None
    return save_checkpoint(name, target, layer, directory)

"""Tiny models of all families, and their checkpoints with random weights and MTP layers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from helpers import assistant, eagle, longcat, qwen4
from helpers.families import ASSISTED, DRAFTED
from mtpc.models import FAMILIES
from mtpc.models.hf import MTPLayer, model_class
from mtpc.models.load import find_family
from mtpc.models.mtp_layers import build_mtp_layer as new_mtp_layer
from mtpc.models.read_config import config_class
from mtpc.models.save import save_checkpoint as write

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
_GATED_DELTA: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention"],
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
)
_QWEN_MOE: dict[str, Any] = dict(
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    num_experts=4,
    num_experts_per_tok=2,
)


def _step3p7(layers: int) -> dict[str, Any]:
    """A multimodal config like released ones, whose lists have entries for the MTP layers."""
    full, sliding, dense, sparse = "full_attention", "sliding_attention", "dense", "sparse"
    text = {
        **_COMMON,
        "pad_token_id": 0,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": layers,
        "layer_types": [full, sliding, sliding, sliding, full, sliding][: 3 + layers],
        "mlp_layer_types": [dense, dense, sparse, dense, sparse, dense][: 3 + layers],
        "rope_theta": [1e5, 1e4, 1e4, 1e4, 1e5, 1e4][: 3 + layers],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5, 1.0][: 3 + layers],
        "swiglu_limits": [0.0, 0.0, 0.2] + [0.0] * layers,
        "swiglu_limits_shared": [0.0, 0.0, 0.3] + [0.0] * layers,
        "num_sliding_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 6,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_router_scaling_factor": 1.5,
    }
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {"text_config": text, "vision_config": {**vision, "image_size": 28, "patch_size": 14}}


def _step3p5(layers: int) -> dict[str, Any]:
    """Step-3.5-Flash's config, with the entries that the released one has."""
    text = dict(_step3p7(layers)["text_config"])
    text["num_attention_groups"] = text.pop("num_key_value_heads")
    text["attention_other_setting"] = {
        "num_attention_heads": text.pop("num_sliding_attention_heads")
    }
    text["moe_num_experts"] = text.pop("n_routed_experts")
    text["moe_top_k"] = text.pop("num_experts_per_tok")
    sparse = [i for i, kind in enumerate(text.pop("mlp_layer_types")) if kind == "sparse"]
    return {**text, "moe_layers_enum": ",".join(map(str, sparse))}


def _glm4v_moe() -> dict[str, Any]:
    """A multimodal config, whose rotary embedding has three grids."""
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    }
    text = {**_COMMON, **_MOE, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": rope}
    sizes = {"hidden_size": 16, "out_hidden_size": 64, "intermediate_size": 24}
    vision = {**sizes, "depth": 1, "num_heads": 2, "image_size": 16, "patch_size": 4}
    return {"text_config": text, "vision_config": vision}


_LATENT: dict[str, Any] = dict(
    n_group=2,
    topk_group=1,
    num_key_value_heads=4,
    kv_lora_rank=32,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=12,
)
_DENSE: dict[str, Any] = {
    **{k: v for k, v in _COMMON.items() if k != "num_nextn_predict_layers"},
    **dict(num_hidden_layers=4, num_key_value_heads=2, head_dim=16),
}
_KINDS = ("sliding", "full", "sliding", "sliding", "full")
_GEMMA4: dict[str, Any] = {
    **{k: v for k, v in _COMMON.items() if k != "num_nextn_predict_layers"},
    **dict(num_hidden_layers=5, num_key_value_heads=2, head_dim=16, global_head_dim=24),
    **dict(sliding_window=6, pad_token_id=0, final_logit_softcapping=4.0),
    **dict(tie_word_embeddings=True),
    "layer_types": [f"{kind}_attention" for kind in _KINDS],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma4": {
        **_GEMMA4,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
    },
    "gemma4_unified": {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4@experts": {
        **_GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "llama": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "mimo": {**_COMMON, "num_key_value_heads": 2},
    "glm4_moe": {**_COMMON, **_MOE, "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True},
    "deepseek_v3": {**_COMMON, **_MOE, **_LATENT},
    "deepseek_v32": {
        **_COMMON,
        **_MOE,
        **_LATENT,
        "index_topk": 6,
        "index_n_heads": 16,
        "index_head_dim": 12,
    },
    "glm4_moe_lite": {**_COMMON, **_MOE, **_LATENT, "mlp_layer_types": ["dense", "sparse"]},
    "glm_moe_dsa": {
        **_COMMON,
        **_MOE,
        **_LATENT,
        "indexer_types": ["full", "shared"],
        "index_topk": 6,
        "index_n_heads": 16,
        "index_head_dim": 12,
    },
    "ernie4_5_moe": {
        **_COMMON,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 32,
        "moe_num_experts": 4,
        "moe_k": 2,
        "tie_word_embeddings": True,
    },
    "exaone_moe": {
        **_COMMON,
        **_QWEN_MOE,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 6,
    },
    "nemotron_h": {
        **{k: v for k, v in _COMMON.items() if k != "num_hidden_layers"},
        **_MOE,
        "hybrid_override_pattern": "ME*-M",
        "mtp_hybrid_override_pattern": "*E",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_shared_expert_intermediate_size": 32,
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "longcat_flash": longcat.CONFIG,
    "qwen4_exp": {**_COMMON, **_GATED_DELTA, **_QWEN_MOE, **qwen4.CONFIG},
    "qwen3_next": {
        **_COMMON,
        **_GATED_DELTA,
        **_QWEN_MOE,
        "layer_types": ["full_attention", "linear_attention"],
    },
    "qwen3_5": {**_COMMON, **_GATED_DELTA, "mtp_num_hidden_layers": 1},
    "qwen3_5_moe": {**_COMMON, **_GATED_DELTA, **_QWEN_MOE, "mtp_num_hidden_layers": 1},
    "mimo_v2": {
        **_COMMON,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "num_key_value_heads": 1,
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": 6,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v4": {
        **{k: v for k, v in _COMMON.items() if k != "intermediate_size"},
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
        "compress_rates": {
            "compressed_sparse_attention": 2,
            "heavily_compressed_attention": 5,
        },
        "sliding_window": 6,
        "index_topk": 3,
        "index_n_heads": 16,
        "index_head_dim": 12,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 12,
        "swiglu_limit": 0.5,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
    "step3p5": _step3p5(2),
    "step3p5@3": _step3p5(3),
    "glm4v_moe": _glm4v_moe(),
    "step3p7": _step3p7(2),
    "step3p7@3": _step3p7(3),
}
CONFIGS["glm_moe_dsa@shared"] = {
    **CONFIGS["glm_moe_dsa"],
    "index_share_for_mtp_iteration": True,
}
CONFIGS["mimo@2"] = {**CONFIGS["mimo"], "num_nextn_predict_layers": 2}
CONFIGS["mimo_v2@heads"] = {**CONFIGS["mimo_v2"], "num_key_value_heads": 2}


OWN = {"step3p5": ("head",), "step3p7": ("head",)}
"""Embeddings and heads that MTP layers store in released checkpoints of these families."""


def family_of(name: str):  # type: ignore[no-untyped-def]
    """The family of a model's name, which may end in "@" and a variant."""
    name = name.partition("@")[0]
    known = {family.name: family.architectures[0] for family in FAMILIES}
    return find_family([known.get(name) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]])


def text_config(target: Any) -> Any:
    """The language model's config."""
    return target.config.get_text_config(decoder=True)


def num_layers(name: str) -> int:
    """MTP layers of a tiny model."""
    config = CONFIGS[name]
    return config.get("text_config", config).get("num_nextn_predict_layers", 1)


def build_target(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random float32 target model of a family, in eval mode."""
    torch.manual_seed(seed)
    family = family_of(name)
    config = config_class(family)(**{**CONFIGS[name], **changes})
    model = model_class(family)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if is_norm(parameter_name):
                spread(parameter)
            elif ".ple." in parameter_name and "_proj" not in parameter_name:
                parameter.normal_(std=0.5)  # The convolution begins with zeros.
            elif parameter.dim() == 1 or parameter_name.endswith("_bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.4)
            if buffer_name.endswith("tid2eid"):  # Experts by token id; a token's are distinct.
                choice = torch.rand(len(buffer), model.config.n_routed_experts).argsort(1)
                buffer.copy_(choice[:, : buffer.shape[1]])
    return model


def is_norm(name: str) -> bool:
    """Whether a parameter is a norm's weight."""
    *path, leaf = (part for part in name.split(".") if not part.isdigit())
    return leaf == "weight" and "norm" in path[-1]


def spread(weight: torch.Tensor) -> None:
    """Move a norm's weights far from their initial value, 0 or 1, each in another way.

    A norm with equal weights does not change normalised values, so it would hide which of two norms
    a model applies.
    """
    weight.add_(torch.empty_like(weight).uniform_(-0.6, 0.9))


def build_mtp_layer(
    name: str, target: Any, seed: int = 1, index: int = 0, own: Sequence[str] = ()
) -> MTPLayer:
    """A random MTP layer that fits a target; `own` of "embedding" and "head" are its own."""
    torch.manual_seed(seed)
    own = own or OWN.get(name.partition("@")[0], ())
    layer = new_mtp_layer(family_of(name), target, index, own)
    std = text_config(target).initializer_range
    with torch.no_grad():
        for parameter_name, parameter in layer.named_parameters():
            if is_norm(parameter_name):
                spread(parameter)
            elif "norm" not in parameter_name:
                nn.init.normal_(parameter, std=std)
            if "scale" in parameter_name:
                parameter.add_(1)
    return layer.eval()


def build_mtp_layers(
    name: str, target: Any, seed: int = 1, own: Sequence[str] = ()
) -> list[MTPLayer]:
    """All MTP layers that a tiny model has."""
    count = text_config(target).num_nextn_predict_layers
    return [build_mtp_layer(name, target, seed + i, i, own) for i in range(count)]


def save_checkpoint(name: str, target: Any, layers: Sequence[MTPLayer], directory: Path) -> Path:
    """Write a checkpoint in the family's public format, MTP tensors under their released names."""
    return write(target, layers, directory, family_of(name))


def make_checkpoint(
    name: str, directory: Path, seed: int = 0, mtp: bool = True, **changes: Any
) -> Path:
    """A random checkpoint of a family, with or without MTP layer.

    Of a family in `DRAFTED` or `ASSISTED`, its drafter is in the directory `draft`.
    """
    target, layers = build_target(name, seed, **changes), list[MTPLayer]()
    if name in DRAFTED and mtp:
        eagle.save_head(eagle.new_head(eagle.CONFIG, 64), eagle.CONFIG, directory / "draft")
    elif name in ASSISTED and mtp:
        assistant.save_assistant(assistant.new_assistant(name), directory / "draft")
    elif mtp:
        layers = build_mtp_layers(name, target, seed + 1)
    return save_checkpoint(name, target, layers, directory)


def with_entries(source: Path, directory: Path, drop: tuple[str, ...], **entries: Any) -> Path:
    """A copy of a checkpoint whose config.json has some entries removed and others added."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    path = directory / "config.json"
    config = {n: v for n, v in json.loads(path.read_text()).items() if n not in drop}
    path.write_text(json.dumps({**config, **entries}))
    return directory


def drafter(directory: Path) -> dict[str, Path]:
    """The option `draft` for a checkpoint of `make_checkpoint`, if it has a drafter."""
    return {"draft": directory / "draft"} if (directory / "draft").is_dir() else {}


def apart(full: Path, directory: Path, rename: tuple[str, str] = ("", "")) -> tuple[Path, Path]:
    """Split a checkpoint in two: the target without MTP layers, and a directory with only these."""
    target, draft = directory / "target", directory / "draft"
    shutil.copytree(full, target)
    draft.mkdir()
    tensors = load_file(full / "model.safetensors")
    config = json.loads((full / "config.json").read_text())
    layers = config["num_hidden_layers"]
    starts = ("model.mtp_layers.", f"model.layers.{layers}.")
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(starts)}
    rest = {name: tensor for name, tensor in tensors.items() if name not in own}
    save_file(rest, target / "model.safetensors", metadata={"format": "pt"})
    own = {name.replace(*rename): tensor for name, tensor in own.items()}
    save_file(own, draft / "model.safetensors", metadata={"format": "pt"})
    (draft / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    config["num_nextn_predict_layers"] = 0
    (target / "config.json").write_text(json.dumps(config))
    return target, draft

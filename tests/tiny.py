"""One factory for the tiny models of all tests: saved checkpoints with MTP layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from mtpc.models import FAMILIES
from mtpc.models.hf import MTPLayer
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
    "qwen3_next": {
        **_COMMON,
        **_GATED_DELTA,
        **_QWEN_MOE,
        "layer_types": ["full_attention", "linear_attention"],
    },
    "qwen3_5": {**_COMMON, **_GATED_DELTA, "mtp_num_hidden_layers": 1},
    "qwen3_5_moe": {**_COMMON, **_GATED_DELTA, **_QWEN_MOE, "mtp_num_hidden_layers": 1},
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
    return write(target, () if layer is None else (layer,), directory, family_of(name))


def make_checkpoint(
    name: str, directory: Path, seed: int = 0, mtp: bool = True, **changes: Any
) -> Path:
    """A random checkpoint of a family, with or without MTP layer."""
    target = build_target(name, seed, **changes)
    layer = build_mtp_layer(name, target, seed + 1) if mtp else None
    return save_checkpoint(name, target, layer, directory)


def _cyclic_text(num_rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Token rows [B, L], mostly predictable: a fixed successor per token, and 10 % noise."""
    successor = torch.randperm(94, generator=torch.Generator().manual_seed(7)) + 2
    rows = [torch.randint(2, 96, (num_rows,), generator=generator)]
    for _ in range(length - 1):
        noise = torch.randint(2, 96, (num_rows,), generator=generator)
        keep = torch.rand(num_rows, generator=generator) > 0.1
        rows.append(torch.where(keep, successor[rows[-1] - 2], noise))
    return torch.stack(rows, 1)


def train(name: str, target: Any, layer: MTPLayer, steps: int = 18) -> None:
    """A few seconds of training of target and MTP layer: drafts are then accepted in part."""
    generator = torch.Generator().manual_seed(3)
    decoder, head = target.get_decoder(), target.get_output_embeddings()
    parameters = [*target.parameters(), *layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    target.set_attn_implementation("eager")
    for _ in range(steps):
        ids = _cyclic_text(8, 24, generator)
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
        loss = nn.functional.cross_entropy(head(hidden)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        features = run_mtp_uncached(target, layer, ids[:, 1:], hidden[:, :-1])
        logits = head(features)[:, :-1].flatten(0, 1)
        loss = loss + nn.functional.cross_entropy(logits, ids[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def run_mtp_uncached(
    target: Any, layer: MTPLayer, ids: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """The MTP layer over whole rows [B, L] with transformers' own causal attention, no cache."""
    positions = torch.arange(ids.shape[1])[None]
    embedding = target.get_input_embeddings()(ids)
    hidden = layer.join(embedding, features, positions.expand_as(ids))
    mask = torch.full((ids.shape[1], ids.shape[1]), float("-inf"), dtype=hidden.dtype).triu(1)
    hidden = layer.block(
        hidden,
        attention_mask=mask[None, None],
        position_ids=positions,
        position_embeddings=rotate(target, hidden, positions),
    )
    return layer.final_norm(hidden)


def rotate(target: Any, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
    """Rotary embedding of text at positions [1, L]; Qwen3.5 wants them for three grids."""
    rotary = target.get_decoder().rotary_emb
    return rotary(hidden, positions.expand(3, 1, -1) if _has_grids(rotary) else positions)


def _has_grids(rotary: Any) -> bool:
    return hasattr(rotary, "mrope_section")


def make_trained_checkpoint(name: str, directory: Path, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint trained for seconds, so that drafts are accepted in part."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    target = build_target(name, seed, **eager, **changes)
    layer = build_mtp_layer(name, target, seed + 1)
    train(name, target, layer)
    return save_checkpoint(name, target, layer, directory)


@torch.no_grad()
def make_full_acceptance_checkpoint(directory: Path, seed: int = 0) -> Path:
    """A mimo checkpoint whose every draft is right: both models map a token to its successor.

    Attention and feed-forward write nothing (o_proj and down_proj are zero), the head is the
    permuted embedding, and the MTP projection passes on the token embedding alone ([0 | I] for
    the concat [hidden, embedding]).
    """
    target = build_target("mimo", seed)
    layer = build_mtp_layer("mimo", target, seed + 1)
    for block in (*target.get_decoder().layers, layer.block):
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    embedding = target.get_input_embeddings().weight
    embedding.copy_(torch.nn.functional.normalize(torch.randn_like(embedding), dim=1))
    target.get_output_embeddings().weight.copy_(embedding[torch.randperm(embedding.shape[0])])
    target.get_decoder().norm.weight.fill_(1)
    hidden = embedding.shape[1]
    layer.projection.weight.copy_(torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1))
    return save_checkpoint("mimo", target, layer, directory)

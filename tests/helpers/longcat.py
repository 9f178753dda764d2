"""LongCat-Flash's tiny model, and its checkpoint as the authors write it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

CONFIG: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=64,
    ffn_hidden_size=96,
    expert_ffn_hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    kv_lora_rank=32,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=12,
    n_routed_experts=4,
    zero_expert_num=3,
    moe_topk=3,
    routed_scaling_factor=1.5,
    max_position_embeddings=512,
    num_nextn_predict_layers=1,
    eos_token_id=1,
    bos_token_id=0,
    pad_token_id=None,
    initializer_range=0.08,
)
"""A row chooses 3 of 7 experts, of which 3 are the identity. Some of the first forty rows choose
none of these, and some all."""
RELEASED: dict[str, Any] = {
    "rope_theta": 2.5e4,
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "zero_expert_type": "identity",
    "num_nextn_predict_layers": None,
    "torch_dtype": "float32",
}
"""Entries of the authors' config.json, which does not say how many MTP layers there are."""


def with_own_embedding(source: Path, directory: Path, change: float = 0.0) -> Path:
    """A copy whose MTP layer stores an embedding, as released checkpoints do: the target's, or a
    multiple of it."""
    shutil.copytree(source, directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.mtp.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * (1 + change)
    save_file(tensors, path, metadata={"format": "pt"})
    return directory

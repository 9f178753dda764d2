"""Gemma 4's assistants for tiny targets: transformers' own class, and seconds of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional as F

_TEXT: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    global_head_dim=24,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    sliding_window=6,
    pad_token_id=0,
    eos_token_id=1,
    initializer_range=0.08,
)
_SMALL = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_CLUSTERS = {"num_centroids": 8, "centroid_intermediate_top_k": 5}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "text_config": {**_TEXT, **_SMALL, "model_type": "gemma4_text"},
        "backbone_hidden_size": 64,
        "use_ordered_embeddings": True,
        **_CLUSTERS,
    },
    "gemma4_unified": {
        "text_config": {
            **_TEXT,
            "model_type": "gemma4_unified_text",
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        "backbone_hidden_size": 64,
    },
    "gemma4@experts": {
        "text_config": {
            **_TEXT,
            **_SMALL,
            "model_type": "gemma4_text",
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        "backbone_hidden_size": 64,
    },
}
"""Entries of an assistant with clusters of tokens, and of two with a plain head."""
_STEM = {
    "gemma4": "Gemma4Assistant",
    "gemma4_unified": "Gemma4UnifiedAssistant",
    "gemma4@experts": "Gemma4Assistant",
}


def with_text(name: str, **entries: Any) -> dict[str, Any]:
    """The changes of an assistant's config that change entries of its text model."""
    return {"text_config": {**CONFIGS[name]["text_config"], **entries}}


@torch.no_grad()
def new_assistant(name: str, seed: int = 5, **changes: Any) -> Any:
    """A random float32 assistant of transformers' class; its norms are far from 1."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{_STEM[name]}Config")(**{**CONFIGS[name], **changes})
    model = getattr(transformers, f"{_STEM[name]}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" in parameter_name:
            parameter.uniform_(0.4, 1.9)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("layer_scalar"):
            buffer.uniform_(0.6, 1.4)
    if model.masked_embedding is not None:
        order_clusters(model)
    return model


@torch.no_grad()
def order_clusters(model: Any) -> None:
    """Tokens in random clusters, whose centroids are the means of their rows of the head."""
    clusters, size = model.masked_embedding, model.config.get_text_config().vocab_size
    clusters.token_ordering.copy_(torch.randperm(size))
    rows = model.lm_head.weight[clusters.token_ordering]
    clusters.centroids.weight.copy_(
        rows.view(model.config.num_centroids, -1, rows.shape[1]).mean(1)
    )


def save_assistant(model: Any, directory: Path) -> Path:
    """Write an assistant's checkpoint with transformers."""
    model.save_pretrained(directory)
    return directory


def read(target: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """The target's features [B, L, H] of rows of tokens, and the keys and values that it hands out,
    those of sliding layers as long as their window."""
    out = target(
        input_ids=ids, use_cache=False, output_hidden_states=True, return_shared_kv_states=True
    )
    window = target.config.get_text_config().sliding_window
    kept = {"sliding_attention": window, "full_attention": ids.shape[1]}
    stored = {
        kind: tuple(each[:, :, -kept[kind] :] for each in pair)
        for kind, pair in out.shared_kv_states.items()
    }
    return out.hidden_states[-1], stored


@torch.enable_grad()
def train_assistant(model: Any, target: Any, text: Any, steps: int = 90, lr: float = 1e-2) -> None:
    """Seconds of training, three drafts deep, so that drafts are accepted in part."""
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    ordered, model.config.use_ordered_embeddings = model.config.use_ordered_embeddings, False
    embed = target.get_input_embeddings()
    for step in range(steps):
        length = 4 + step % 16
        ids = text(32, length + 4, generator)
        with torch.no_grad():
            features, stored = read(target, ids[:, :length])
            chosen = target(input_ids=ids, use_cache=False).logits.argmax(-1)
            embedded = embed(ids)
        fed, loss = features[:, -1:], torch.tensor(0.0)
        for draft in range(3):
            token = embedded[:, length + draft : length + draft + 1]
            out = model(
                inputs_embeds=torch.cat([token, fed], -1),
                position_ids=torch.tensor([[length]]),
                shared_kv_states=stored,
            )
            fed = out.last_hidden_state
            loss = loss + F.cross_entropy(out.logits[:, 0], chosen[:, length + draft])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.config.use_ordered_embeddings = ordered
    if model.masked_embedding is not None:
        order_clusters(model)

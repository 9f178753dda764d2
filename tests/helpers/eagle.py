"""EAGLE-3 heads for tiny targets, written in the public format by plain code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from helpers.released import eagle3

CONFIG: dict[str, Any] = dict(
    architectures=["LlamaForCausalLMEagle3"],
    model_type="llama",
    vocab_size=96,
    draft_vocab_size=88,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=24,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=20000.0,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    torch_dtype="float32",
    eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
)
"""SpecForge's entry: ids of the layers whose outputs are captured."""


def new_head(config: Mapping[str, Any], target: int, seed: int = 5) -> dict[str, Tensor]:
    """Random tensors of a head by their public names, for a target of a given width."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = (config[name] * width for name in ("num_attention_heads", "num_key_value_heads"))
    rows, size = config["draft_vocab_size"], config["vocab_size"]
    shapes = {
        "fc": (hidden, 3 * target),
        "midlayer.self_attn.q_proj": (q, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, q),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (rows, hidden),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
    norms = (*norms, "midlayer.post_attention_layernorm")
    made = {
        f"{name}.weight": 0.08 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    # Far from equal weights, which would hide which of two norms is applied.
    made |= {f"{n}.weight": torch.rand(hidden, generator=generator) * 1.5 + 0.4 for n in norms}
    ids = torch.randperm(size, generator=generator)[:rows].sort().values
    return {**made, **token_map(ids, size)}


def token_map(ids: Tensor, size: int) -> dict[str, Tensor]:
    """The tensors `d2t` and `t2d` of a head whose rows are these token ids."""
    has_row = torch.zeros(size, dtype=torch.bool)
    has_row[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": has_row}


def save_head(tensors: Mapping[str, Tensor], config: Mapping[str, Any], directory: Path) -> Path:
    """Write a head's checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2))
    plain = {name: t.detach().contiguous() for name, t in tensors.items()}
    save_file(plain, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@torch.enable_grad()
def train_head(
    tensors: dict[str, Tensor], config: Mapping[str, Any], target: Any, text: Any, steps: int = 40
) -> dict[str, Tensor]:
    """Seconds of training, two drafts deep, so that drafts are accepted in part.

    Args:
        tensors: the head's.
        config: its config.
        target: transformers' model; it does not change.
        text: (rows, length, generator) -> token rows.
        steps: of the optimiser.
    """
    learned = {n: t.clone().requires_grad_() for n, t in tensors.items() if t.is_floating_point()}
    ids_of_rows = tensors["d2t"] + torch.arange(config["draft_vocab_size"])
    row_of = torch.full((config["vocab_size"],), -100)
    row_of[ids_of_rows] = torch.arange(len(ids_of_rows))
    layers = [i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    optimizer, generator = torch.optim.AdamW(learned.values(), lr=1e-2), torch.Generator()
    generator.manual_seed(3)
    embedding = target.get_input_embeddings().weight.detach()
    for _ in range(steps):
        ids = text(8, 24, generator)
        with torch.no_grad():
            states = eagle3.captured(target, ids[:, :-1], layers)
            chosen = row_of[target(input_ids=ids, use_cache=False).logits.argmax(-1)][:, 1:]
        fed, rows, loss = states @ learned["fc.weight"].t(), ids[:, 1:], torch.tensor(0.0)
        for _ in range(2):
            fed = eagle3.layer(learned, config, embedding[rows], fed)
            logits = eagle3.head(learned, config, fed).flatten(0, 1)
            loss = loss + torch.nn.functional.cross_entropy(logits, chosen.flatten())
            fed, rows, chosen = fed[:, :-1], rows[:, 1:], chosen[:, 1:]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {**tensors, **{name: t.detach() for name, t in learned.items()}}

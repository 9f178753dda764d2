"""Block drafters for tiny targets, written in the public formats by plain code."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from helpers.eagle import CONFIG as HEAD
from helpers.eagle import new_head, save_head
from helpers.released import dflash, eagle3
from helpers.trained import cyclic_text

CONFIG: dict[str, Any] = dict(
    architectures=["DFlashDraftModel"],
    model_type="qwen3",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=20000.0,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    torch_dtype="float32",
    num_target_layers=4,
    block_size=16,
    dflash_config={"mask_token_id": 1, "target_layer_ids": [0, 2]},
)
"""As the authors' checkpoints have it: ids of the layers whose outputs are captured."""


SPARK: dict[str, Any] = dict(
    architectures=["Qwen3DSparkModel"],
    dflash_config=None,
    mask_token_id=1,
    target_layer_ids=[0, 2],
    block_size=7,
    markov_rank=8,
    markov_head_type="vanilla",
    enable_confidence_head=True,
    confidence_head_with_markov=True,
)
"""What DSpark's checkpoints have beside or in place of `CONFIG`."""


SECOND: dict[str, Any] = dict(
    architectures=["DFlash2DraftModel"],
    layer_types=["sliding_attention"] * 2,
    sliding_window=6,
    is_causal=False,
    dflash_config={
        **CONFIG["dflash_config"],
        **dict(block_size=8, conv_kernel_size=2, conv_group_size=16),
        **dict(selector_rank=8, selector_top_k=5),
    },
)
"""What DFlash2's checkpoints have beside or in place of `CONFIG`, as z-lab/Qwen3.8-27B-DFlash2."""

SCALED: dict[str, Any] = {
    **SECOND,
    "dflash_config": {
        **SECOND["dflash_config"],
        **dict(conv_kernel_size=3, input_embedding_scale=1.7),
        **dict(output_multiplier=0.4, final_logit_softcapping=2.0),
    },
}
"""As drafters for Muse-Glimmer; three taps."""


def new_dflash(config: Mapping[str, Any], target: int = 64, seed: int = 5) -> dict[str, Tensor]:
    """Random tensors of a drafter by their public names, for a target of a given width."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, width = (config[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    q, kv = (config[name] * width for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"fc": (hidden, 2 * target)}
    norms = {"norm": hidden, "hidden_norm": hidden}
    for index in range(config["num_hidden_layers"]):
        at = f"layers.{index}"
        shapes |= {
            f"{at}.self_attn.q_proj": (q, hidden),
            f"{at}.self_attn.k_proj": (kv, hidden),
            f"{at}.self_attn.v_proj": (kv, hidden),
            f"{at}.self_attn.o_proj": (hidden, q),
            f"{at}.mlp.gate_proj": (inner, hidden),
            f"{at}.mlp.up_proj": (inner, hidden),
            f"{at}.mlp.down_proj": (hidden, inner),
        }
        norms |= {f"{at}.{name}_layernorm": hidden for name in ("input", "post_attention")}
        norms |= {f"{at}.self_attn.{name}_norm": width for name in ("q", "k")}
    rank, size = config.get("markov_rank", 0), config["vocab_size"]
    says = {**config, **(config.get("dflash_config") or {})}
    if rank:
        shapes |= {f"markov_head.markov_w{i}": (size, rank) for i in (1, 2)}
        shapes["confidence_head.proj"] = (1, hidden + rank)
    tables = dict[str, tuple[int, ...]]()
    if taps := says.get("conv_kernel_size"):
        for at in (f"layers.{i}" for i in range(config["num_hidden_layers"])):
            for name in (f"{at}.attention_conv", f"{at}.mlp_conv"):
                tables[f"{name}.base_kernel"] = (2, taps, hidden)
                kernels = 2 * taps * hidden // says["conv_group_size"]
                shapes[f"{name}.kernel_projection"] = (kernels, hidden)
        for name in ("predecessor", "successor"):
            tables[f"candidate_selector.{name}_codebook"] = (size, says["selector_rank"])
        shapes["candidate_selector.hidden_projection"] = (says["selector_rank"], hidden)
    made = {f"{n}.weight": 0.12 * torch.randn(s, generator=generator) for n, s in shapes.items()}
    if rank:
        made["confidence_head.proj.bias"] = torch.zeros(1)
        made["markov_head.markov_w2.weight"] *= 20
    made |= {name: torch.randn(s, generator=generator) for name, s in tables.items()}
    # Far from equal weights, which would hide which of two norms is applied.
    return made | {
        f"{n}.weight": torch.rand(s, generator=generator) * 1.5 + 0.4 for n, s in norms.items()
    }


@torch.enable_grad()
def train_dflash(
    tensors: dict[str, Tensor], config: Mapping[str, Any], target: Any, text: Any, steps: int = 60
) -> dict[str, Tensor]:
    """Seconds of training on blocks of four, so that drafts are accepted in part.

    Args:
        tensors: the drafter's.
        config: its config.
        target: transformers' model; it does not change.
        text: (rows, length, generator) -> token rows.
        steps: of the optimiser.
    """
    learned = {n: t.clone().requires_grad_() for n, t in tensors.items() if t.is_floating_point()}
    says = config["dflash_config"]
    layers, mask = [i + 1 for i in says["target_layer_ids"]], says["mask_token_id"]
    optimizer, generator = torch.optim.AdamW(learned.values(), lr=5e-3), torch.Generator()
    generator.manual_seed(3)
    embedding = target.get_input_embeddings().weight.detach()
    head = target.get_output_embeddings().weight.detach()
    for _ in range(steps):
        ids = text(12, 24, generator)
        start = int(torch.randint(3, 19, (1,), generator=generator))
        with torch.no_grad():
            states = eagle3.captured(target, ids[:, :start], layers)
            chosen = target(input_ids=ids, use_cache=False).logits.argmax(-1)
        block = torch.full((12, 4), mask)
        block[:, 0] = ids[:, start]
        logits = dflash.run(learned, config, states, embedding[block])[:, 1:] @ head.t()
        wanted = chosen[:, start : start + 3]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {**tensors, **{name: t.detach() for name, t in learned.items()}}


def beside(target: Path, directory: Path) -> Path:
    """A copy of a target's checkpoint with a trained drafter in its directory `draft`."""
    shutil.copytree(target, directory, dirs_exist_ok=True, ignore=lambda *_: ["draft"])
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    config = {**CONFIG, "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1]}}
    tensors = train_dflash(new_dflash(config), config, model, cyclic_text)
    save_head(tensors, config, directory / "draft")
    return directory


def save_peagle(
    directory: Path, layers: int = 2, heads: Mapping[str, Any] | None = None, seed: int = 5
) -> Path:
    """A random P-EAGLE head by speculators' names, with an embedding of its own."""
    inner = {**HEAD, "eagle_config": None, "num_hidden_layers": layers, **(heads or {})}
    tensors = new_head(inner, inner["hidden_size"], seed)
    generator = torch.Generator().manual_seed(seed)
    made = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    for index in range(1, layers):
        for name, tensor in tensors.items():
            if name.startswith("midlayer.") and "hidden_norm" not in name:
                wide = tensor.shape[-1] == 2 * inner["hidden_size"]
                part = tensor[..., : inner["hidden_size"]] if wide else tensor
                noise = 0.05 * torch.randn(part.shape, generator=generator)
                made[name.replace("midlayer.", f"layers.{index}.")] = part + noise
    made["mask_hidden"] = torch.randn(1, 1, 3 * inner["hidden_size"], generator=generator)
    made["embed_tokens.weight"] = torch.randn(96, inner["hidden_size"], generator=generator)
    config = {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "transformer_layer_config": inner,
        "draft_vocab_size": inner["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "mask_token_id": 7,
    }
    return save_head(made, config, directory)

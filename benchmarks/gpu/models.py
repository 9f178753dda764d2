"""The shapes that benchmarks.gpu measures. Their weights are made on the device.

With these weights every draft is accepted (benchmarks/harness/models.py explains how), so that all
engines have the same acceptance, and only times are compared. Unlike there, attention and
feed-forward write values, too, together about as large as the embedding, which still decides the
token. So a kernel that writes garbage lowers the acceptance. The part gate checks the rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.models import (
    INITIALIZER_RANGE,
    Checkpoint,
    Experts,
    Shape,
    make_model,
    sort_bytes,
)
from mtpc.models import FAMILIES
from mtpc.models.load import LoadedModel
from mtpc.models.mtp_layers import build_mtp_layer
from mtpc.models.seams import share_model, stand_in

SHAPES = {
    "glm4-8b": ("glm4_moe", Shape(4096, 32, 13_696, 151_552, 32, 8)),
    "mla-moe-16b": (
        "deepseek_v3",
        Shape(
            2048, 27, 10_944, 102_400, 16, 16, Experts(64, 6, 1408),
            dict(q_lora_rank=None, n_shared_experts=2),
        ),
    ),
    "glm4-0.5b": ("glm4_moe", Shape(1024, 28, 4096, 32_768, 16, 4)),
    "glm4.5-air": (
        "glm4_moe",
        Shape(4096, 46, 10_944, 151_552, 96, 8, Experts(128, 8, 1408), dict(head_dim=128)),
    ),
    "deepseek-v3": (
        "deepseek_v3",
        Shape(
            7168, 61, 18_432, 129_280, 128, 128, Experts(256, 8, 2048),
            dict(q_lora_rank=1536, n_group=8, topk_group=4, first_k_dense_replace=3),
        ),
    ),
    "tiny-glm4": ("glm4_moe", Shape(64, 2, 128, 96, 4, 2)),
    "tiny-mla-moe": (
        "deepseek_v3",
        Shape(
            64, 2, 96, 96, 4, 4, Experts(4, 2, 32),
            dict(q_lora_rank=None, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16,
                 v_head_dim=16),
        ),
    ),
}  # fmt: skip
"""Family and sizes. An 8B dense GLM-4, and a mixture with latent attention of DeepSeek-V2-Lite's
sizes; a small GLM-4 and two released shapes, for benchmarks.gpu_model; tiny ones, for dry runs."""
MEASURED = ("glm4-0.5b", "glm4-8b", "mla-moe-16b")
"""Those that benchmarks.gpu measures, unless it is told which."""


def build(name: str, device: str, layers: int | None = None, accepting: bool = True) -> LoadedModel:
    """A model of a shape on a device, in bfloat16.

    Args:
        name: of SHAPES.
        device: where its weights are made.
        layers: instead of the shape's own number of decoder layers.
        accepting: weights of which every greedy draft is accepted, instead of random ones.
    """
    family_name, shape = SHAPES[name]
    family = next(f for f in FAMILIES if f.name == family_name)
    depth = layers or shape.num_hidden_layers
    torch.manual_seed(0)
    stir = partial(_stir, depth=depth) if accepting else lambda model: None
    sizes = replace(shape, num_hidden_layers=depth)
    model, cut_off = make_model(family, sizes, device, accepting, stir)
    with torch.device(device):
        target = share_model(model, family.canonical)
        layer = build_mtp_layer(family, target, 0).eval()
    layer.load_state_dict(cut_off.state_dict(), assign=True)
    stand_in(layer, family.canonical)
    return LoadedModel(family, target, (layer,), (), name, None, owned=True)


@torch.no_grad()
def _stir(model: Any, depth: int) -> None:
    """Make attention and feed-forward write values, together about as large as the embedding."""
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            inputs = parameter.shape[-1]
            parameter.normal_(std=INITIALIZER_RANGE / (2 * depth * inputs) ** 0.5)


def weigh(loaded: LoadedModel) -> Checkpoint:
    """The bytes of what a step has to read; no directory."""
    target, draft = loaded.target, loaded.mtp_layers[0]
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    layers = {
        name: tensor
        for name, tensor in target.get_decoder().named_parameters()
        if tensor is not embedding.weight
    }
    config = loaded.config.to_dict()
    sizes = sort_bytes(layers, dict(draft.named_parameters()), config, lambda _, t: t.nbytes)
    sizes |= dict(head_bytes=head.weight.nbytes, embedding_bytes=embedding.weight.nbytes)
    return Checkpoint(Path(), loaded.family, **sizes)

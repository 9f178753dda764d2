"""Qwen3-Next and Qwen3.5 (dense, mixture of experts): Gated DeltaNet and gated full attention.

Three of four layers are recurrent. The MTP block is a full-attention layer, so drafting does not
change recurrent state. Its tensors are named `mtp.*`; transformers drops them.

Source: the released checkpoints' tensor names, and vLLM's qwen3_next_mtp and qwen3_5_mtp, which
read them. The embedding comes first in the concatenation. The first draft is fed the target's
hidden state after its final norm, and later drafts the output of `mtp.norm`. Head and embedding are
the target's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mtpc.layout import BufferSpec
from mtpc.models.caches import paged_kv_specs
from mtpc.models.family import ModelFamily, MTPWiring, VisionParts, layers_after
from mtpc.models.gated_delta import (
    GatedDelta,
    gated_delta_specs,
    grouped_projections,
    separate_projections,
)
from mtpc.models.recurrent import RecurrentState
from mtpc.weights.checkpoint_files import MTP_COUNT_NAMES

_TOWER = {"visual": ("model.visual.",)}


def num_mtp_layers(config: Any) -> int:
    """Number of MTP layers in a config. Default 1: Qwen3-Next's released config does not say."""
    for name in MTP_COUNT_NAMES:
        count = getattr(config, name, None)
        if count is not None:
            return int(count)
    return 1


def _cache_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """State buffers by the layer's type; MTP layers follow the last and are full attention."""
    if layer < config.num_hidden_layers and config.layer_types[layer] == "linear_attention":
        return gated_delta_specs(config, layer, dtype)
    return paged_kv_specs(config, layer, dtype)


_SEPARATE = partial(GatedDelta, project=separate_projections)
QWEN3_NEXT = ModelFamily(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    hf_config_class="Qwen3NextConfig",
    wiring=MTPWiring(
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        projection="fc",
        final_norm="norm",
    ),
    num_mtp_layers=num_mtp_layers,
    layer_prefix=lambda num_hidden_layers, i: "mtp.",
    block_prefix="layers.0.",
    cache_specs=_cache_specs,
    cache_kinds=(RecurrentState,),
    block_config=lambda config: layers_after(config, 1, layer_types="full_attention"),
    canonical={"Qwen3NextGatedDeltaNet": partial(GatedDelta, project=grouped_projections)},
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    name="qwen3_5",
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    hf_config_class="Qwen3_5TextConfig",
    canonical={"Qwen3_5GatedDeltaNet": _SEPARATE},
    stored_prefixes={"model.": "model.language_model."},
    position_grids=3,
    vision=VisionParts("Qwen3_5Model", "Qwen3_5Config", "grids", _TOWER),
)
"""The text model, which released checkpoints hold inside a multimodal model."""
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    hf_config_class="Qwen3_5MoeTextConfig",
    canonical={"Qwen3_5MoeGatedDeltaNet": _SEPARATE},
    vision=VisionParts("Qwen3_5MoeModel", "Qwen3_5MoeConfig", "grids", _TOWER),
)

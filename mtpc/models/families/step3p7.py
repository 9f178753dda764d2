"""Step-3.7-Flash: gated attention, sliding layers with more heads, three MTP layers truly chained.

Each layer type has its own rotary embedding and number of query heads; norms are (1 + w); some
layers bound their SwiGLU. The text model stands inside a multimodal one, whose vision tower is
loaded but never run.

Source: transformers' Step3p7 and its MtpModel (embedding first, recycled after shared_head.norm,
layer i's features feed layer i + 1 in every row; the target's head for all layers). Where they
disagree: MTP layers that slide have the sliding layers' number of heads (vLLM, and the config's
`attention_other_setting`), which transformers' `get_mtp_config` forgets; MTP layers bound nothing
(transformers gives layer i the bound of the target's layer i).
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from mtpc.errors import UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.models.caches import paged_kv_specs, ring_kv_specs
from mtpc.models.clamped_experts import ClampedExperts
from mtpc.models.families.glm4_moe import (
    NEXTN_WIRING,
    SHARED_WITH_TARGET,
    nextn_layers,
    nextn_prefix,
)
from mtpc.models.family import ModelFamily

_SLIDING = "sliding_attention"


def _mtp_types(config: Any) -> list[str]:
    """Attention types of the MTP layers, which configs list after the target's."""
    types, count = config.mtp_layer_types, nextn_layers(config)
    if types is None or len(types) != count:
        raise UnsupportedModelError(
            f"the config announces {count} MTP layers but attention types for {types}; expected "
            "`layer_types` with an entry for each MTP layer after the decoder's"
        )
    return types


def _block_config(config: Any) -> Any:
    """A config in which the MTP layers follow the decoder's."""
    extended, count = copy.deepcopy(config), nextn_layers(config)
    extended.num_hidden_layers += count
    extended.layer_types = [*config.layer_types, *_mtp_types(config)]
    extended.mlp_layer_types = [*config.mlp_layer_types, *config.mtp_mlp_layer_types]
    for name in ("swiglu_limits", "swiglu_limits_shared"):
        limits = getattr(config, name)
        if limits:
            setattr(extended, name, [*limits, *([0.0] * count)])
    extended.per_layer_config = {
        layer: {"num_attention_heads": config.num_sliding_attention_heads}
        for layer, kind in enumerate(extended.layer_types)
        if kind == _SLIDING
    }
    return extended


def _cache_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """By the layer's type."""
    mtp_layer = layer - config.num_hidden_layers
    kind = config.layer_types[layer] if mtp_layer < 0 else _mtp_types(config)[mtp_layer]
    if kind != _SLIDING:
        return paged_kv_specs(config, layer, dtype)
    dims = (config.head_dim, config.head_dim)
    return ring_kv_specs(layer, dtype, config.sliding_window, config.num_key_value_heads, dims)


STEP3P7 = ModelFamily(
    name="step3p7",
    architectures=("Step3p7ForConditionalGeneration",),
    hf_class="Step3p7ForConditionalGeneration",
    hf_config_class="Step3p7Config",
    wiring=NEXTN_WIRING,
    num_mtp_layers=nextn_layers,
    layer_prefix=nextn_prefix,
    cache_specs=_cache_specs,
    block_config=_block_config,
    shared_tensors=SHARED_WITH_TARGET,
    canonical={"Step3p7Experts": ClampedExperts},
    rotary_type=lambda config, i: _mtp_types(config)[i],
    stored_names=(
        ("moe.gate.weight", "mlp.gate.weight"),
        ("moe.router_bias", "mlp.gate.e_score_correction_bias"),
        ("moe.down_proj.weight", "mlp.experts.down_proj"),
        ("share_expert.", "mlp.shared_experts."),
    ),
    stored_prefixes={"model.language_model.": "model."},
)

"""Gemma 4: sliding and global layers with heads of different widths, and layers that share keys.

In the small models the last layers store no keys and values: they attend to those of the last layer
of their type that does. Those models also feed an embedding of their own to every layer. The larger
ones take values from the projection of keys in global layers. One has experts beside the
feed-forward of each layer. Logits are capped in all.

Its drafter is a checkpoint of its own (`mtpc.models.gemma4_assistant`).

Source: transformers' Gemma4 and Gemma4Unified, as they are, without towers for images and sound.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mtpc.layout import BufferSpec
from mtpc.models.caches import kv_specs
from mtpc.models.family import NO_LAYERS, ModelFamily

_SLIDING = "sliding_attention"
_COMPUTED = {"use_bidirectional_attention": "vision"}
"""A decoder's text attends to earlier tokens."""


def kv_layer(config: Any, kind: str) -> int | None:
    """The layer whose keys and values layers of a type share: the last that stores its own."""
    own = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
    return max((layer for layer, each in enumerate(own) if each == kind), default=None)


def _cache_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """State buffers by the layer's type; none where keys are another layer's, as a drafter's are.

    Window and heads of a sliding layer differ from those of a global one.
    """
    if layer >= config.num_hidden_layers - config.num_kv_shared_layers:
        return ()
    sizes = config.per_layer_config[layer]
    window = config.sliding_window if config.layer_types[layer] == _SLIDING else 0
    return kv_specs(layer, dtype, sizes.num_key_value_heads, (sizes.head_dim,) * 2, window)


def _reads_shared(attention: Any) -> Any:
    """transformers' attention as it is; one that shares keys finds them by their layer's number.

    An assistant's, which shares the keys of another model, keeps the number that it has.
    """
    if attention.is_kv_shared_layer:
        shared = kv_layer(attention.config, attention.layer_type)
        attention.layer_idx = attention.layer_idx if shared is None else shared
    return attention


GEMMA4 = ModelFamily(
    name="gemma4",
    wiring=NO_LAYERS,
    num_mtp_layers=lambda config: 0,
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    cache_specs=_cache_specs,
    canonical={"Gemma4TextAttention": _reads_shared},
    computed=_COMPUTED,
    stored_prefixes=(("model.", "model.language_model."),),
)
"""The text model, which released checkpoints hold inside a multimodal model."""
GEMMA4_UNIFIED = replace(
    GEMMA4,
    name="gemma4_unified",
    architectures=("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
    canonical={"Gemma4UnifiedTextAttention": _reads_shared},
    computed={**_COMPUTED, "enable_moe_block": False},
)
"""Gemma 4 12B, whose text model has the same layers without inputs of their own."""

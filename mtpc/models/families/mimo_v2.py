"""MiMo-V2-Flash: sliding-window layers with attention sinks between full-attention layers.

Sliding layers have twice the key/value heads, a learned sink logit per head, and a ring of their
window as cache. MTP layers are sliding layers with a dense feed-forward.

Source: transformers' MiMoV2Flash for the target; for the MTP layers SGLang's mimo_v2_nextn and
multi_layer_eagle_worker_v2, which the authors helped to write: embedding first,
`pre_mlp_layernorm` before the feed-forward, and each layer fed the target's hidden state after its
final norm. vLLM runs MTP layer 0 only, again on its own output; transformers drops all layers.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from mtpc.layout import BufferSpec
from mtpc.models.caches import paged_pool_specs, ring_kv_specs
from mtpc.models.family import ModelFamily, MTPWiring

_SLIDING, _FULL = "sliding_attention", "full_attention"


def _num_mtp_layers(config: Any) -> int | None:
    """Number of MTP layers, or None: the released config does not say."""
    return getattr(config, "num_nextn_predict_layers", None)


def _block_config(config: Any) -> Any:
    """A copy of the config with the MTP layers after the decoder's: sliding and dense."""
    extended, count = copy.deepcopy(config), _num_mtp_layers(config) or 0
    extended.layer_types = [*config.layer_types, *([_SLIDING] * count)]
    extended.mlp_layer_types = [*config.mlp_layer_types, *(["dense"] * count)]
    return extended


def _cache_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """State buffers by the layer's type; value heads are narrower than key heads."""
    dims = (config.head_dim, config.v_head_dim)
    if layer < config.num_hidden_layers and config.layer_types[layer] == _FULL:
        return paged_pool_specs(layer, dtype, config.num_key_value_heads, dims)
    heads = 2 * config.num_key_value_heads
    return ring_kv_specs(layer, dtype, config.sliding_window, heads, dims)


MIMO_V2 = ModelFamily(
    name="mimo_v2",
    architectures=("MiMoV2FlashForCausalLM",),
    hf_class="MiMoV2FlashForCausalLM",
    hf_config_class="MiMoV2FlashConfig",
    wiring=MTPWiring(
        embedding_norm="enorm",
        hidden_norm="hnorm",
        projection="eh_proj",
        final_norm="final_layernorm",
        chaining="target",
    ),
    num_mtp_layers=_num_mtp_layers,
    layer_prefix=lambda num_hidden_layers, i: f"model.mtp.layers.{i}.",
    cache_specs=_cache_specs,
    block_config=_block_config,
    rotary_type=lambda config, i: _SLIDING,
    stored_names=(
        ("pre_mlp_layernorm.", "post_attention_layernorm."),
        ("self_attn.attention_sink_bias", "self_attn.sinks"),
    ),
)

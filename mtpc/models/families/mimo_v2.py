"""MiMo-V2: sliding-window layers with attention sinks between full-attention layers.

Sliding layers have twice the key/value heads, a learned sink logit per head, and a ring of their
window as cache. MTP layers are sliding layers with a dense feed-forward.

Source: transformers' MiMoV2Flash for the target; for the MTP layers SGLang's mimo_v2_nextn and
multi_layer_eagle_worker_v2, which the authors helped to write: embedding first,
`pre_mlp_layernorm` before the feed-forward, and each layer fed the target's hidden state after its
final norm. vLLM runs MTP layer 0 only, again on its own output; transformers drops all layers.
MiMo-V2.5 and later store fused projections (`mtpc.weights.fused_qkv`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mtpc.errors import UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.models.caches import kv_specs
from mtpc.models.family import ModelFamily, MTPWiring, layers_after

_SLIDING, _FULL = "sliding_attention", "full_attention"


def config_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """Entries of a released config.json -> those of transformers' `MiMoV2FlashConfig`.

    Raises:
        UnsupportedModelError: transformers' layers cannot be built as the entries say.
    """
    out = dict(entries)
    # Sliding layers have the sizes that transformers gives them.
    twice = 2 * out.get("num_key_value_heads", 4)
    wanted = {
        "swa_num_attention_heads": out.get("num_attention_heads"),
        "swa_num_key_value_heads": twice,
        "swa_head_dim": out.get("head_dim"),
        "swa_v_head_dim": out.get("v_head_dim"),
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }
    for name, value in wanted.items():
        if name in out and value is not None and out[name] != value:
            raise UnsupportedModelError(
                f"the config has {name} {out[name]!r}; expected {value!r}, as transformers' "
                "MiMoV2Flash builds sliding layers"
            )
    for name, kinds, released in (
        ("layer_types", (_FULL, _SLIDING), "hybrid_layer_pattern"),
        ("mlp_layer_types", ("dense", "sparse"), "moe_layer_freq"),
    ):
        if out.get(name) is None and out.get(released) is not None:
            out[name] = [kinds[bool(flag)] for flag in out[released]]
    if "rms_norm_eps" not in out and "layernorm_epsilon" in out:
        out["rms_norm_eps"] = out["layernorm_epsilon"]
    scaling, rope = out.pop("rope_scaling", None) or {}, out.pop("rope_parameters", None) or {}
    kind = scaling.get("rope_type") or scaling.get("type") or rope.get("rope_type") or "default"
    if kind != "default":
        raise UnsupportedModelError(
            f"the config has rope_scaling {scaling or rope}; expected none, or the type 'default'"
        )
    if _FULL in rope:
        return {**out, "rope_parameters": rope}
    given = {**scaling, **rope, **out}
    thetas = {_FULL: given.get("rope_theta"), _SLIDING: given.get("swa_rope_theta")}
    if None in thetas.values():
        return out  # transformers has the released model's numbers as its defaults.
    shared = {"rope_type": "default"}
    shared["partial_rotary_factor"] = given.get("partial_rotary_factor", 1.0)
    out["rope_parameters"] = {kind: {**shared, "rope_theta": t} for kind, t in thetas.items()}
    return out


def _cache_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """State buffers by the layer's type; value heads are narrower than key heads."""
    dims = (config.head_dim, config.v_head_dim)
    if layer < config.num_hidden_layers and config.layer_types[layer] == _FULL:
        return kv_specs(layer, dtype, config.num_key_value_heads, dims)
    return kv_specs(layer, dtype, 2 * config.num_key_value_heads, dims, config.sliding_window)


MIMO_V2 = ModelFamily(
    name="mimo_v2",
    architectures=("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
    wiring=MTPWiring(
        embedding_norm="enorm",
        hidden_norm="hnorm",
        projection="eh_proj",
        final_norm="final_layernorm",
        chaining="target",
    ),
    config_entries=config_entries,
    # The released config does not say.
    num_mtp_layers=lambda config: getattr(config, "num_nextn_predict_layers", None),
    layer_prefix=lambda num_hidden_layers, i: f"model.mtp.layers.{i}.",
    cache_specs=_cache_specs,
    block_config=partial(layers_after, layer_types=_SLIDING, mlp_layer_types="dense"),
    rotary_type=lambda config, i: _SLIDING,
    stored_names=(
        ("pre_mlp_layernorm.", "post_attention_layernorm."),
        ("self_attn.attention_sink_bias", "self_attn.sinks"),
    ),
)

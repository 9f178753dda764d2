"""K-EXAONE: sliding-window layers between full-attention layers without positions, and experts.

The MTP layer has the names of Qwen3-Next's. It is dense and slides, as the target's first layer
does. Configs may say otherwise (`mtp_layer_types`); transformers cannot build such a layer, because
its full-attention layers never rotate, and that of an MTP layer would.

Source: transformers' ExaoneMoe for the target; vLLM's exaone_moe_mtp.py and exaone_moe.py for the
MTP layer, which transformers drops.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mtpc.errors import UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.models.caches import kv_specs
from mtpc.models.families.qwen3_next import QWEN3_NEXT
from mtpc.models.family import layers_after

_SLIDING = "sliding_attention"


def _block_config(config: Any) -> Any:
    """A copy of the config with the MTP layer after the decoder's. Raises UnsupportedModelError:
    the layer attends to the whole text."""
    kind = (getattr(config, "mtp_layer_types", None) or config.layer_types)[0]
    if kind != _SLIDING:
        raise UnsupportedModelError(
            f"the MTP layer has the attention type {kind!r}; expected {_SLIDING!r}, as "
            "transformers' ExaoneMoe has no full attention that rotates; use spec_tokens=0"
        )
    return layers_after(config, 1, layer_types=kind, mlp_layer_types="dense")


def _cache_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    slides = layer >= config.num_hidden_layers or config.layer_types[layer] == _SLIDING
    window = config.sliding_window if slides else 0
    return kv_specs(layer, dtype, config.num_key_value_heads, (config.head_dim,) * 2, window)


EXAONE_MOE = replace(
    QWEN3_NEXT,
    name="exaone_moe",
    architectures=("ExaoneMoeForCausalLM",),
    cache_specs=_cache_specs,
    cache_kinds=(),
    block_config=_block_config,
    canonical={},
    # What newer configs have, and transformers' ExaoneMoe does not read.
    computed=dict.fromkeys(("sliding_windows", "mtp_sliding_windows", "swiglu_limits")),
    stored_names=(("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),),
)

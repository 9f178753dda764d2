"""GLM-4.7-Flash: GLM-4.5's mixture of experts and MTP layer with DeepSeek-V3's latent attention.

Source: transformers' Glm4MoeLite (5.17 to 5.24) for the target; vLLM's glm4_moe_lite_mtp.py for the
names and the joint of the MTP layer. The released config says where the dense layers end
(`first_k_dense_replace`), which transformers does not read: it has one dense layer by default.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from mtpc.models.families.deepseek_v3 import DEEPSEEK_V3
from mtpc.models.family import layers_after


def dense_first(entries: dict[str, Any]) -> dict[str, Any]:
    """Entries of a released config.json with `mlp_layer_types`, if they count the dense layers."""
    dense, layers = entries.get("first_k_dense_replace"), entries.get("num_hidden_layers")
    if dense is None or layers is None or entries.get("mlp_layer_types") is not None:
        return entries
    kinds = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    return {**entries, "mlp_layer_types": kinds}


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    architectures=("Glm4MoeLiteForCausalLM",),
    config_entries=dense_first,
    block_config=partial(layers_after, mlp_layer_types="sparse"),
    released_entries={"topk_method": "noaux_tc"},
)

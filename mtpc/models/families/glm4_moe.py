"""GLM-4.5 / GLM-4.6 (grouped-query attention, mixture of experts), NextN layers after the last.

Source: the released checkpoints' tensor names and transformers' generic MtpModel.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

from mtpc.models.caches import paged_kv_specs
from mtpc.models.family import ModelFamily, MTPWiring

NEXTN_WIRING = MTPWiring(
    embedding_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    final_norm="shared_head.norm",
)
"""DeepSeek-V3's wiring (arXiv:2412.19437, section 2.2), which GLM-4 MoE took over."""

SHARED_WITH_TARGET: dict[str, Literal["embedding", "head"]] = {
    "embed_tokens.weight": "embedding",
    "shared_head.head.weight": "head",
}


def nextn_layers(config: Any) -> int:
    """NextN layers a config announces; 0 where it says nothing."""
    return int(getattr(config, "num_nextn_predict_layers", 0) or 0)


def nextn_prefix(num_hidden_layers: int, index: int) -> str:
    """Released checkpoints number NextN layers on from the decoder's."""
    return f"model.layers.{num_hidden_layers + index}."


GLM4_MOE = ModelFamily(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    hf_class="Glm4MoeForCausalLM",
    hf_config_class="Glm4MoeConfig",
    wiring=NEXTN_WIRING,
    num_mtp_layers=nextn_layers,
    layer_prefix=nextn_prefix,
    cache_specs=paged_kv_specs,
    block_config=copy.deepcopy,
    shared_tensors=SHARED_WITH_TARGET,
)

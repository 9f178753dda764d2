"""GLM-4.5 and GLM-4.6: grouped-query attention, mixture of experts.

MTP layers are numbered after the last decoder layer ("NextN layers").

Source: the released checkpoints' tensor names, and transformers' generic MtpModel.
"""

from __future__ import annotations

from typing import Any, Literal

from mtpc.models.caches import paged_kv_specs
from mtpc.models.family import ModelFamily, MTPWiring

NEXTN_WIRING = MTPWiring(
    embedding_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    final_norm="shared_head.norm",
)
"""The wiring of DeepSeek-V3 (arXiv:2412.19437, section 2.2), also used by GLM-4 MoE and Step."""

SHARED_WITH_TARGET: dict[str, Literal["embedding", "head"]] = {
    "embed_tokens.weight": "embedding",
    "shared_head.head.weight": "head",
}


def nextn_layers(config: Any) -> int:
    """Number of MTP layers in a config; 0 if it does not say."""
    return int(getattr(config, "num_nextn_predict_layers", 0) or 0)


def nextn_prefix(num_hidden_layers: int, index: int) -> str:
    """Prefix of MTP layer `index`: released checkpoints number it after the decoder layers."""
    return f"model.layers.{num_hidden_layers + index}."


GLM4_MOE = ModelFamily(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    hf_config_class="Glm4MoeConfig",
    wiring=NEXTN_WIRING,
    num_mtp_layers=nextn_layers,
    layer_prefix=nextn_prefix,
    cache_specs=paged_kv_specs,
    shared_tensors=SHARED_WITH_TARGET,
)

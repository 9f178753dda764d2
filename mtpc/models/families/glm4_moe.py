"""GLM-4.5 and GLM-4.6: grouped-query attention, mixture of experts.

MTP layers are numbered after the last decoder layer ("NextN layers").

Source: the released checkpoints' tensor names, and transformers' generic MtpModel.
"""

from __future__ import annotations

from typing import Literal

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

GLM4_MOE = ModelFamily(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    wiring=NEXTN_WIRING,
    shared_tensors=SHARED_WITH_TARGET,
)

"""DeepSeek-V3 and R1, and GLM-4.5 to 4.7: mixture of experts with "NextN layers".

MTP layers are numbered after the last decoder layer. DeepSeek's have latent attention, and GLM's
grouped-query attention. GLM-4.7-Flash has GLM-4.5's mixture of experts and MTP layer with
DeepSeek-V3's latent attention.

GLM-4.5V is the text model of GLM-4.5-Air with a vision tower. The text model differs in its rotary
embedding alone, which takes three coordinates of a position; transformers has it inside the
multimodal model only, whose tower is loaded with it.

Sources: the released checkpoints' tensor names; arXiv:2412.19437, section 2.2; transformers'
generic MtpModel. Of GLM-4.7-Flash: transformers' Glm4MoeLite (5.17 to 5.24) for the target, and
vLLM's glm4_moe_lite_mtp.py for the names and the joint of the MTP layer. Of GLM-4.5V: transformers'
Glm4vMoe for the target. Its config has no entry for MTP layers, and the pattern of tensors that it
leaves out is GLM-4.5's (`model.layers.46.*`). MTP layers are taken to be wired as GLM-4.5's, and
named as those of GLM-OCR, the authors' multimodal model that has one
(`model.language_model.layers.16.*`). A config without `num_nextn_predict_layers` has none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

from mtpc.models.caches import paged_latent_specs
from mtpc.models.family import ModelFamily, MTPWiring, VisionParts, layers_after

NEXTN_WIRING = MTPWiring(
    embedding_norm="enorm", hidden_norm="hnorm", projection="eh_proj", final_norm="shared_head.norm"
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
GLM4V_MOE = replace(
    GLM4_MOE,
    name="glm4v_moe",
    architectures=("Glm4vMoeForConditionalGeneration",),
    layer_prefix=lambda num_hidden_layers, i: (
        f"model.language_model.layers.{num_hidden_layers + i}."
    ),
    position_grids=3,
    vision=VisionParts("Glm4vMoeModel", "grids", {"visual": ("model.visual.",)}),
)
DEEPSEEK_V3 = replace(
    GLM4_MOE,
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    cache_specs=paged_latent_specs,
    released_entries={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
)


def _dense_first(entries: dict[str, Any]) -> dict[str, Any]:
    """Entries of a released config.json with `mlp_layer_types`, if they count the dense layers.

    transformers does not read `first_k_dense_replace`: it has one dense layer by default.
    """
    dense, layers = entries.get("first_k_dense_replace"), entries.get("num_hidden_layers")
    if dense is None or layers is None or entries.get("mlp_layer_types") is not None:
        return entries
    kinds = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    return {**entries, "mlp_layer_types": kinds}


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    architectures=("Glm4MoeLiteForCausalLM",),
    config_entries=_dense_first,
    block_config=partial(layers_after, mlp_layer_types="sparse"),
    released_entries={"topk_method": "noaux_tc"},
)

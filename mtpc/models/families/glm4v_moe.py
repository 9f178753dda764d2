"""GLM-4.5V: the text model of GLM-4.5-Air with a vision tower.

The text model differs from `glm4_moe` in its rotary embedding alone, which takes three coordinates
of a position; transformers has it inside the multimodal model only, whose tower is loaded with it.

Source: transformers' Glm4vMoe for the target. Its config has no entry for MTP layers, and the
pattern of tensors that it leaves out is GLM-4.5's (`model.layers.46.*`). MTP layers are taken to be
wired as GLM-4.5's, and named as those of GLM-OCR, the authors' multimodal model that has one
(`model.language_model.layers.16.*`). A config without `num_nextn_predict_layers` has none.
"""

from __future__ import annotations

from dataclasses import replace

from mtpc.models.families.glm4_moe import GLM4_MOE
from mtpc.models.family import VisionParts

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

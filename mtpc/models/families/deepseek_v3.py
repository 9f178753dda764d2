"""DeepSeek-V3 and R1: latent attention, mixture of experts.

MTP layers are numbered after the last decoder layer ("NextN layers").

Source: the released checkpoints' tensor names, and arXiv:2412.19437, section 2.2.
"""

from __future__ import annotations

from mtpc.models.caches import paged_latent_specs
from mtpc.models.families.glm4_moe import NEXTN_WIRING, SHARED_WITH_TARGET
from mtpc.models.family import ModelFamily

DEEPSEEK_V3 = ModelFamily(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    wiring=NEXTN_WIRING,
    cache_specs=paged_latent_specs,
    shared_tensors=SHARED_WITH_TARGET,
    released_entries={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
)

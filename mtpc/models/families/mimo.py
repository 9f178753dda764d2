"""MiMo-7B (dense): a Qwen2 model with MTP layers at `model.mtp_layers.{i}`.

Source: the authors' modelling code (XiaomiMiMo/MiMo-7B-Base). It concatenates the hidden state
first, and sets the embedding at sequence position 0 to zero.
"""

from __future__ import annotations

from mtpc.models.caches import paged_kv_specs
from mtpc.models.families.glm4_moe import nextn_layers
from mtpc.models.family import ModelFamily, MTPWiring, full_attention_after

MIMO = ModelFamily(
    name="mimo",
    architectures=("MiMoForCausalLM",),
    hf_class="Qwen2ForCausalLM",
    hf_config_class="Qwen2Config",
    wiring=MTPWiring(
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projection="input_proj",
        final_norm="final_layernorm",
        hidden_first=True,
        zero_first_embedding=True,
    ),
    num_mtp_layers=nextn_layers,
    layer_prefix=lambda num_hidden_layers, i: f"model.mtp_layers.{i}.",
    cache_specs=paged_kv_specs,
    block_config=lambda config: full_attention_after(config, nextn_layers(config)),
)

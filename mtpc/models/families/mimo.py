"""MiMo-7B (dense): a Qwen2 base with MTP layers at `model.mtp_layers.{i}`.

Source: the authors' modelling code (XiaomiMiMo/MiMo-7B-Base): hidden first in the concat, and
the embedding of sequence position 0 is zeroed.
"""

from __future__ import annotations

from typing import Any

from mtpc.models.caches import paged_kv_specs
from mtpc.models.family import ModelFamily, MTPWiring, full_attention_after


def _num_mtp_layers(config: Any) -> int:
    return int(getattr(config, "num_nextn_predict_layers", 0) or 0)


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
    num_mtp_layers=_num_mtp_layers,
    layer_prefix=lambda num_hidden_layers, i: f"model.mtp_layers.{i}.",
    cache_specs=paged_kv_specs,
    block_config=lambda config: full_attention_after(config, _num_mtp_layers(config)),
)

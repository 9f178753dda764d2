"""MiMo-7B (dense): a Qwen2 model with MTP layers at `model.mtp_layers.{i}`.

Source: the authors' own vLLM (github.com/XiaomiMiMo/vllm, mimo.py and mimo_mtp.py). It feeds the
hidden state before the final norm, concatenates it first, and sets the embedding at sequence
position 0 to zero. It makes one draft; what a second one is fed is what vLLM and SGLang feed.
"""

from __future__ import annotations

from functools import partial

from mtpc.models.family import ModelFamily, MTPWiring, layers_after

MIMO = ModelFamily(
    name="mimo",
    architectures=("MiMoForCausalLM",),
    class_name="Qwen2ForCausalLM",
    wiring=MTPWiring(
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projection="input_proj",
        final_norm="final_layernorm",
        hidden_first=True,
        zero_first_embedding=True,
        first_features="before",
    ),
    layer_prefix=lambda num_hidden_layers, i: f"model.mtp_layers.{i}.",
    block_config=partial(layers_after, layer_types="full_attention"),
)

"""Llama, Qwen2 and Qwen3: dense models without MTP layers, for a drafter in its own checkpoint.

Source: transformers' classes, as they are. Without a drafter they decode plainly (spec_tokens=0).
"""

from __future__ import annotations

from mtpc.models.family import ModelFamily, MTPWiring


def without_layers(name: str, stem: str) -> ModelFamily:
    """The family of transformers' classes `{stem}ForCausalLM` and `{stem}Config`, as they are."""
    return ModelFamily(
        name=name,
        architectures=(f"{stem}ForCausalLM",),
        hf_config_class=f"{stem}Config",
        wiring=MTPWiring(embedding_norm="", hidden_norm="", projection="", final_norm=""),
        num_mtp_layers=lambda config: 0,
    )


LLAMA = without_layers("llama", "Llama")
QWEN2 = without_layers("qwen2", "Qwen2")
QWEN3 = without_layers("qwen3", "Qwen3")

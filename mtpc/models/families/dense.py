"""Llama, Qwen2 and Qwen3: dense models without MTP layers, for a drafter in its own checkpoint.

Source: transformers' classes, as they are. Without a drafter they decode plainly (spec_tokens=0).
"""

from __future__ import annotations

from mtpc.models.caches import paged_kv_specs
from mtpc.models.family import ModelFamily, MTPWiring

_NO_LAYERS = MTPWiring(embedding_norm="", hidden_norm="", projection="", final_norm="")


def _dense(name: str, stem: str) -> ModelFamily:
    """The family of transformers' classes `{stem}ForCausalLM` and `{stem}Config`."""
    return ModelFamily(
        name=name,
        architectures=(f"{stem}ForCausalLM",),
        hf_class=f"{stem}ForCausalLM",
        hf_config_class=f"{stem}Config",
        wiring=_NO_LAYERS,
        num_mtp_layers=lambda config: 0,
        layer_prefix=lambda num_hidden_layers, i: "",
        cache_specs=paged_kv_specs,
        block_config=lambda config: config,
    )


LLAMA = _dense("llama", "Llama")
QWEN2 = _dense("qwen2", "Qwen2")
QWEN3 = _dense("qwen3", "Qwen3")

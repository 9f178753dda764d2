"""LongCat-Flash: two latent attentions a layer, and experts on a shortcut past the second one.

Some experts are the identity ("zero experts"). They have no weights, and a row that chose them adds
itself. The MTP layer has one attention and one feed-forward of the target's, and no experts.

Source: transformers' LongcatFlash for the target; vLLM's longcat_flash_mtp.py and SGLang's
longcat_flash_nextn.py, which agree, for the names and the joint of the MTP layer. transformers
drops the layer. It also allocates projections of gate and up for the zero experts, which no
checkpoint has.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mtpc.models.caches import paged_latent_specs
from mtpc.models.families.qwen3_next import num_mtp_layers
from mtpc.models.family import ModelFamily, MTPWiring
from mtpc.models.seams import StandIn
from mtpc.ops.experts import experts

_COMPUTED: dict[str, Any] = {
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "zero_expert_type": "identity",
    "router_bias": False,
    "norm_topk_prob": False,
    "hidden_act": "silu",
    "nextn_use_scmoe": False,
}
"""Entries of config.json -> what transformers' layers and `mtpc::experts` compute in any case."""


class ZeroExperts(StandIn):
    """The routed experts by `mtpc::experts`, and those that are the identity."""

    def __init__(self, module: Any):
        super().__init__(module)
        self.gate_up_proj = _routed(module)

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """x [T, H], expert_ids int64 [T, k], expert_weights [T, k]; returns [T, H]."""
        routed = experts(x, self.gate_up_proj, self.down_proj, expert_ids, expert_weights)
        share = torch.where(expert_ids >= self.num_routed_experts, expert_weights, 0)
        share = share.sum(-1, keepdim=True)
        return routed + (x * share).to(x.dtype)


def _routed(module: Any) -> nn.Parameter:
    """The gate and up projections of the experts that have any, [E, 2I, H]."""
    held, count = module.gate_up_proj, module.num_routed_experts
    return held if len(held) == count else nn.Parameter(held.detach()[:count], held.requires_grad)


class DenseLayer(nn.Module):
    """The decoder block of the MTP layer: the first half of a layer of the target's (class
    `layer`), alone. By its index, such a layer has two."""

    def __init__(self, layer: Any, config: Any, index: int):
        super().__init__()
        whole = layer(config, index // 2)
        self.self_attn, self.mlps = whole.self_attn[:1], whole.mlps[:1]
        self.input_layernorm = whole.input_layernorm[0]
        self.post_attention_layernorm = whole.post_attention_layernorm[0]

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn[0](hidden_states=normed, **options)[0]
        return hidden_states + self.mlps[0](self.post_attention_layernorm(hidden_states))


@cache
def stored_class() -> type[nn.Module]:
    """transformers' class with the tensors of checkpoints, made late: its base imports much."""
    from transformers import LongcatFlashForCausalLM as Base

    class LongcatFlashForCausalLM(Base):
        """The routed experts have weights, and the zero experts have none."""

        def __init__(self, config: Any):
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp.experts.gate_up_proj = _routed(layer.mlp.experts)

    return LongcatFlashForCausalLM


LONGCAT_FLASH = ModelFamily(
    name="longcat_flash",
    architectures=("LongcatFlashForCausalLM",),
    own_class=stored_class,
    wiring=MTPWiring(
        embedding_norm="layers.0.enorm.m",
        hidden_norm="layers.0.hnorm.m",
        projection="layers.0.eh_proj",
        final_norm="norm",
    ),
    num_mtp_layers=num_mtp_layers,
    layer_prefix=lambda num_hidden_layers, i: "model.mtp.",
    block_prefix="layers.0.",
    make_block=DenseLayer,
    cache_specs=paged_latent_specs,
    caches_per_layer=2,
    shared_tensors={"embed_tokens.weight": "embedding"},
    canonical={"LongcatFlashExperts": ZeroExperts},
    stored_names=(("transformer_layer.mlp.", "mlps.0."), ("self_attn.", "self_attn.0.")),
    computed=_COMPUTED,
    released_entries=_COMPUTED,
)

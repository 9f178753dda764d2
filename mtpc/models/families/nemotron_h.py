"""Nemotron 3 (Nemotron-H): Mamba-2 layers, attention without positions, experts without gates.

A layer is one norm and one mixer. The MTP layer is two of them, attention and experts, so drafting
does not change recurrent state.

Source: transformers' NemotronH for the target; vLLM's nemotron_h_mtp.py, written with the authors,
for the MTP layer: the joint before its first part, the final norm after its last, whose output is
recycled. transformers drops the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mtpc.errors import UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.models.caches import paged_kv_specs
from mtpc.models.family import ModelFamily, MTPWiring, layers_after
from mtpc.models.mamba2 import Mamba2
from mtpc.models.recurrent import Recurrence, RecurrentState

_PARTS = ["full_attention", "moe"]


def _without_floor(target: Any) -> None:
    """transformers raises a prompt's time steps to `time_step_min`, and no later token's."""
    for layer in target.get_decoder().layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = tuple(target.config.time_step_limit)


class TwoLayers(nn.Module):
    """The decoder block of an MTP layer: attention, then experts, each a layer of the target's.
    `index` is the first one's, and the config has the kinds of both."""

    def __init__(self, layer: Any, config: Any, index: int):
        super().__init__()
        for place in range(len(_PARTS)):
            self.add_module(str(place), layer(config, index + place))

    @property
    def norm(self) -> nn.Module:
        """The norm before the first mixer."""
        norm: Any = self.get_submodule("0.norm")
        return norm

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        for layer in self.children():
            hidden_states = layer(hidden_states, **options)
        return hidden_states


def _block_config(config: Any) -> Any:
    """A copy of the config with the MTP layer's two layers after the target's. Raises
    UnsupportedModelError: the MTP layer has other parts."""
    if list(config.mtp_layers_block_type) != _PARTS:
        raise UnsupportedModelError(
            f"mtp_layers_block_type is {config.mtp_layers_block_type}; expected {_PARTS}, which an "
            "MTP layer consists of; use spec_tokens=0"
        )
    extended = layers_after(config, 1, layer_types=_PARTS[0])
    return layers_after(extended, 1, layer_types=_PARTS[1])


def _cache_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """State buffers by the layer's kind; an MTP layer attends."""
    kind = config.layer_types[layer] if layer < config.num_hidden_layers else _PARTS[0]
    if kind != "linear_attention":
        return paged_kv_specs(config, layer, dtype) if kind == "full_attention" else ()
    heads, width = config.mamba_num_heads, config.mamba_head_dim
    channels = heads * width + 2 * config.n_groups * config.ssm_state_size
    matrices = (heads, config.ssm_state_size, width)
    kept = Recurrence("Mamba-2", matrices, channels + heads, config.conv_kernel)
    return kept.specs(layer, dtype)


NEMOTRON_H = ModelFamily(
    name="nemotron_h",
    architectures=("NemotronHForCausalLM",),
    wiring=MTPWiring(
        embedding_norm="layers.0.enorm",
        hidden_norm="layers.0.hnorm",
        projection="layers.0.eh_proj",
        final_norm="layers.1.final_layernorm",
    ),
    layer_prefix=lambda num_hidden_layers, i: "mtp.",
    block_prefix="layers.",
    block_config=_block_config,
    make_block=TwoLayers,
    cache_specs=_cache_specs,
    cache_kinds=(RecurrentState,),
    canonical={"NemotronHMamba2Mixer": Mamba2},
    as_decoded=_without_floor,
    stored_prefixes=(("model.", "backbone."),),
    expert_names=("", "up_proj", "down_proj"),
)

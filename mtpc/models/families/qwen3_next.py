"""Qwen3-Next and Qwen3.5 (dense, mixture of experts): Gated DeltaNet and gated full attention.

Three of four layers are recurrent. The MTP block is a full-attention layer, so drafting does not
change recurrent state. Its tensors are named `mtp.*`; transformers drops them.

Source: the released checkpoints' tensor names, and vLLM's qwen3_next_mtp and qwen3_5_mtp, which
read them. The embedding comes first in the concatenation. The first draft is fed the target's
hidden state after its final norm, and later drafts the output of `mtp.norm`. Head and embedding are
the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mtpc import ops
from mtpc.errors import UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.models.caches import paged_kv_specs
from mtpc.models.family import ModelFamily, MTPWiring, VisionParts, layers_after
from mtpc.models.recurrent import Recurrence, RecurrentLayer, RecurrentState
from mtpc.weights.checkpoint_files import MTP_COUNT_NAMES

_TOWER = {"visual": ("model.visual.",)}
Projected: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, keys and values side by side, [T, C]; z [T, HV, Dv]; b and a, each [T, HV]."""


def gated_delta_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """State buffers of one Gated DeltaNet layer by request slot."""
    heads, key_dim = config.linear_num_value_heads, config.linear_key_head_dim
    value_dim = config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * key_dim + heads * value_dim
    sizes = (channels + 2 * heads, config.linear_conv_kernel_dim)
    return Recurrence("Gated DeltaNet", (heads, key_dim, value_dim), *sizes).specs(layer, dtype)


class GatedDelta(RecurrentLayer):
    """A Gated DeltaNet layer over flat rows. `project` computes its input projections: (this
    module, hidden [T, H]) -> `Projected`.

    Raises:
        UnsupportedModelError: the activation is not SiLU, or the convolution has a bias.
    """

    def __init__(self, module: Any, project: Callable[[Any, Tensor], Projected]):
        super().__init__(module)
        if module.conv1d.bias is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} has a convolution with a bias; expected one without"
            )
        self._project = project

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """[1, T, H] -> [1, T, H]."""
        mixed, z, b, a = self._project(self, hidden_states[0])
        weights = (self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias)
        out = self.recur(ops.gated_delta_rule, torch.cat([mixed, b, a], -1), weights, options)
        return self.out_proj(self.norm(out, z).flatten(1))[None]


def _grouped_projections(module: Any, x: Tensor) -> Projected:
    """Input projections of Qwen3-Next: two, with outputs interleaved by key head."""
    groups = module.num_v_heads // module.num_k_heads
    values, key_dim = groups * module.head_v_dim, module.head_k_dim
    qkvz = module.in_proj_qkvz(x).unflatten(-1, (module.num_k_heads, -1))
    query, key, value, z = qkvz.split([key_dim, key_dim, values, values], -1)
    b, a = module.in_proj_ba(x).unflatten(-1, (module.num_k_heads, -1)).split([groups] * 2, -1)
    mixed = torch.cat([part.flatten(1) for part in (query, key, value)], -1)
    z = z.reshape(x.shape[0], module.num_v_heads, module.head_v_dim)
    return mixed, z, b.flatten(1), a.flatten(1)


def _separate_projections(module: Any, x: Tensor) -> Projected:
    """Input projections of Qwen3.5: four separate ones."""
    z = module.in_proj_z(x).unflatten(-1, (module.num_v_heads, module.head_v_dim))
    return module.in_proj_qkv(x), z, module.in_proj_b(x), module.in_proj_a(x)


def num_mtp_layers(config: Any) -> int:
    """Number of MTP layers in a config. Default 1: Qwen3-Next's released config does not say."""
    counts = (getattr(config, name, None) for name in MTP_COUNT_NAMES)
    return int(next((count for count in counts if count is not None), 1))


def _cache_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """State buffers by the layer's type; MTP layers follow the last and are full attention."""
    if layer < config.num_hidden_layers and config.layer_types[layer] == "linear_attention":
        return gated_delta_specs(config, layer, dtype)
    return paged_kv_specs(config, layer, dtype)


SEPARATE = partial(GatedDelta, project=_separate_projections)
QWEN3_NEXT = ModelFamily(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    wiring=MTPWiring(
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        projection="fc",
        final_norm="norm",
    ),
    num_mtp_layers=num_mtp_layers,
    layer_prefix=lambda num_hidden_layers, i: "mtp.",
    block_prefix="layers.0.",
    cache_specs=_cache_specs,
    cache_kinds=(RecurrentState,),
    block_config=lambda config: layers_after(config, 1, layer_types="full_attention"),
    canonical={"Qwen3NextGatedDeltaNet": partial(GatedDelta, project=_grouped_projections)},
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    name="qwen3_5",
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    canonical={"Qwen3_5GatedDeltaNet": SEPARATE},
    stored_prefixes=(("model.", "model.language_model."),),
    position_grids=3,
    vision=VisionParts("Qwen3_5Model", "grids", _TOWER),
)
"""The text model, which released checkpoints hold inside a multimodal model."""
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    canonical={"Qwen3_5MoeGatedDeltaNet": SEPARATE},
    vision=VisionParts("Qwen3_5MoeModel", "grids", _TOWER),
)

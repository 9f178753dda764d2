"""Gated DeltaNet (Qwen3-Next, Qwen3.5): the canonical module, and its buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mtpc import ops
from mtpc.errors import UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.models.recurrent import RecurrentLayer, recurrent_specs

Projected: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, keys and values side by side, [T, C]; z [T, HV, Dv]; b and a, each [T, HV]."""


def gated_delta_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """State buffers of one layer by request slot."""
    heads, key_dim = config.linear_num_value_heads, config.linear_key_head_dim
    value_dim = config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * key_dim + heads * value_dim
    sizes = (channels + 2 * heads, config.linear_conv_kernel_dim)
    return recurrent_specs("Gated DeltaNet", layer, dtype, (heads, key_dim, value_dim), *sizes)


class GatedDelta(RecurrentLayer):
    """A Gated DeltaNet layer over flat rows.

    Args:
        module: transformers' module; its submodules and parameters are shared.
        project: computes the input projections: (this module, hidden [T, H]) -> `Projected`.

    Raises:
        UnsupportedModelError: the activation is not SiLU, or the convolution has a bias.
    """

    def __init__(self, module: Any, project: Callable[[Any, Tensor], Projected]):
        super().__init__(module)
        if module.conv1d.bias is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} has a convolution with a bias; expected one without"
            )
        self.num_k_heads, self.head_k_dim = module.num_k_heads, module.head_k_dim
        self.num_v_heads, self.head_v_dim = module.num_v_heads, module.head_v_dim
        self._project = project

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """[1, T, H] -> [1, T, H]."""
        mixed, z, b, a = self._project(self, hidden_states[0])
        weights = (self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias)
        out = self.recur(ops.gated_delta_rule, torch.cat([mixed, b, a], -1), weights, options)
        return self.out_proj(self.norm(out, z).flatten(1))[None]


def grouped_projections(module: Any, x: Tensor) -> Projected:
    """Input projections of Qwen3-Next: two, with outputs interleaved by key head."""
    groups = module.num_v_heads // module.num_k_heads
    values, key_dim = groups * module.head_v_dim, module.head_k_dim
    qkvz = module.in_proj_qkvz(x).unflatten(-1, (module.num_k_heads, -1))
    query, key, value, z = qkvz.split([key_dim, key_dim, values, values], -1)
    b, a = module.in_proj_ba(x).unflatten(-1, (module.num_k_heads, -1)).split([groups] * 2, -1)
    mixed = torch.cat([part.flatten(1) for part in (query, key, value)], -1)
    z = z.reshape(x.shape[0], module.num_v_heads, module.head_v_dim)
    return mixed, z, b.flatten(1), a.flatten(1)


def separate_projections(module: Any, x: Tensor) -> Projected:
    """Input projections of Qwen3.5: four separate ones."""
    z = module.in_proj_z(x).unflatten(-1, (module.num_v_heads, module.head_v_dim))
    return module.in_proj_qkv(x), z, module.in_proj_b(x), module.in_proj_a(x)

"""Mamba-2 layers (Nemotron-H): the canonical module, and its buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mtpc import ops
from mtpc.errors import UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.models.recurrent import RecurrentLayer, recurrent_specs


def mamba2_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """State buffers of one layer by request slot."""
    heads, width = config.mamba_num_heads, config.mamba_head_dim
    channels = heads * width + 2 * config.n_groups * config.ssm_state_size
    matrices = (heads, config.ssm_state_size, width)
    return recurrent_specs("Mamba-2", layer, dtype, matrices, channels + heads, config.conv_kernel)


class Mamba2(RecurrentLayer):
    """A Mamba-2 layer over flat rows.

    Args:
        module: transformers' module; its submodules and parameters are shared.

    Raises:
        UnsupportedModelError: the activation is not SiLU, or time steps have limits.
    """

    in_proj: nn.Module
    D: Tensor

    def __init__(self, module: Any):
        super().__init__(module)
        # transformers has a floor for prompts (`time_step_min`), and none for later tokens.
        limits = tuple(module.config.time_step_limit)
        if limits != (0.0, float("inf")):
            raise UnsupportedModelError(
                f"the config has time_step_limit {limits}; expected (0.0, inf), as "
                "mtpc::mamba2_scan bounds no time step"
            )
        self.groups = module.n_groups
        self.parts = [module.intermediate_size, module.conv_dim + module.num_heads]

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """[1, T, H] -> [1, T, H]."""
        gate, rows = self.in_proj(hidden_states[0]).split(self.parts, -1)
        convolution = (self.conv1d.weight.squeeze(1), self.conv1d.bias)
        weights = (*convolution, self.A_log, self.D, self.dt_bias)
        out = self.recur(ops.mamba2_scan, rows, weights, options, self.groups)
        return self.out_proj(self.norm(out.flatten(1), gate))[None]

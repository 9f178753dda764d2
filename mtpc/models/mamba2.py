"""Mamba-2 layers on explicit state, in place of transformers' (5.17 to 5.24).

Source: transformers' modules, which have the attributes of `Mamba2Mixer` under other names of the
config: those of Nemotron-H, Bamba and Granite compute alike; that of Falcon-H1 scales its
projection, and may have a gate without a norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mtpc import ops
from mtpc.errors import UnsupportedModelError
from mtpc.models.recurrent import Recurrence, RecurrentLayer


class Mamba2(RecurrentLayer):
    """A Mamba-2 layer over flat rows.

    Raises:
        UnsupportedModelError: the activation is not SiLU, or time steps have limits.
    """

    def __init__(self, module: Any):
        super().__init__(module)
        # Nemotron-H's module raises the limit for prompts alone; its config says what is meant.
        limits = tuple(getattr(module, "config", module).time_step_limit)
        if limits != (0.0, float("inf")):
            raise UnsupportedModelError(
                f"the config has time_step_limit {limits}; expected (0.0, inf), as "
                "mtpc::mamba2_scan bounds no time step"
            )

    @property
    def keeps(self) -> Recurrence:
        """Its state matrices, and the inputs of its convolution."""
        matrices = (self.num_heads, self.ssm_state_size, self.head_dim)
        return Recurrence(
            "Mamba-2", matrices, self.conv_dim + self.num_heads, self.conv_kernel_size
        )

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """[1, T, H] -> [1, T, H]."""
        parts = [self.intermediate_size, self.conv_dim + self.num_heads]
        gate, rows = self._project(hidden_states[0]).split(parts, -1)
        convolution = (self.conv1d.weight.squeeze(1), self.conv1d.bias)
        weights = (*convolution, self.A_log, self.D, self.dt_bias)
        out = self.recur(ops.mamba2_scan, rows, weights, options, self.n_groups)
        return self.out_proj(self._gated(out.flatten(1), gate))[None]

    def _project(self, rows: Tensor) -> Tensor:
        projected: Tensor = self.in_proj(rows)
        return projected

    def _gated(self, rows: Tensor, gate: Tensor) -> Tensor:
        gated: Tensor = self.norm(rows, gate)
        return gated


class FalconMamba2(Mamba2):
    """That of Falcon-H1."""

    def _project(self, rows: Tensor) -> Tensor:
        projected: Tensor = self.in_proj(rows * self.ssm_in_multiplier) * self.mup_vector[0]
        return projected

    def _gated(self, rows: Tensor, gate: Tensor) -> Tensor:
        if self.mamba_rms_norm:
            return super()._gated(rows, gate)
        return rows * nn.functional.silu(gate)


MIXERS: Mapping[str, type[Mamba2]] = {
    "Mamba2Mixer": Mamba2,
    "BambaMixer": Mamba2,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "FalconH1Mixer": FalconMamba2,
}
"""By the names of transformers' classes, those of derived families."""

"""Gated DeltaNet (Qwen3-Next, Qwen3.5) on explicit state: the canonical module, and its buffers.

transformers' layer takes its state from its own cache class, and no interface redirects that. So
this module replaces the layer in mtpc's copy of the model; it shares the parameters under their
names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from mtpc import ops
from mtpc.errors import UnsupportedModelError
from mtpc.layout import VERIFY, BufferSpec
from mtpc.layout.buffers import K_MAX, S
from mtpc.models.caches import slot_spec
from mtpc.step.records import Metadata

Projected: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, keys and values side by side, [T, C]; z [T, HV, Dv]; b and a, each [T, HV]."""


def recurrent_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """State buffers of one layer by request slot; see `mtpc.ops.gated_delta`.

    A request has one recurrent state, and the inputs of its last K_max + W - 1 positions, where W
    is the width of the convolution.
    """
    heads, key_dim = config.linear_num_value_heads, config.linear_key_head_dim
    value_dim, back = config.linear_value_head_dim, config.linear_conv_kernel_dim - 1
    channels = 2 * config.linear_num_key_heads * key_dim + heads * value_dim
    wide = torch.promote_types(dtype, torch.float32)
    return (
        slot_spec(f"kv.{layer}.recurrent", (S, heads, key_dim, value_dim), wide,
                  "Gated DeltaNet: state matrices by request slot", VERIFY),
        slot_spec(f"kv.{layer}.history", (S, K_MAX + back, channels + 2 * heads), dtype,
                  "Gated DeltaNet: the last inputs by request slot", VERIFY),
        slot_spec(f"kv.{layer}.standing", (S,), torch.int32,
                  "Gated DeltaNet: number of positions that are in the state", VERIFY),
    )  # fmt: skip


@dataclass(frozen=True)
class RecurrentState:
    """State of a Gated DeltaNet layer by request slot; `mtpc.ops.gated_delta` gives the shapes."""

    recurrent: Tensor
    history: Tensor
    standing: Tensor

    def run(self, module: Any, rows: Tensor, metadata: Metadata) -> Tensor:
        """Run the recurrence over inputs [T, C + 2 HV], update the state; returns [T, HV, Dv]."""
        return ops.gated_delta_rule(
            rows,
            module.conv1d.weight.squeeze(1),
            module.A_log,
            module.dt_bias,
            self.recurrent,
            self.history,
            self.standing,
            metadata.state_slots,
            metadata.seq_lens,
            metadata.query_start_loc,
            metadata.certain_lens,
        )


class GatedDelta(nn.Module):
    """A Gated DeltaNet layer over flat rows.

    Args:
        module: transformers' module; its submodules and parameters are shared.
        project: computes the input projections: (this module, hidden [T, H]) -> `Projected`.

    Raises:
        UnsupportedModelError: the activation is not SiLU, or the convolution has a bias.
    """

    norm: nn.Module
    out_proj: nn.Module

    def __init__(self, module: Any, project: Callable[[Any, Tensor], Projected]):
        super().__init__()
        for name, child in module.named_children():
            self.add_module(name, child)
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        if module.activation not in ("silu", "swish"):
            raise UnsupportedModelError(
                f"{type(module).__name__} has the activation {module.activation!r}; expected "
                "'silu', which mtpc::gated_delta_rule computes"
            )
        if module.conv1d.bias is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} has a convolution with a bias; expected one without"
            )
        self.layer_idx: int = module.layer_idx
        self.num_k_heads, self.head_k_dim = module.num_k_heads, module.head_k_dim
        self.num_v_heads, self.head_v_dim = module.num_v_heads, module.head_v_dim
        self._project = project

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """[1, T, H] -> [1, T, H]. `options` has the `StepContext` in the place of the cache."""
        context = options["cache" if "cache" in options else "cache_params"]  # since, before 5.24
        mixed, z, b, a = self._project(self, hidden_states[0])
        state = context.layers[self.layer_idx]
        out = state.run(self, torch.cat([mixed, b, a], -1), context)
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

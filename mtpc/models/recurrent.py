"""Recurrent layers on explicit state: the buffers, and what their canonical modules share.

transformers' layers take their state from its own cache class, and no interface redirects that. So
a module of mtpc replaces such a layer in mtpc's copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtpc.errors import UnsupportedModelError
from mtpc.layout import VERIFY, BufferSpec
from mtpc.layout.buffers import K_MAX, S
from mtpc.models.caches import PagedKV, slot_spec
from mtpc.models.seams import StandIn


@dataclass(frozen=True)
class Recurrence:
    """What a recurrent layer keeps of a request: one state of the shape `matrices`, and the values
    that the recurrence takes (`inputs` a row) of its last K_max + W - 1 positions. W is the width
    of the convolution."""

    what: str
    matrices: tuple[int, ...]
    inputs: int
    width: int

    def specs(self, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
        """State buffers of a layer of a model by request slot; see `mtpc.ops.recurrence`."""
        wide, back = torch.promote_types(dtype, torch.float32), self.width - 1
        return (
            slot_spec(f"kv.{layer}.recurrent", (S, *self.matrices), wide,
                      f"{self.what}: state matrices by request slot", VERIFY),
            slot_spec(f"kv.{layer}.history", (S, K_MAX + back, self.inputs), dtype,
                      f"{self.what}: the last inputs by request slot", VERIFY),
            slot_spec(f"kv.{layer}.standing", (S,), torch.int32,
                      f"{self.what}: number of positions that are in the state", VERIFY),
        )  # fmt: skip


@dataclass(frozen=True)
class RecurrentState:
    """State of a recurrent layer by request slot; `mtpc.ops.recurrence` gives the shapes."""

    recurrent: Tensor
    history: Tensor
    standing: Tensor


@dataclass(frozen=True, kw_only=True)
class RecurrentKV(PagedKV):
    """State of a layer that attends and recurs side by side."""

    recurrent: Tensor
    history: Tensor
    standing: Tensor


def cache_of(given: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a recurrent layer's forward."""
    return given["cache" if "cache" in given else "cache_params"]  # since, before 5.24


class RecurrentLayer(StandIn):
    """A recurrent layer over flat rows, in place of transformers' module.

    Raises:
        UnsupportedModelError: the activation is not SiLU.
    """

    def __init__(self, module: Any):
        super().__init__(module)
        if module.activation not in ("silu", "swish"):
            raise UnsupportedModelError(
                f"{type(module).__name__} has the activation {module.activation!r}; expected "
                "'silu', which mtpc's recurrences compute"
            )

    def recur(
        self,
        operator: Callable[..., Tensor],
        rows: Tensor,
        weights: tuple[Tensor | None, ...],
        given: Mapping[str, Any],
        *options: int,
    ) -> Tensor:
        """Run a recurrence on the layer's state, and update it: an operator of `mtpc.ops` on rows
        [T, ...], weights, the state of the `StepContext` that is in the cache's place among the
        arguments of `forward`, and options, in this order. Returns [T, HV, Dv]."""
        context = cache_of(given)
        state: RecurrentState | RecurrentKV = context.layers[self.layer_idx]
        return operator(
            rows,
            *weights,
            state.recurrent,
            state.history,
            state.standing,
            context.state_slots,
            context.seq_lens,
            context.query_start_loc,
            context.certain_lens,
            *options,
        )

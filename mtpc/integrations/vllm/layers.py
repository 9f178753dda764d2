"""vLLM's linear layers and fused experts for the sites of a traced draft."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, MoERunner
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from mtpc.errors import UnsupportedModelError
from mtpc.integrations.layer_sites import ExpertsSite, LinearSite
from mtpc.integrations.parallel_layers import ParallelLayers
from mtpc.integrations.vllm.rules import OWN_DRAFT


class VllmLayers(ParallelLayers):
    """vLLM's layers.

    Args:
        vllm_config: vLLM's config for the draft.
        quantises_joint: see `ParallelLayers`.
    """

    host = "vLLM"
    instead = OWN_DRAFT

    def __init__(self, vllm_config: VllmConfig, quantises_joint: bool):
        ranks: int = get_tensor_model_parallel_world_size()
        super().__init__(ranks, vllm_config.quant_config, quantises_joint)

    def make_linear(self, site: LinearSite, options: dict[str, Any]) -> nn.Module:
        """See `ParallelLayers`."""
        if site.style == "replicated":
            return ReplicatedLinear(**options, return_bias=False)
        if site.style == "row":
            return RowParallelLinear(**options, return_bias=False)
        rank = get_tensor_model_parallel_rank() * site.parts // self.ranks
        return ColumnParallelLinear(**options, return_bias=False, tp_rank=rank, tp_size=site.parts)

    def make_experts(self, site: ExpertsSite) -> nn.Module:
        """See `ParallelLayers`.

        Raises:
            UnsupportedModelError: the experts bound their activations.
        """
        if site.limit:
            raise UnsupportedModelError(
                f"{site.name} are experts that bound their activations by {site.limit}, which "
                f"mtpc does not support in vLLM; {self.instead}"
            )
        gate, up, down = site.projections
        return RoutedExperts(
            FusedMoEFactory(
                num_experts=site.num_experts,
                top_k=site.top_k,
                hidden_size=site.hidden_size,
                intermediate_size=site.intermediate_size,
                activation=site.activation,
                quant_config=self.quant_config,
                prefix=site.name,
                custom_routing_function=_unpack,
                ckpt_names=(gate, down, up),
            )
        )

    def load_tensor(self, module: nn.Module, name: str, tensor: Tensor) -> set[str]:
        """See `ParallelLayers`."""
        if isinstance(module, RoutedExperts):
            try:
                return set(module.fused.load_weights([(name, tensor)]))
            except AttributeError as error:  # They have no parameter for the tensor.
                raise LookupError(str(error)) from error
        parameter = dict(module.named_parameters())[name]
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
        return {name}

    def inner(self, module: nn.Module) -> nn.Module:
        """See `ParallelLayers`."""
        return module.fused if isinstance(module, RoutedExperts) else module


class RoutedExperts(nn.Module):
    """vLLM's fused experts for rows whose experts are chosen already; see `ExpertsSite`."""

    def __init__(self, fused: MoERunner):
        super().__init__()
        self.fused = fused

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], ids int64 [T, k], weights [T, k] -> [T, H]."""
        # vLLM passes one tensor to its routing function. Ids below 2^24 are exact in float32.
        packed = torch.cat([weights.float(), ids.float()], -1)
        return self.fused(x, packed)


def _unpack(
    hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """vLLM's interface of a routing function: weights float32 [T, k], ids int32 [T, k]."""
    weights, ids = gating_output.split(topk, -1)
    return weights, ids.int()

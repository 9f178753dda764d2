"""vLLM's linear layers and fused experts for the sites of a traced draft.

They cut weights among the ranks of tensor and expert parallelism, follow vLLM's quantisation
config, and load the checkpoint's tensors by their own loaders.
"""

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

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.integrations.layer_sites import ExpertsSite, LinearSite


class VllmLayers:
    """Makes and loads vLLM's layers; see `HostLayers`.

    Args:
        vllm_config: vLLM's config for the draft.
        quantises_joint: whether vLLM's own class of the architecture quantises the projection of
            embedding and hidden state. Other classes never quantise it.
    """

    def __init__(self, vllm_config: VllmConfig, quantises_joint: bool):
        self.ranks: int = get_tensor_model_parallel_world_size()
        self._quant_config = vllm_config.quant_config
        self._quantises_joint = quantises_joint

    def linear(self, site: LinearSite) -> nn.Module:
        """Make vLLM's linear layer. Its name is the checkpoint's, as in quantisation configs."""
        is_plain = site.is_joint and not self._quantises_joint
        options: dict[str, Any] = dict(
            input_size=site.in_features,
            output_size=site.out_features,
            bias=site.has_bias,
            quant_config=None if is_plain else self._quant_config,
            prefix=site.name,
            return_bias=False,
        )
        if site.style == "replicated":
            return ReplicatedLinear(**options)
        if site.style == "row":
            return RowParallelLinear(**options)
        rank = get_tensor_model_parallel_rank() * site.parts // self.ranks
        return ColumnParallelLinear(**options, tp_rank=rank, tp_size=site.parts)

    def experts(self, site: ExpertsSite) -> nn.Module:
        """Make vLLM's fused experts; the draft's graph chooses among them.

        Raises:
            UnsupportedModelError: experts without a gate.
        """
        gate, up, down = site.projections
        if not gate:
            raise UnsupportedModelError(
                f"{site.name} are experts without a gate, which mtpc does not support in vLLM; "
                "leave mtpc out of VLLM_PLUGINS to run vLLM's own draft class"
            )
        return RoutedExperts(
            FusedMoEFactory(
                num_experts=site.num_experts,
                top_k=site.top_k,
                hidden_size=site.hidden_size,
                intermediate_size=site.intermediate_size,
                activation=site.activation,
                quant_config=self._quant_config,
                prefix=site.name,
                custom_routing_function=_unpack,
                ckpt_names=(gate, down, up),
            )
        )

    def load(self, module: nn.Module, name: str, tensor: Tensor) -> set[str]:
        """See `HostLayers.load`."""
        try:
            if isinstance(module, RoutedExperts):
                return set(module.fused.load_weights([(name, tensor)]))
            parameter = dict(module.named_parameters())[name]
            load = getattr(parameter, "weight_loader", default_weight_loader)
            load(parameter, tensor)
        except AttributeError as error:  # vLLM's experts have no parameter for the tensor.
            raise LookupError(str(error)) from error
        except (AssertionError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{module.extra_repr()}: vLLM does not load {name} {tuple(tensor.shape)} of "
                f"{tensor.dtype}: {error}; download the checkpoint again, or correct its "
                "quantization_config"
            ) from error
        return {name}

    def parameters(self, module: nn.Module) -> set[str]:
        """See `HostLayers.parameters`. `g_idx` may be absent; vLLM then computes it."""
        if isinstance(module, RoutedExperts):
            module = module.fused
        return {name for name, _ in module.named_parameters() if "g_idx" not in name}


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

"""SGLang's linear layers and fused experts for the sites of a traced draft."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    ReplicatedParallelGroup,
    RowParallelLinear,
)
from sglang.srt.layers.moe import get_moe_a2a_backend
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from mtpc.errors import UnsupportedModelError
from mtpc.integrations.layer_sites import ExpertsSite, LinearSite
from mtpc.integrations.parallel_layers import ParallelLayers

OWN_DRAFT = "start SGLang without SGLANG_EXTERNAL_MODEL_PACKAGE to use its own draft"


_LIMITS = {True: "swiglu_limit", False: "gemm1_clamp_limit"}
"""SGLang's options for `ExpertsSite.limit`, by `limit_input`."""


class SGLangLayers(ParallelLayers):
    """SGLang's layers.

    Args:
        quant_config: SGLang's quantisation config, or None.
        quantises_joint: see `ParallelLayers`.
    """

    host = "SGLang"
    instead = OWN_DRAFT

    def __init__(self, quant_config: Any, quantises_joint: bool):
        super().__init__(get_parallel().tp_size, quant_config, quantises_joint)

    def make_linear(self, site: LinearSite, options: dict[str, Any]) -> nn.Module:
        """See `ParallelLayers`."""
        if site.style == "replicated":
            return HostedLinear(ReplicatedLinear(**options))
        if site.style == "row":
            return HostedLinear(RowParallelLinear(**options, parallel_group="tp"))
        # Consecutive ranks share a part if there are fewer parts than ranks.
        group = ReplicatedParallelGroup("tp", self.ranks // site.parts)
        return HostedLinear(ColumnParallelLinear(**options, parallel_group=group))

    def make_experts(self, site: ExpertsSite) -> nn.Module:
        """See `ParallelLayers`.

        Raises:
            UnsupportedModelError: SGLang's runner of experts chooses the experts itself, or its
                ranks exchange tokens.
        """
        if not get_moe_a2a_backend().is_none():
            raise UnsupportedModelError(
                f"--moe-a2a-backend {get_moe_a2a_backend().value}: mtpc's drafts support experts "
                f"that every rank has a part of; expected none, or {OWN_DRAFT}"
            )
        fused = FusedMoE(
            num_experts=site.num_experts,
            hidden_size=site.hidden_size,
            intermediate_size=site.intermediate_size,
            layer_id=site.index,
            top_k=site.top_k,
            reduce_results=True,
            quant_config=self.quant_config,
            prefix=site.name,
            activation=site.activation,
            # Shared experts read the same rows.
            inplace=False,
            **{_LIMITS[site.limit_input]: site.limit or None},
        )
        runner = fused.runner_backend
        if runner is not None and (
            runner.is_triton_kernels()
            or runner.is_flashinfer_trtllm()
            or runner.is_flashinfer_mxfp4()
        ):
            raise UnsupportedModelError(
                f"--moe-runner-backend {runner.value} takes the router's logits, and the draft's "
                f"graph chooses the experts; choose another runner, or {OWN_DRAFT}"
            )
        return RoutedExperts(fused, site.projections)

    def load_tensor(self, module: nn.Module, name: str, tensor: Tensor) -> set[str]:
        """See `ParallelLayers`."""
        stem, _, leaf = name.rpartition(".")
        if leaf == "scale":  # As DeepSeek-V4 names what SGLang knows by DeepSeek-V3's name.
            name = f"{stem}.weight_scale_inv".removeprefix(".")
        if isinstance(module, RoutedExperts):
            return module.load(name, tensor)
        parameter = dict(self.inner(module).named_parameters())[name]
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
        return {name}

    def inner(self, module: nn.Module) -> nn.Module:
        """See `ParallelLayers`."""
        assert isinstance(module, (HostedLinear, RoutedExperts))
        return module.inner


class HostedLinear(nn.Module):
    """SGLang's linear layer, without the bias that SGLang returns beside the result."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> Tensor:
        """The layer's weight, as SGLang stores it."""
        inner: Any = self.inner
        weight: Tensor = inner.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], see `LinearSite`."""
        out: Tensor = self.inner(x)[0]
        return out


class RoutedExperts(nn.Module):
    """SGLang's fused experts for rows whose experts are chosen already; see `ExpertsSite`."""

    def __init__(self, inner: FusedMoE, projections: tuple[str, str, str]):
        super().__init__()
        self.inner = inner
        # SGLang's names of an expert's projections, and of the parameters that hold them.
        shards = (("w1", "w13"), ("w3", "w13"), ("w2", "w2"))
        self._shards = dict(zip(projections, shards, strict=True))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], ids int64 [T, k], weights [T, k] -> [T, H]."""
        logits = weights.new_empty((len(x), self.inner.num_experts))  # Not read.
        chosen = StandardTopKOutput(weights.float(), ids.to(torch.int32), logits)
        out: Tensor = self.inner(x, chosen)
        return out

    def load(self, name: str, tensor: Tensor) -> set[str]:
        """Load a tensor of one expert, such as "3.up_proj.weight"; see `HostLayers.load`."""
        index, projection, leaf = name.split(".", 2)
        shard, prefix = self._shards[projection]
        parameter = dict(self.inner.named_parameters())[f"{prefix}_{leaf}"]
        if not 0 <= int(index) < self.inner.num_experts:
            raise LookupError(name)
        load: Any = parameter.weight_loader
        load(parameter, tensor, name, shard_id=shard, expert_id=int(index))
        return {f"{prefix}_{leaf}"}

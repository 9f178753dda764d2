"""SGLang's layers of one rank, and its attention backend for DeepSeek-V4, for `fake_sglang`.

Written from the sources of SGLang 0.5.23; the line of SGLang's source is beside each demand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WINDOW = 6
"""`SWA_WINDOW`: 128 in layers/attention/deepseek_v4_backend.py:161, the tiny model's here."""


@dataclass(frozen=True)
class Fp8Config:
    """layers/quantization/fp8.py: codes `weight`, and `weight_scale_inv`, one for each block."""

    block: int

    def get_name(self) -> str:
        return "fp8"

    def widen(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Codes [..., N, K] times scales [..., N / block, K / block]."""
        whole = scales.repeat_interleave(self.block, -2).repeat_interleave(self.block, -1)
        return codes.to(torch.get_default_dtype()) * whole


class Weights(nn.Module):
    """A module's weights by name, plain or as codes with their scales."""

    def __init__(self, quant_config: Fp8Config | None, shapes: dict[str, tuple[int, ...]]):
        super().__init__()
        self.quant_config = quant_config
        for name, shape in shapes.items():
            dtype = torch.get_default_dtype() if quant_config is None else torch.float8_e4m3fn
            self.add(name, torch.full(shape, float("nan")).to(dtype))
            if quant_config is not None:
                *experts, rows, columns = shape
                grid = (*experts, rows // quant_config.block, columns // quant_config.block)
                self.add(f"{name}_scale_inv", torch.full(grid, float("nan"), dtype=torch.float32))

    def add(self, name: str, tensor: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def get(self, name: str) -> Tensor:
        weight = self.get_parameter(name)
        if self.quant_config is None:
            return weight
        return self.quant_config.widen(weight, self.get_parameter(f"{name}_scale_inv"))


class ReplicatedLinear(Weights):
    """layers/linear.py: a linear layer that every rank has whole. It returns its bias apart."""

    def __init__(
        self, input_size: int, output_size: int, bias: bool, quant_config: Any, prefix: str
    ):
        super().__init__(quant_config, {"weight": (output_size, input_size)})
        assert not bias
        self.prefix = prefix

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(x, self.get("weight")), None


class ReplicatedParallelGroup(NamedTuple):
    """layers/linear.py:62: how many consecutive ranks share a part."""

    group: str
    replica_size: int


class ColumnParallelLinear(ReplicatedLinear):
    """layers/linear.py:395, of one rank."""

    def __init__(self, parallel_group: ReplicatedParallelGroup, **options: Any):
        super().__init__(**options)
        assert parallel_group == ("tp", 1)


class RowParallelLinear(ReplicatedLinear):
    """layers/linear.py:1503, of one rank."""

    def __init__(self, parallel_group: str, **options: Any):
        super().__init__(**options)
        assert parallel_group == "tp"


class FusedMoE(Weights):
    """layers/moe/fused_moe_triton/layer.py:338."""

    runner_backend = None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        layer_id: int,
        top_k: int,
        reduce_results: bool,
        quant_config: Any,
        prefix: str,
        activation: str,
        inplace: bool,
        gemm1_clamp_limit: float | None = None,
        swiglu_limit: float | None = None,
    ):
        shapes = {
            "w13_weight": (num_experts, 2 * intermediate_size, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size),
        }
        super().__init__(quant_config, shapes)
        assert activation == "silu"
        assert reduce_results
        assert not inplace  # Shared experts read the same rows.
        self.num_experts, self.top_k, self.prefix = num_experts, top_k, prefix
        self.after, self.before = gemm1_clamp_limit, swiglu_limit
        for parameter in self.parameters():
            parameter.weight_loader = self.load  # type: ignore[attr-defined]

    def load(
        self, parameter: nn.Parameter, tensor: Tensor, name: str, shard_id: str, expert_id: int
    ) -> None:
        own = parameter.data[expert_id]
        halves = own.chunk(2) if shard_id in ("w1", "w3") else (own,)
        halves[shard_id == "w3"].copy_(tensor)

    def forward(self, x: Tensor, chosen: TopK) -> Tensor:
        """moe_runner/triton_utils/fused_moe.py:741-797: which of the limits bounds what."""
        out, first, second = torch.zeros_like(x), self.get("w13_weight"), self.get("w2_weight")
        limit = self.before or self.after or float("inf")
        for row, (ids, weights) in enumerate(
            zip(chosen.topk_ids, chosen.topk_weights, strict=True)
        ):
            assert len(ids) == self.top_k
            for expert, weight in zip(ids.tolist(), weights, strict=True):
                gate, up = (first[expert] @ x[row]).chunk(2)
                gate = nn.functional.silu(gate.clamp(max=limit) if self.before else gate)
                inner = gate.clamp(max=limit) * up.clamp(-limit, limit)
                out[row] += weight * (second[expert] @ inner)
        return out


class TopK(NamedTuple):
    """`StandardTopKOutput` (layers/moe/topk.py:363)."""

    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Tensor


def load_whole(parameter: nn.Parameter, tensor: Tensor) -> None:
    """`default_weight_loader`."""
    assert parameter.shape == tensor.shape
    parameter.data.copy_(tensor)


NO_EXCHANGE = SimpleNamespace(is_none=lambda: True)
"""What `get_moe_a2a_backend` answers where ranks exchange no tokens."""


@dataclass
class DeepseekV4Backend:
    """`DeepseekV4AttnBackend.forward` (layers/attention/deepseek_v4_backend.py:4132-4404), and
    that of ROCm (deepseek_v4_backend_hip_radix.py:3268), for a layer without compressed entries.

    The keys are the values. What a request's later rows wrote over is gone, as in the pool.

    Attributes:
        rows: the pool of layer 0, [slots, D]; a real one has 584 bytes of FP8 a row.
        slots: by request, the slots of its tokens up to those of this forward.
    """

    rows: Tensor
    slots: list[Tensor] = field(default_factory=list)
    calls: int = 0

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        compress_ratio: int,
        save_kv_cache: bool = True,
        attn_sink: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        assert k is v  # 4168
        assert attn_sink is not None  # 4235
        assert attn_sink.shape == (layer.tp_q_head_num,) == q.shape[1:2]
        assert attn_sink.dtype.itemsize >= 4
        assert (compress_ratio, layer.layer_id, save_kv_cache) == (0, 0, True)
        self.calls += 1
        self.rows[forward_batch.out_cache_loc] = k  # 4177, 4122
        out = []
        for query, slots in zip(q.split(forward_batch.extend_lens), self.slots, strict=True):
            keys = self.rows[slots]
            # The backend's scale is its own: head_dim**-0.5 (1254).
            scores = torch.einsum("qnd,kd->nqk", query, keys) * q.shape[-1] ** -0.5
            at = torch.arange(len(keys))
            own = at[len(keys) - len(query) :, None]
            seen = (at <= own) & (at > own - WINDOW)
            scores = scores.masked_fill(~seen, float("-inf"))
            sinks = attn_sink[:, None, None].expand(-1, len(query), 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].nan_to_num()
            values = torch.where(seen.any(0)[:, None], keys, 0)
            out.append(torch.einsum("nqk,kd->qnd", weights, values))
        return torch.cat(out)

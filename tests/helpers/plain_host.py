"""A host in plain torch: attention without a cache, and layers cut among threads as ranks."""

from __future__ import annotations

from threading import Barrier
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from mtpc.integrations.attention_site import AttentionSite, expand_latent
from mtpc.integrations.layer_sites import ExpertsSite, LinearSite

FAMILIES = (
    *("mimo", "glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v4"),
)
CHAINED = ("mimo_v2", "step3p7")
TOKENS = [5, 9, 17, 33, 40, 41, 2, 90, 7, 61, 12, 13]


class Causal(nn.Module):
    """Attention of one request over all rows so far, without a cache."""

    def __init__(self, site: AttentionSite):
        super().__init__()
        self.site, self.calls = site, 0

    def forward(self, q: Tensor, first: Tensor, second: Tensor) -> Tensor:
        site, self.calls = self.site, self.calls + 1
        keys, values = first, second
        if site.kind == "latent":
            assert first.shape[1:] == (site.latent_rank,)
            assert second.shape[1:] == (site.rope_head_dim,)
            keys, values = expand_latent(site, first, second)
        if site.kind == "shared":
            assert second is first
            keys = values = first[:, None]
        assert q.shape[1:] == (site.num_heads, site.head_dim)
        assert keys.shape[1:] == (site.num_kv_heads, site.head_dim)
        assert values.shape[1:] == (site.num_kv_heads, site.v_head_dim)
        groups = site.num_heads // site.num_kv_heads
        scores = torch.einsum("tnd,snd->nts", q, keys.repeat_interleave(groups, 1)) * site.scale
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = (distance >= 0) & (distance < (site.sliding_window or len(q)))
        scores = scores.masked_fill(~seen, float("-inf"))
        if site.sinks is not None:
            sinks = site.sinks[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : len(q)]
        return torch.einsum("nts,snd->tnd", weights, values.repeat_interleave(groups, 1))


class Group:
    """Ranks that are threads."""

    def __init__(self, size: int):
        self.size, self.barrier = size, Barrier(size, timeout=60)
        self.given: list[Any] = [None] * size

    def sum(self, rank: int, tensor: Tensor) -> Tensor:
        self.given[rank] = tensor
        self.barrier.wait()
        total = torch.stack(self.given).sum(0)
        self.barrier.wait()
        return total


class Linear(nn.Module):
    """One rank's part of a linear layer."""

    def __init__(self, site: LinearSite, rank: int, group: Group):
        super().__init__()
        self.site, self.rank, self.group = site, rank, group
        out, into = site.width, site.in_features
        into //= site.parts if site.style == "row" else 1
        self.weight = nn.Parameter(torch.full((out, into), torch.nan, dtype=torch.float64))
        self.bias = nn.Parameter(torch.full((out,), torch.nan, dtype=torch.float64))
        if not site.has_bias:
            self.bias = None

    def load(self, name: str, tensor: Tensor) -> None:
        if name not in dict(self.named_parameters()):
            raise LookupError(name)
        if self.site.style == "column":
            part = self.rank * self.site.parts // self.group.size
            tensor = tensor.chunk(self.site.parts)[part]
        elif self.site.style == "row" and name == "weight":
            tensor = tensor.chunk(self.site.parts, 1)[self.rank]
        self.get_parameter(name).data.copy_(tensor)

    def forward(self, rows: Tensor) -> Tensor:
        assert rows.dim() == 2
        bias = self.bias
        if self.site.style != "row" or self.group.size == 1:
            return nn.functional.linear(rows, self.weight, bias)
        out = self.group.sum(self.rank, nn.functional.linear(rows, self.weight))
        return out if bias is None else out + bias


class Experts(nn.Module):
    """One rank's part of every expert."""

    def __init__(self, site: ExpertsSite, rank: int, group: Group):
        super().__init__()
        self.site, self.rank, self.group = site, rank, group
        width = site.intermediate_size // group.size
        up, down = (site.num_experts, width, site.hidden_size), site.projections[2]
        for name in filter(None, site.projections):
            shape = (up[0], up[2], up[1]) if name == down else up
            full = torch.full(shape, torch.nan, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(full))

    def load(self, name: str, tensor: Tensor) -> str:
        index, projection, leaf = name.split(".")
        if leaf != "weight":
            raise LookupError(name)
        dim = 1 if projection == self.site.projections[2] else 0
        part = tensor.chunk(self.group.size, dim)[self.rank]
        self.get_parameter(projection).data[int(index)].copy_(part)
        return projection

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        assert ids.shape == weights.shape == (len(x), self.site.top_k)
        gate, up, down = self.site.projections
        act, out = ACT2FN[self.site.activation], torch.zeros_like(x)
        limit = self.site.limit or float("inf")
        for row, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
            for expert, share in zip(chosen, shares, strict=True):
                inner = (self.get_parameter(up)[expert] @ x[row]).clamp(-limit, limit)
                if gate:
                    given = self.get_parameter(gate)[expert] @ x[row]
                    before = given.clamp(max=limit) if self.site.limit_input else given
                    inner = act(before).clamp(max=limit) * inner
                else:
                    inner = act(inner)
                out[row] += share * (self.get_parameter(down)[expert] @ inner)
        return self.group.sum(self.rank, out)


class Host:
    """The plain host; a subclass plants faults."""

    def __init__(self, rank: int, group: Group):
        self.ranks, self.rank, self.group = group.size, rank, group

    def linear(self, site: LinearSite) -> nn.Module:
        return Linear(site, self.rank, self.group)

    def experts(self, site: ExpertsSite) -> nn.Module:
        return Experts(site, self.rank, self.group)

    def load(self, module: Any, name: str, tensor: Tensor) -> set[str]:
        return {module.load(name, tensor) or name}

    def parameters(self, module: nn.Module) -> set[str]:
        return {name for name, _ in module.named_parameters()}

"""DeepSeek-V4's hyper-connections, with all rounds of normalisation as one op.

A canonical module for transformers' `DeepseekV4HyperConnection` (5.17 to 5.24). A trace of
transformers' module has about ten nodes for each of `hc_sinkhorn_iters` rounds, twice per layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtpc.ops.sinkhorn import sinkhorn


class HyperConnection(nn.Module):
    """Computes the weights that join residual streams before a sublayer and mix them after it.

    Args:
        module: transformers' `DeepseekV4HyperConnection`; parameters are shared and keep their
            names.
    """

    def __init__(self, module: Any):
        super().__init__()
        self.fn, self.base, self.scale = module.fn, module.base, module.scale
        self.input_norm = module.input_norm
        self.streams, self.rounds = module.hc_mult, module.hc_sinkhorn_iters
        self.epsilon = module.hc_eps

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of the streams, and the streams joined for the sublayer.

        Args:
            streams: [B, T, n, H].

        Returns:
            post [B, T, n]: weight of the sublayer's output in each new stream;
            mix [B, T, n, n]: weights of the old streams in each new stream;
            joined [B, T, H]: the sublayer's input, in the dtype of `streams`.
            The weights are float32 or wider.
        """
        n = self.streams
        flat = self.input_norm(streams.flatten(2).float())
        sizes = [n, n, n * n]
        pre, post, mix = F.linear(flat, self.fn.float()).split(sizes, -1)
        pre_base, post_base, mix_base = self.base.split(sizes)
        pre = torch.sigmoid(pre * self.scale[0] + pre_base) + self.epsilon
        post = 2 * torch.sigmoid(post * self.scale[1] + post_base)
        logits = (mix * self.scale[2] + mix_base).view(-1, n, n)
        mix = sinkhorn(logits, self.rounds, self.epsilon)
        joined = (pre.unsqueeze(-1) * streams).sum(2).to(streams.dtype)
        return post, mix.view(*post.shape, n), joined

"""Sinkhorn-Knopp normalisation of the weights that mix residual streams."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpc.ops.traits import Traits, operator


@operator(Traits("row", "sums", rows="logits", features=None), "logits")
def sinkhorn(logits: Tensor, rounds: int, epsilon: float) -> Tensor:
    """Make square matrices nearly doubly stochastic.

    First a softmax over rows, plus epsilon, and columns divided by their sums plus epsilon. Then,
    rounds - 1 times, rows and columns are divided by their sums plus epsilon. DeepSeek-V4's
    hyper-connections compute it this way (Xie et al., 2026). A matrix's result depends on no other
    matrix.

    Args:
        logits: [T, n, n], float32 or float64.
        rounds: >= 1.
        epsilon: keeps sums above zero.

    Returns:
        [T, n, n], dtype of logits.
    """
    mixed = torch.softmax(logits, -1) + epsilon
    mixed = mixed / (mixed.sum(-2, keepdim=True) + epsilon)
    for _ in range(rounds - 1):
        mixed = mixed / (mixed.sum(-1, keepdim=True) + epsilon)
        mixed = mixed / (mixed.sum(-2, keepdim=True) + epsilon)
    return mixed

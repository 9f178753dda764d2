"""Sinkhorn-Knopp normalisation, of the weights by which residual streams are mixed."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("mtpc::sinkhorn", mutates_args=())
def sinkhorn(logits: Tensor, rounds: int, epsilon: float) -> Tensor:
    """Make square matrices nearly doubly stochastic.

    softmax over rows plus epsilon; columns normalised; then rounds - 1 times rows and columns, each
    by its sum plus epsilon. As DeepSeek-V4's hyper-connections compute it (Xie et al., 2026).
    Matrices are independent of each other.

    Args:
        logits: [T, n, n], float32 or float64.
        rounds: >= 1.
        epsilon: keeps sums from zero.

    Returns:
        [T, n, n], dtype of logits.
    """
    mixed = torch.softmax(logits, -1) + epsilon
    mixed = mixed / (mixed.sum(-2, keepdim=True) + epsilon)
    for _ in range(rounds - 1):
        mixed = mixed / (mixed.sum(-1, keepdim=True) + epsilon)
        mixed = mixed / (mixed.sum(-2, keepdim=True) + epsilon)
    return mixed


@sinkhorn.register_fake
def fake_sinkhorn(logits: Tensor, rounds: int, epsilon: float) -> Tensor:
    """Shape and dtype of the result."""
    return torch.empty_like(logits, memory_format=torch.contiguous_format)

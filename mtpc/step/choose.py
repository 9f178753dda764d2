"""The greedy choice of a token from logits: the target's, and the draft's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtpc.step.records import Chosen


class Choose(nn.Module):
    """The target's choice: the argmax over the vocabulary."""

    def forward(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Logits [N, V] -> `Chosen` [N]."""
        best, tokens = logits.max(-1)
        return tuple(Chosen(tokens, torch.isfinite(best)))


class Pick(nn.Module):
    """The draft's choice: the argmax over the vocabulary."""

    def forward(self, logits: Tensor) -> Tensor:
        """Logits [R, V] -> token ids, int64 [R]."""
        return logits.argmax(-1)

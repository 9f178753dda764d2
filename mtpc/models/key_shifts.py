"""What all keys of a layer have in common, which their codes need not hold.

A bias of the key projection is part of every key. The rotary embedding turns it by the key's
position, and turns most of its features so slowly that they look alike for thousands of tokens. In
Qwen2.5's first layer they are a hundred times as large as the rest, and a row's codes have one
scale. Softmax does not see a vector that is taken off all keys of a layer: each query's scores lose
one number. SageAttention takes off the mean of the keys for the same reason (arXiv:2410.02367). A
cache cannot wait for a mean, so this is the mean of what the bias becomes at the first positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

POSITIONS = 4096
"""Over so many positions the turned bias is averaged."""


class KeyShifts(nn.Module):
    """Layer -> what is taken off its keys before they become codes, [H_kv, D].

    Layers without a bias of the key projection have none. Neither have those where scores are more
    than products: with sinks, a cap, or a norm of keys behind the projection.
    """

    share: Tensor

    def __init__(self, decoder: nn.Module):
        super().__init__()
        rotary: Any = getattr(decoder, "rotary_emb", None)
        angles = getattr(rotary, "inv_freq", None)
        found: list[Any] = [module for module in decoder.modules() if _has_bias_alone(module)]
        # A module in a dict is no child: the decoder has it.
        self.attentions: dict[int, Any] = {}
        if angles is not None and found:
            self.attentions = {module.layer_idx: module for module in found}
            positions = torch.arange(POSITIONS, device=angles.device, dtype=torch.float64)
            turns = (positions[:, None] * angles.double()).cos().mean(0)
            width = found[0].head_dim
            share = torch.ones(width, device=angles.device, dtype=torch.float64)
            share[: 2 * len(turns)] = torch.cat([turns, turns])[:width]
            self.register_buffer("share", share, persistent=False)

    def forward(self, layer: int) -> Tensor:
        bias = self.attentions[layer].k_proj.bias
        return bias.view(-1, self.share.shape[0]) * self.share.to(bias.dtype)


def _has_bias_alone(module: Any) -> bool:
    projection = getattr(module, "k_proj", None)
    capped = getattr(getattr(module, "config", None), "attn_logit_softcapping", None)
    return (
        isinstance(projection, nn.Linear)
        and projection.bias is not None
        and isinstance(getattr(module, "layer_idx", None), int)
        and not capped
        and not any(hasattr(module, name) for name in ("sinks", "k_norm", "k_layernorm"))
    )

"""transformers' experts with gradients, with each expert's rows padded to a multiple of 64.

oneDNN compiles a kernel for each new shape. The number of rows of an expert changes in every step,
and without the padding compilation takes a third of a small model's training time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ROUNDED_EXPERTS = "mtpc_rounded"
"""The name under which transformers knows `rounded_experts`."""
_ROWS = 64


def rounded_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute what transformers' own forward of an experts module computes.

    Args:
        module: of a class with `use_experts_implementation`.
        hidden: [T, H].
        chosen: ids of each token's experts, int64 [T, k].
        weights: the experts' weights, [T, k].

    Returns:
        [T, H].
    """
    if module.has_bias or module.is_transposed or not module.has_gate:
        own: Tensor = type(module).forward.__wrapped__(module, hidden, chosen, weights)
        return own
    out = torch.zeros_like(hidden)
    pairs = zip(module.gate_up_proj.unbind(), module.down_proj.unbind(), strict=True)
    for expert, (gate_up, down) in enumerate(pairs):
        token, choice = torch.where(chosen == expert)
        if not len(token):
            continue
        rows = functional.pad(hidden[token], (0, 0, 0, -len(token) % _ROWS))
        gated = module._apply_gate(functional.linear(rows, gate_up))
        found = functional.linear(gated, down)[: len(token)]
        out.index_add_(0, token, (found * weights[token, choice, None]).to(out.dtype))
    return out

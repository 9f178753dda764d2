"""Step-3.7's experts as `mtpc::experts`; transformers' experts interface does not reach them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from mtpc.ops.experts import experts


class ClampedExperts(nn.Module):
    """SwiGLU experts with clamped gate and up projections.

    Args:
        module: transformers' `Step3p7Experts`; parameters are shared and keep their names.
    """

    def __init__(self, module: Any):
        super().__init__()
        self.gate_up_proj, self.down_proj = module.gate_up_proj, module.down_proj
        self.limit = 0.0 if math.isinf(module.limit) else float(module.limit)

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """x [T, H], expert_ids int64 [T, k], expert_weights [T, k]; returns [T, H]."""
        limit = [self.limit] if self.limit else []
        weights = (self.gate_up_proj, self.down_proj)
        return experts(x, *weights, expert_ids, expert_weights, *limit)

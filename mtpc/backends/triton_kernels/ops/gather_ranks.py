"""All ranks' small tensors: the launch of `sum_ranks`, which does not add."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.ops.sum_ranks import exchange, peers_limit

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element: numbers are moved as they are, whatever their dtype."""


@operator(peers_limit, any_element=True)
def gather_ranks(part: Tensor, ranks: int, group: str, after: Tensor | None) -> Plan:
    """One launch."""
    out, bits = part.new_empty([ranks, *part.shape]), _BITS[part.itemsize]
    return exchange(part.contiguous().view(bits), out.view(bits), group, is_sum=False), out

"""SwiGLU's two linear layers on codes with scales of groups, and its activation after them."""

from __future__ import annotations

from torch import Tensor

from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.ops.grouped_linear import grouped_linear, limit_linear
from mtpc.backends.triton_kernels.ops.silu_and_mul import silu_and_mul


@operator(limit=limit_linear, codes=True)
def grouped_gated_linear(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, features: int, *,
    batch_invariant: bool = False,
) -> Plan:  # fmt: skip
    """The launches of both."""
    given = (x, codes, scales, zeros, features, None)
    products, both = grouped_linear.function(*given, batch_invariant=batch_invariant)
    assert isinstance(both, Tensor)
    activation, out = silu_and_mul.function(both)
    return [*products, *activation], out

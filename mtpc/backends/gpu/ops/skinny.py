"""Linear layers of a few rows, alone and with the norm and the activation around them.

With a few rows, reading the weight takes the time of a linear layer. A kernel for that case reads
at the speed of the memory, and computes the norm before and the activation after it on the way.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from mtpc.ops.fused import add_rms_norm, silu_and_mul
from mtpc.ops.traits import Traits, operator, with_features

MOST_ROWS, MOST_NORM_ROWS = 4, 2
"""Most rows of a call, and of a call with a norm. With more rows, tensor cores are faster."""
WIDTH_MULTIPLE = 8
"""The number of inputs is a multiple of this: kernels read 16 bytes at once."""


@operator(Traits("row", "sums", rows="x"), lambda x, weight: with_features(x, weight.shape[0]))
def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, for few rows.

    Args:
        x: bfloat16 [..., K].
        weight: [N, K], of x's dtype.
        bias: [N], as above, or None.

    Returns:
        [..., N].
    """
    return F.linear(x, weight, bias)


@operator(
    Traits("row", "sums", rows="x added"),
    lambda x, weight, gated: (
        x.new_empty(x.shape),
        with_features(x, weight.shape[0] // (1 + gated)),
    ),
)
def norm_linear(
    x: Tensor,
    added: Tensor,
    norm_weight: Tensor,
    epsilon: float,
    plus_one: bool,
    weight: Tensor,
    bias: Tensor | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm`, the linear that reads the norm and, if gated, `silu_and_mul`, for few rows.

    A kernel may keep what this reference rounds in between, so that its result is the more precise.

    Args:
        x: bfloat16 [..., K].
        added: as x.
        norm_weight: [K], as in `rms_norm`.
        epsilon: as there.
        plus_one: as there.
        weight: [N, K], of x's dtype; if gated [2N, K], the gate's rows first.
        bias: [N], as above, or None; never if gated.
        gated: whether silu(gate) * up follows.

    Returns:
        x + added, and [..., N].
    """
    total, normed = add_rms_norm(x, added, norm_weight, epsilon, plus_one)
    out = F.linear(normed, weight, bias)
    return total, silu_and_mul(out) if gated else out

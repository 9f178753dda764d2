"""Fused operators between linear layers: each replaces several elementwise operators.

Each rounds where the operators that it replaces round. Fusing changes only the order of a norm's
sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtpc.ops.attention import write_cache
from mtpc.ops.experts import swiglu
from mtpc.ops.ragged import keep_rows
from mtpc.ops.traits import Traits, operator, with_features

_CACHES = ("k_cache", "v_cache", "k_scale", "v_scale")


@operator(Traits("row", "sums", rows="x"), "x")
def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, plus_one: bool = False, rows: Tensor | None = None
) -> Tensor:
    """Root mean square normalisation (https://arxiv.org/abs/1910.07467), in float32.

    Args:
        x: [..., N], of 16 bits.
        weight: [N], of x's dtype.
        epsilon: added to the mean square.
        plus_one: scale by 1 + weight, in float32 (Gemma's and Qwen3-Next's form), instead of
            rounding first and scaling by weight (Llama's).
        rows: int32 or int64 [1], how many leading rows of x are in use. The results of the others
            are undefined (`mtpc.ops.ragged.clear_idle_rows`).

    Returns:
        As x.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    scaled = normed * (1.0 + weight.float()) if plus_one else normed.to(x.dtype) * weight
    return keep_rows(scaled.to(x.dtype).contiguous(), rows)


@operator(
    Traits("row", "sums", rows="x added"), lambda x: (x.new_empty(x.shape), x.new_empty(x.shape))
)
def add_rms_norm(
    x: Tensor,
    added: Tensor,
    weight: Tensor,
    epsilon: float,
    plus_one: bool = False,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The residual stream after a block, x + added, and what the next block reads of it, its norm;
    both as x. Other arguments are those of `rms_norm`, `rows` for both results."""
    total = keep_rows((x + added).contiguous(), rows)
    return total, rms_norm(total, weight, epsilon, plus_one, rows)


@operator(
    Traits("row", "elements", rows="gate_up"),
    lambda gate_up: with_features(gate_up, gate_up.shape[-1] // 2),
)
def silu_and_mul(gate_up: Tensor, rows: Tensor | None = None) -> Tensor:
    """SwiGLU's activation (https://arxiv.org/abs/2002.05202), silu(gate) * up.

    Args:
        gate_up: [..., 2I], gate first.
        rows: as in `rms_norm`.

    Returns:
        [..., I].
    """
    return keep_rows(swiglu(gate_up, limit=0.0, limit_input=False), rows)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first `rope` features of x [T, n, D] by cos and sin [T, rope].

    Feature i pairs with feature i + rope / 2. The other features stay as they are.
    """
    turned, plain = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    across = torch.cat([-second, first], -1)
    return torch.cat([turned * cos[:, None] + across * sin[:, None], plain], -1)


@operator(Traits("row", "elements", rows="x cos sin", features=None), "x")
def rotate(x: Tensor, cos: Tensor, sin: Tensor, rows: Tensor | None = None) -> Tensor:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864), halves of a head paired.

    Args:
        x: [T, heads, D].
        cos: [T, C] of x's dtype, C even and at most D. Features of a head from C on stay as they
            are.
        sin: as cos.
        rows: int32 or int64 [1], how many of the T are in use. The results of the others are
            undefined.

    Returns:
        As x.
    """
    out = rotate_halves(x, cos, sin)
    return keep_rows(out.flatten(1), rows).view(out.shape)


@operator(
    Traits(
        "row",
        "elements",
        rows="q k v cos sin slot_mapping",
        pages=" ".join(_CACHES),
        features=None,
        writes_as="write_cache",
    ),
    "q",
    mutates_args=_CACHES,
)
def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_shift: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Everything between the projections and an attention: `rotate` q and k, `write_cache` k and v.

    q [T, N, D], k [T, H_kv, D] and v [T, H_kv, D_v] have cos, sin and rows as in `rotate`; cache
    writes depend on `slot_mapping` int64 [T] alone, where -1 writes nothing. The caches, [pages, P,
    H_kv, D] and [pages, P, H_kv, D_v], are of the dtypes of k and v, or of codes with scales
    float32 [pages, P, H_kv], see `write_cache`. `k_shift` [H_kv, D] is taken off rotated keys
    before they are written. Returns q, rotated.
    """
    keys = rotate(k, cos, sin)
    write_cache(k_cache, keys if k_shift is None else keys - k_shift, slot_mapping, k_scale)
    write_cache(v_cache, v, slot_mapping, v_scale)
    return rotate(q, cos, sin, rows)

"""Packing of weights; linear layers, linear layers per head, and experts on packed weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mtpc.ops.experts import experts
from mtpc.ops.fused import silu_and_mul
from mtpc.ops.ragged import keep_rows
from mtpc.ops.traits import Traits, largest_of, operator, with_features
from mtpc.weights.grouped import pack_scales, raw_codes
from mtpc.weights.packing import fill_packed, unpack


@operator(Traits("all", "moves"), mutates_args=("packed", "finite"))
def pack(weight: Tensor, packed: Tensor, finite: Tensor | None = None) -> None:
    """Write the packed form of a weight to given memory.

    Args:
        weight: bfloat16 or uint8 [..., N, K], K a multiple of g.
        packed: [..., ceil(N / 32), K / g, 32, g] of weight's dtype, see `mtpc.weights.packing`.
        finite: bool [1], which becomes False if the weight holds NaN or infinity.
    """
    fill_packed(weight, packed, finite)


@operator(Traits("all", "moves"), mutates_args=("codes", "scales", "zeros"))
def pack_blocks(
    raw: Tensor, block: str, codes: Tensor, scales: Tensor, zeros: Tensor | None = None
) -> None:
    """Write the packed form of a weight in blocks to given memory.

    Args:
        raw: uint8 [..., N, bytes of a row], rows as a GGUF file has them.
        block: ggml's name of their type, whose codes have at least 4 bits.
        codes: uint8 [..., ceil(N / 32), K * bits / 32, 32, 4], see `mtpc.weights.grouped`.
        scales: [..., ceil(N / 32), scales of a row, 32], of the type's dtype of scales.
        zeros: minima, as the scales, where the type has them outside of super-blocks.
    """
    from mtpc.weights.block_rows import BlockRows  # Not above: few models need it.
    from mtpc.weights.gguf.blocks import BLOCKS

    kind = next(each for each in BLOCKS.values() if each.name == block)
    weight = BlockRows(kind, raw).decoded()
    fill_packed(raw_codes(weight.codes, weight.form.kind).contiguous(), codes)
    scales.copy_(pack_scales(weight.scales))
    if zeros is not None and weight.zeros is not None:
        zeros.copy_(pack_scales(weight.zeros))


@operator(Traits("row", "sums", rows="x", gated="packed_gated_linear"), with_features)
def packed_linear(
    x: Tensor, weight: Tensor, features: int, bias: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    """x W^T + bias.

    Args:
        x: bfloat16 [..., K].
        weight: bfloat16 [ceil(N / 32), K / 2, 32, 2], as `mtpc.weights.packing.pack` makes it.
        features: N.
        bias: bfloat16 [N].
        rows: int32 or int64 [1], how many leading rows of x are in use. The results of the others
            are undefined (`mtpc.ops.ragged.clear_idle_rows`).

    Returns:
        bfloat16 [..., N].
    """
    return keep_rows(F.linear(x, unpack(weight, features), bias), rows)


@operator(Traits("row", "sums", rows="x"), largest_of)
def packed_linear_max(
    x: Tensor, weight: Tensor, features: int, bias: Tensor | None = None, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The largest feature of `packed_linear`: greedy choice by a head whose logits nothing reads.

    Arguments are those of `packed_linear`, with at least one feature.

    Returns:
        Values bfloat16 [...] and features int64 [...] of all rows. As in torch, the first of equals
        is the largest, and NaN is larger than any number.
    """
    values, indices = packed_linear(x, weight, features, bias, rows).max(-1)
    return values, indices


@operator(Traits("row", "sums", rows="x"), lambda x, features: with_features(x, features // 2))
def packed_gated_linear(
    x: Tensor, weight: Tensor, features: int, rows: Tensor | None = None
) -> Tensor:
    """silu(x G^T) * (x U^T): `silu_and_mul` of a `packed_linear`, rounded where they round.
    Arguments are those of `packed_linear`, for G [N / 2, K] and U [N / 2, K] packed as one, with N
    a multiple of 64. Returns bfloat16 [..., N / 2]."""
    return silu_and_mul(packed_linear(x, weight, features, None, rows), rows)


@operator(Traits("row", "sums", rows="x", features=None), with_features)
def packed_head_linear(
    x: Tensor, weight: Tensor, features: int, rows: Tensor | None = None
) -> Tensor:
    """x_h W_h^T for each head h: the up-projections of latent attention (DeepSeek-V2, 2.1.2).

    Arguments are those of `packed_linear`, for x bfloat16 [T, heads, K], a packed stack [heads, N,
    K], and rows of the T. Returns bfloat16 [T, heads, N].
    """
    plain = unpack(weight, features)
    out = torch.matmul(x.transpose(0, 1), plain.transpose(1, 2)).transpose(0, 1)
    return keep_rows(out.contiguous().flatten(1), rows).view(out.shape)


@operator(Traits("row", "sums", rows="x expert_ids expert_weights"), "x")
def packed_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    limit: float = 0.0,
    limit_input: bool = False,
    gelu: bool = False,
    rows: Tensor | None = None,
) -> Tensor:
    """`mtpc::experts` with its arguments, bfloat16, on packed stacks: gate_up [E, 2I / 32, H / 2,
    32, 2], where I is a multiple of 32, and down [E, ceil(H / 32), I / 2, 32, 2]. Ids are distinct
    per row. `rows` are as in `packed_linear`; a row that is not in use chooses no expert."""
    wide = unpack(gate_up, gate_up.shape[1] * gate_up.shape[3])
    narrow = unpack(down, x.shape[1])
    mixed = experts(x, wide, narrow, expert_ids, expert_weights, limit, limit_input, gelu)
    return keep_rows(mixed, rows)

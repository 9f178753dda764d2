"""Linear layers and experts on weights of 4 or 8 bits with a scale for each group of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpc.ops.experts import clamped_swiglu, sum_experts, swiglu
from mtpc.ops.fused import silu_and_mul
from mtpc.ops.ragged import keep_rows
from mtpc.ops.traits import Traits, operator, with_features
from mtpc.weights.grouped import GroupedWeight, codes_of, form_of, unpack_codes, unpack_scales
from mtpc.weights.packing import TILE

LARGEST = 127
"""The largest magnitude of inputs that are rounded to int8."""
TINY = 2.0**-100
"""Inputs of a group whose largest magnitude is smaller count as zeros."""


@operator(Traits("row", "sums", rows="x", gated="grouped_gated_linear"), with_features)
def grouped_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    features: int,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """x W^T + bias. W has a scale for each group of adjacent inputs of a feature.

    Dtypes and shapes say what kind of codes they are and how large a group is: uint8 codes
    [_, K / 8, 32, 4] are int4, and e2m1 if scales are uint8; int8 ones are iq4; uint8 codes
    [_, K b / 32, 32, 4] are integers of b bits. Scales int16 are words of super-blocks.

    With codes that stand for integers, x is rounded to int8: each row has one scale for each group
    of W, the largest magnitude of these inputs divided by 127. A group's sum of products is an
    exact integer. It becomes a float32, is multiplied by the product of both scales, and is added
    in float32 to the sum of the groups before it, first group first. With minima, the sum of the
    group's rounded inputs, an exact integer as float32, times the product of the row's scale and
    the minimum is then subtracted.

    With float8 codes, x stays as it is. A group's products are added in float32, first input first.
    The sum is multiplied by the group's scale and added as above.

    A product and the addition of it to a sum of groups are rounded once, as one. Processors without
    such an instruction round twice. A row's result depends on no other row, and in kernels not on
    the number of rows.

    Args:
        x: floating point [..., K].
        codes: uint8, int8 or float8_e4m3fn [ceil(N / 32), K b / 32, 32, 4] of b bits, as
            `unpack_codes` reads them.
        scales: float16, bfloat16, float32 or uint8 [ceil(N / 32), K / group, 32], or int16
            [ceil(N / 32), words, 32], of `pack_scales`.
        zeros: uint8 of the same shape, or None: 8 for int4 and 128 for int8. Of the scales' dtype
            they are minima. None for float8.
        features: N.
        bias: [N].
        rows: as in `packed_linear`.

    Returns:
        [..., N], of x's dtype.

    Raises:
        ValueError: codes and scales do not fit x.
    """
    form = form_of(x.shape[-1], codes, scales, zeros)
    plain = unpack_codes(codes, form.kind, features)
    points = None if zeros is None else unpack_scales(zeros, features)
    weight = GroupedWeight(form, plain, unpack_scales(scales, features), points).widened()
    grouped = x.float().unflatten(-1, (-1, form.group))
    sums = _float_sums if form.kind == "float8" else _integer_sums
    out = sums(grouped, weight)
    return keep_rows((out if bias is None else out + bias.float()).to(x.dtype), rows)


def _integer_sums(x: Tensor, weight: GroupedWeight) -> Tensor:
    """Sums over the groups of x [..., G, group] as int8: float32 [..., N]."""
    largest = x.abs().amax(-1, keepdim=True)
    # Divided as the kernel divides: torch multiplies a number over a tensor by its reciprocal.
    inverse = torch.full_like(largest, LARGEST) / largest
    integers = torch.round(x * torch.where(largest < TINY, 0.0, inverse)).double()
    steps = (largest / LARGEST).squeeze(-1)
    codes = weight.codes.double().unflatten(-1, (-1, weight.form.group))
    form, zeros = weight.form, weight.zeros
    codes -= form.default_zero if zeros is None or form.has_mins else zeros[..., None]
    scales, out = weight.scales.float(), x.new_zeros((*x.shape[:-2], codes.shape[0]))
    for group in range(x.shape[-2]):
        # Exact: integers below 2^53.
        sums = integers[..., group, :] @ codes[:, group].t()
        step = steps[..., group, None]
        out = _add(out, sums.float(), step * scales[:, group])
        if form.has_mins and zeros is not None:
            total = integers[..., group, :].sum(-1, keepdim=True).float()
            out = _add(out, -total, step * zeros[:, group].float())
    return out


def _add(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total + left * right of float32, rounded once: float64 holds the product."""
    return (total.double() + left.double() * right.double()).float()


def _float_sums(x: Tensor, weight: GroupedWeight) -> Tensor:
    """Sums over the groups of x [..., G, group]: float32 [..., N]."""
    codes = weight.codes.float().unflatten(-1, (-1, weight.form.group))
    scales, out = weight.scales.float(), x.new_zeros((*x.shape[:-2], codes.shape[0]))
    for group in range(x.shape[-2]):
        out = _add(out, x[..., group, :] @ codes[:, group].t(), scales[:, group])
    return out


@operator(Traits("row", "sums", rows="x"), lambda x, features: with_features(x, features // 2))
def grouped_gated_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    features: int,
    rows: Tensor | None = None,
) -> Tensor:
    """silu(x G^T) * (x U^T): `silu_and_mul` of a `grouped_linear`, rounded where they round.
    Arguments are those of `grouped_linear`, for G [N / 2, K] and U [N / 2, K] as one, with N a
    multiple of 64 and bfloat16 x. Returns bfloat16 [..., N / 2]."""
    return silu_and_mul(grouped_linear(x, codes, scales, zeros, features, None, rows), rows)


@operator(
    Traits("row", "elements", rows="ids", features=0),
    lambda ids, inputs: ids.new_empty((*ids.shape, inputs), dtype=torch.bfloat16),
)
def grouped_embedding(
    ids: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    inputs: int,
    rows: Tensor | None = None,
) -> Tensor:
    """Rows of an embedding W: float32 values of its codes, rounded once: bfloat16 [*ids.shape, K].

    Arguments are those of `grouped_linear`, for W [N, K] whose codes are not float8, and of any
    shape of ids, int64 below N; `rows` are rows of ids, and `inputs` is K. Raises ValueError: codes
    and scales do not fit so many inputs.
    """
    form, flat = form_of(inputs, codes, scales, zeros), ids.flatten()

    def take(packed: Tensor) -> Tensor:
        return packed[flat // TILE, :, flat % TILE]

    raw = take(codes.view(torch.uint8)).flatten(-2)
    points = None if zeros is None else take(zeros)
    weight = GroupedWeight(form, codes_of(raw, form.kind), take(scales), points)
    return keep_rows(weight.dequantise().bfloat16().view(*ids.shape, inputs), rows)


@operator(Traits("row", "sums", rows="x expert_ids expert_weights"), "x")
def grouped_experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    expert_ids: Tensor,
    expert_weights: Tensor,
    limit: float = 0.0,
    limit_input: bool = False,
    gelu: bool = False,
    rows: Tensor | None = None,
) -> Tensor:
    """`mtpc::experts` with the products of `mtpc::grouped_linear`, in float32 between them.

    Arguments are those of both, x floating point [T, H] and ids distinct per row, for packed
    stacks: gate_up [E, 2I, H] with codes [E, 2I / 32, H / 8 or H / 4, 32, 4] and scales [E, 2I /
    32, H / group, 32], where I is a multiple of 32; and down [E, H, I] with codes [E, ceil(H / 32),
    I / 8 or I / 4, 32, 4] and scales [E, ceil(H / 32), I / group, 32], whose group may be another.
    Zeros are of the shape of scales, or None. A row that is not in use chooses no expert. Returns
    [T, H], of x's dtype.
    """
    wide, narrow = gate_up.shape[1] * gate_up.shape[3], x.shape[1]
    of = [[None] * down.shape[0] if z is None else z for z in (gate_up_zeros, down_zeros)]

    def run(expert: int, numbers: Tensor) -> Tensor:
        both = grouped_linear(numbers, gate_up[expert], gate_up_scales[expert], of[0][expert], wide)
        active = swiglu(both, limit, limit_input, gelu)
        return grouped_linear(active, down[expert], down_scales[expert], of[1][expert], narrow)

    out = sum_experts(x, down.shape[0], expert_ids, expert_weights, run)
    return keep_rows(out.to(x.dtype), rows)


@operator(Traits("row", "sums", rows="x expert_ids expert_weights"), "x")
def grouped_biased_experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_scales: Tensor,
    down_bias: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    limit: float,
    alpha: float,
    rows: Tensor | None = None,
) -> Tensor:
    """`mtpc::biased_experts` with the products of `mtpc::grouped_linear`, in float32 between them.

    Arguments are those of both, for packed stacks as `grouped_experts` has them: gate_up [E, 2I,
    H], the features of gate and up in turns, I a multiple of 32, and down [E, H, I]. Biases are
    floating point, [E, 2I] in the same order and [E, H]. Ids are distinct per row. A row that is
    not in use chooses no expert. Returns [T, H], of x's dtype.
    """
    wide, narrow = gate_up_bias.shape[1], x.shape[1]

    def run(e: int, numbers: Tensor) -> Tensor:
        of_wide = (gate_up[e], gate_up_scales[e], None, wide, gate_up_bias[e])
        active = clamped_swiglu(grouped_linear(numbers, *of_wide), limit, alpha)
        return grouped_linear(active, down[e], down_scales[e], None, narrow, down_bias[e])

    out = sum_experts(x, down.shape[0], expert_ids, expert_weights, run)
    return keep_rows(out.to(x.dtype), rows)

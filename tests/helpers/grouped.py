"""Random weights with scales by group, and their products in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mtpc.weights.grouped import GroupedWeight, GroupForm, Kind, pack_scales, raw_codes
from mtpc.weights.packing import pack

Zeros = Literal["", "zeros", "mins"]
"""What a group has in addition to its scale: nothing, a zero point, or a minimum."""
FORMS: list[tuple[Kind, int, Zeros]] = [
    ("int4", 32, ""),
    ("int4", 128, "zeros"),
    ("int4", 32, "mins"),
    ("int8", 64, "zeros"),
    ("int8", 256, ""),
    ("int8", 16, "mins"),
    ("float8", 128, ""),
]
"""(kind, group size, addition to the scale)."""


def pack_codes(codes: Tensor, kind: Kind) -> Tensor:
    """Codes [..., N, K] in the kernels' order: [..., ceil(N / 32), K / 8, 32, 4] for int4, else
    [..., ceil(N / 32), K / 4, 32, 4]."""
    return pack(raw_codes(codes, kind)).view(codes.dtype)


@dataclass(frozen=True)
class Packed:
    """A weight, and the operands that operators take."""

    weight: GroupedWeight
    features: int

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes, scales, zeros."""
        zeros = self.weight.zeros
        packed = None if zeros is None else pack_scales(zeros)
        codes = pack_codes(self.weight.codes, self.weight.form.kind)
        return codes, pack_scales(self.weight.scales), packed

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """A linear's arguments after x: the parts, and the number of features."""
        return *self.parts, self.features


def random_weight(
    kind: Kind,
    shape: tuple[int, ...],
    group: int,
    *,
    zeros: Zeros = "",
    scales: torch.dtype = torch.float16,
    seed: int = 0,
) -> Packed:
    """Codes over their whole range, with scales that make weights about 1 / sqrt(K)."""
    gen = torch.Generator().manual_seed(seed)
    has = zeros if kind != "float8" else ""
    form = GroupForm(kind, group, has == "zeros", has == "mins")
    top = 2 * GroupForm(kind, group).default_zero
    if kind == "float8":
        codes = torch.randn(shape, generator=gen).to(torch.float8_e4m3fn)
    else:
        codes = torch.randint(0, top, shape, generator=gen, dtype=torch.uint8)
    groups = (*shape[:-1], shape[-1] // group)
    step = (0.5 + torch.rand(groups, generator=gen)) / (max(top, 2) / 4 * shape[-1] ** 0.5)
    points = torch.randint(0, max(top, 1), groups, generator=gen, dtype=torch.uint8)
    minima = (points * step).to(scales)
    of: dict[Zeros, Tensor | None] = {"": None, "zeros": points, "mins": minima}
    return Packed(GroupedWeight(form, codes, step.to(scales), of[has]), shape[-2])


def exact(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """The product in float64 with the dequantised weight, without the code under test."""
    codes, scales = weight.codes.double(), weight.scales.double()
    group = codes.shape[-1] // scales.shape[-1]
    default = {"int4": 8.0, "int8": 128.0, "float8": 0.0}[weight.form.kind]
    zeros = torch.full_like(scales, default) if weight.zeros is None else weight.zeros.double()
    zeros = zeros if weight.form.has_mins else zeros * scales
    dense = codes * scales.repeat_interleave(group, -1) - zeros.repeat_interleave(group, -1)
    return F.linear(x.double(), dense, None if bias is None else bias.double())


def bound(x: Tensor, weight: GroupedWeight) -> Tensor:
    """The largest error of a result in float32: half a step of each rounded input, and sums.

    A group's inputs are rounded to steps of a 127th of the largest of them. Sums of integers are
    exact; each group's costs three roundings, and so does what minima make of it, apart. With
    float8 each product costs one.
    """
    form, magnitudes = weight.form, x.double().abs()
    dense = weight.dequantise().double().abs()
    apart = dense
    if form.has_mins and weight.zeros is not None:
        mins = weight.zeros.double().repeat_interleave(form.group, -1)
        apart = (weight.dequantise() + mins).abs() + mins.abs()
    products = F.linear(magnitudes, apart)
    if form.kind == "float8":
        return products * (form.group + 2 * x.shape[-1] // form.group + 4) * 2.0**-24
    largest = magnitudes.unflatten(-1, (-1, form.group)).amax(-1)
    halves = F.linear(largest / 254, apart.unflatten(-1, (-1, form.group)).sum(-1))
    sums = (1 + form.has_mins) * x.shape[-1] // form.group + 4
    return halves * 1.001 + (products + halves) * sums * 2.0**-23


def rows_of(tokens: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Random inputs [tokens, inputs]."""
    return torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def experts_call(
    tokens: int, form: tuple[Kind, int, Zeros], dtype: torch.dtype, hidden: int = 64
) -> list[Tensor | None]:
    """Arguments of grouped_experts: 5 experts of 64, two for each token."""
    kind, group, points = form
    wide = random_weight(kind, (5, 128, hidden), min(group, hidden), zeros=points, seed=1)
    narrow = random_weight(kind, (5, hidden, 64), min(group, 64), zeros=points, seed=2)
    gen = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(5, generator=gen)[:2] for _ in range(tokens)])
    shares = torch.rand(tokens, 2, generator=gen)
    return [rows_of(tokens, hidden, dtype), *wide.parts, *narrow.parts, ids, shares]

"""Recipes on grouped weights: joining, taking rows and packing work on codes, scales and zeros.

All three have a row for each row of the weight. So what a recipe does to the rows of the weight, it
does to each of them, and the codes are never expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mtpc.weights.grouped import GroupedWeight, GroupForm, pack_codes, pack_scales
from mtpc.weights.packing import TILE, allocate, allocate_packed, count_tiles

Piece = Literal["codes", "scales", "zeros"]


@dataclass(frozen=True)
class GroupSpec:
    """All that shapes the tensors of a grouped weight.

    Attributes:
        form: the form of the weight.
        scales: torch's name of the dtype of the scales.
    """

    form: GroupForm
    scales: str

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The tensors of a weight."""
        has_zeros = self.form.has_zeros or self.form.has_mins
        return ("codes", "scales", "zeros") if has_zeros else ("codes", "scales")

    def nbytes(self, count: int) -> int:
        """Bytes of so many weights, without those that fill last tiles."""
        form, groups = self.form, count // self.form.group
        codes = count // 2 if form.kind == "int4" else count
        size = getattr(torch, self.scales).itemsize
        return codes + groups * (size * (1 + form.has_mins) + form.has_zeros)

    def __str__(self) -> str:
        zeros = ", zeros" if self.form.has_zeros else ", minima" if self.form.has_mins else ""
        return f"{self.form.kind} by {self.form.group}{zeros}, {self.scales} scales"


def _read_nothing(name: str) -> GroupedWeight:
    raise KeyError(name)


@dataclass(frozen=True)
class StoredGroups:
    """Weights of a model that its checkpoint stores in groups.

    Attributes:
        specs: by the weight's name in the program.
        read: name -> the weight as codes.
    """

    specs: Mapping[str, GroupSpec] = field(default_factory=dict)
    read: Callable[[str], GroupedWeight] = _read_nothing


GroupedOf = Callable[[str, GroupSpec], GroupedWeight]
"""(name of a weight, its spec) -> the weight as codes, [N, K] or a stack [E, N, K]."""
PackedWeight = dict[Piece, Tensor]
"""The tensors of a grouped weight in the kernels' order."""


def pack_grouped(weight: GroupedWeight) -> PackedWeight:
    """A grouped weight [..., N, K] in the kernels' order."""
    packed: PackedWeight = {
        "codes": pack_codes(weight.codes, weight.form.kind),
        "scales": pack_scales(weight.scales),
    }
    return packed if weight.zeros is None else {**packed, "zeros": pack_scales(weight.zeros)}


def allocate_piece(piece: Piece, spec: GroupSpec, shape: Sequence[int]) -> Tensor:
    """Uninitialised memory for one of the tensors of a packed weight of this shape [..., N, K]."""
    *stack, features, inputs = shape
    form = spec.form
    if piece == "codes":
        width = inputs // 2 if form.kind == "int4" else inputs
        codes = allocate_packed((*stack, features, width), torch.uint8)
        return codes.view(torch.float8_e4m3fn) if form.kind == "float8" else codes
    is_byte = piece == "zeros" and form.has_zeros
    dtype = torch.uint8 if is_byte else getattr(torch, spec.scales)
    return allocate((*stack, count_tiles(features), inputs // form.group, TILE), dtype)


def stack_packed(parts: Iterable[PackedWeight], count: int) -> PackedWeight:
    """A stack of `count` packed weights, filled one by one, so that none is in memory twice."""
    stacked: PackedWeight = {}
    for index, part in enumerate(parts):
        for piece, tensor in part.items():
            if index == 0:
                stacked[piece] = allocate((count, *tensor.shape), tensor.dtype)
            stacked[piece][index].view(torch.uint8).copy_(tensor.view(torch.uint8))
    return stacked


def take_rows(weight: GroupedWeight, runs: Sequence[tuple[int, int]]) -> GroupedWeight:
    """Rows of a matrix, given as runs [start, stop)."""
    return _map([weight], lambda tensors: _cat([tensors[0][a:b] for a, b in runs], 0))


def join(weights: Sequence[GroupedWeight], dim: int) -> GroupedWeight:
    """Weights of one spec as one, along a dimension before the last."""
    return _map(weights, lambda tensors: _cat(tensors, dim))


def stack(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Weights of one spec and shape as a stack."""
    return _map(weights, lambda tensors: _cat([tensor[None] for tensor in tensors], 0))


def _map(
    weights: Sequence[GroupedWeight], together: Callable[[list[Tensor]], Tensor]
) -> GroupedWeight:
    codes, scales = (together([getattr(w, n) for w in weights]) for n in ("codes", "scales"))
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    return GroupedWeight(weights[0].form, codes, scales, together(zeros) if zeros else None)


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """torch.cat, for float8 as well, which torch cannot join."""
    dtype = tensors[0].dtype
    raw = [t.view(torch.uint8) if dtype.itemsize == 1 else t for t in tensors]
    return torch.cat(raw, dim).view(dtype)

"""Grouped weights: codes of 4 or 8 bits with a scale for each group of inputs; their packed order.

A weight [N, K] has codes [N, K]. Each row of codes is cut into groups of adjacent inputs, and each
group has a scale and, where the form has them, a zero point. The value of a code is
(code - zero) * scale. A form may have minima instead, floats: code * scale - minimum. A float8 code
is a number itself: code * scale.

The packed order is that of `mtpc.weights.packing`: tiles of 32 output features, in which 32 bits of
each feature lie side by side. For int4 these hold eight inputs: byte j has input j in its low four
bits and input j + 4 in its high four bits. One shift and one mask then give two groups of four
adjacent inputs, as dot-product instructions take them. Scales, zero points and minima of a tile are
[K / group, 32].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from mtpc.weights.packing import TILE, allocate, count_tiles, fill_tiles, unpack

Kind = Literal["int4", "int8", "float8"]
Runs: TypeAlias = Sequence[tuple[int, int]]
"""Slices [start, stop) along a dimension, ascending."""

PACKED_INPUTS: dict[Kind, int] = {"int4": 8, "int8": 4, "float8": 4}
"""Inputs of one feature in 32 bits: K and the group are multiples of it."""
_BITS: dict[Kind, int] = {"int4": 4, "int8": 8}
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class GroupForm:
    """How a weight is stored.

    Attributes:
        kind: of the codes.
        group: inputs that share a scale; all K inputs of a row for one scale a channel.
        has_zeros: whether each group has a zero point of its own. Without, the zero point of int4
            and int8 is `default_zero`. A float8 weight has none.
        has_mins: whether each group has a minimum, which is subtracted from its values. The zero
            point is 0 then.
    """

    kind: Kind
    group: int
    has_zeros: bool = False
    has_mins: bool = False

    @property
    def default_zero(self) -> int:
        """2^(bits - 1); 0 for float8, and with minima."""
        is_signed = self.kind in _BITS and not self.has_mins
        return 1 << (_BITS[self.kind] - 1) if is_signed else 0

    @property
    def is_packable(self) -> bool:
        """Whether codes of a group fill whole words."""
        return self.group % PACKED_INPUTS[self.kind] == 0

    def cut(self, runs: Runs) -> GroupForm:
        """The form of slices along the inputs.

        A group of which a slice has a part becomes several smaller ones with its scale.
        """
        return replace(self, group=gcd(self.group, *(edge for run in runs for edge in run)))

    def misfit(self, inputs: int) -> str | None:
        """Why a weight of so many inputs cannot have this form; None if it can."""
        step = PACKED_INPUTS[self.kind]
        if (self.has_zeros or self.has_mins) and self.kind == "float8":
            return "float8 weights have no zero points and no minima"
        if self.has_zeros and self.has_mins:
            return "weights have zero points or minima, not both"
        if self.group <= 0 or inputs % self.group:
            return f"groups of {self.group} do not divide {inputs} inputs"
        if not self.is_packable:
            return f"groups of {self.group} are not a multiple of {step} inputs, as {self.kind}"
        return None


@dataclass(frozen=True)
class GroupedWeight:
    """A weight [..., N, K], or a stack of them, as its codes.

    Attributes:
        form: how to read the codes.
        codes: uint8 [..., N, K], 0..15 for int4; float8_e4m3fn [..., N, K] for float8.
        scales: float16, bfloat16 or float32 [..., N, K / group].
        zeros: uint8 [..., N, K / group], of the codes' range; minima, if the form has them, of
            the scales' dtype; None if it has neither.
    """

    form: GroupForm
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if dtypes or shapes are not as stated."""
        *rows, inputs = self.codes.shape
        why = self.form.misfit(inputs)
        if why is not None:
            raise ValueError(f"a weight {list(self.codes.shape)} of {self.form}: {why}")
        codes = torch.float8_e4m3fn if self.form.kind == "float8" else torch.uint8
        shape = torch.Size((*rows, inputs // self.form.group))
        zeros = self.scales.dtype if self.form.has_mins else torch.uint8
        for name, tensor, dtypes, wanted in (
            ("codes", self.codes, (codes,), self.codes.shape),
            ("scales", self.scales, _SCALES, shape),
            ("zeros", self.zeros, (zeros,), shape),
        ):
            if tensor is not None and (tensor.dtype not in dtypes or tensor.shape != wanted):
                raise ValueError(
                    f"{name} of {self.form}: expected {' or '.join(map(str, dtypes))} "
                    f"{list(wanted)}, found {tensor.dtype} {list(tensor.shape)}"
                )
        has_any = self.form.has_zeros or self.form.has_mins
        if (self.zeros is not None) != has_any:
            raise ValueError(f"{self.form}: zeros are {'missing' if has_any else 'given'}")

    def dequantise(self) -> Tensor:
        """The weight in float32 [..., N, K]."""
        codes = self.codes.unflatten(-1, (-1, self.form.group))
        zeros = None if self.zeros is None else self.zeros[..., None]
        return values_of(self.form, codes, self.scales[..., None], zeros).flatten(-2)


def values_of(form: GroupForm, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """The values of codes in float32; scales and zeros have a place for each, or are broadcast."""
    codes, scales = codes.float(), scales.float()
    points = form.default_zero if zeros is None else zeros.float()
    return codes * scales - points if form.has_mins else (codes - points) * scales


def raw_codes(codes: Tensor, kind: Kind) -> Tensor:
    """The bytes of codes [..., N, K], before they are put into tiles: [..., N, K / 2] for int4."""
    raw = codes.view(torch.uint8)
    if kind != "int4":
        return raw
    # Eight codes at once: the last four move beside the first four.
    eight = raw.contiguous().clone() if raw.storage_offset() % 8 else raw.contiguous()
    words = eight.view(torch.int64)
    return (words | words >> 28).to(torch.int32).view(torch.uint8)


def unpack_codes(packed: Tensor, kind: Kind, features: int) -> Tensor:
    """Codes [..., features, K] from their tiles.

    Args:
        packed: [..., ceil(N / 32), K / 8, 32, 4] for int4, else [..., ceil(N / 32), K / 4, 32, 4].
        kind: of the codes.
        features: N.
    """
    raw = unpack(packed.view(torch.uint8), features)
    if kind == "int4":
        bytes_ = raw.unflatten(-1, (-1, 4))
        raw = torch.stack((bytes_ & 15, bytes_ >> 4), -2).flatten(-3)
    return raw.view(packed.dtype)


def pack_scales(scales: Tensor) -> Tensor:
    """Scales, or zero points, in the order in which kernels read them.

    Args:
        scales: [..., N, K / group].

    Returns:
        [..., ceil(N / 32), K / group, 32]. Features that fill the last tile are zero.
    """
    *stack, features, groups = scales.shape
    packed = allocate((*stack, count_tiles(features), groups, TILE), scales.dtype)
    fill_tiles(scales, packed)
    return packed


def unpack_scales(packed: Tensor, features: int) -> Tensor:
    """The scales, or zero points, [..., features, K / group] of `pack_scales`; its inverse."""
    return packed.transpose(-2, -1).flatten(-3, -2)[..., :features, :]


def form_of(inputs: int, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> GroupForm:
    """The form of packed codes and scales of so many inputs, from their dtype and shapes.

    Raises:
        ValueError: they have none.
    """
    steps, groups = codes.shape[-3], scales.shape[-2]
    is_float = codes.dtype == torch.float8_e4m3fn
    kinds: tuple[Kind, ...] = ("float8",) if is_float else ("int4", "int8")
    found = [kind for kind in kinds if steps * PACKED_INPUTS[kind] == inputs > 0]
    has_mins = zeros is not None and zeros.dtype.is_floating_point
    has = (zeros is not None and not has_mins, has_mins)
    form = GroupForm(found[0], inputs // groups, *has) if found and groups else None
    if form is None or form.group * groups != inputs or form.misfit(inputs) is not None:
        raise ValueError(
            f"codes {list(codes.shape)} and scales {list(scales.shape)} do not fit {inputs} inputs"
        )
    return form

"""Grouped weights: codes of 4 to 8 bits with a scale for each group of inputs; their packed order.

A weight [N, K] has codes [N, K]. Each row of codes is cut into groups of adjacent inputs, and each
group has a scale and, where the form has them, a zero point. The value of a code is
(code - zero) * scale. A form may have minima instead, floats: code * scale - minimum. A float8 code
is a number itself: code * scale. Codes of the kinds iq4 and e2m1 are places in a table of integers
(`VALUES`): value * scale.

Scales are floats, or exponents uint8 e: 2^(e - 128). In super-blocks of 256 inputs, as llama.cpp's
K types have them, they are small integers times a float16; see `GroupForm.super_block`. In two
levels, as NVFP4 has them, they are float8_e4m3fn times a float64 of the row; see
`GroupForm.two_level`.

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

Kind = Literal["int4", "int5", "int6", "int8", "iq4", "e2m1", "float8"]
Runs: TypeAlias = Sequence[tuple[int, int]]
"""Slices [start, stop) along a dimension, ascending."""

BITS: dict[Kind, int] = {
    "int4": 4, "int5": 5, "int6": 6, "int8": 8, "iq4": 4, "e2m1": 4, "float8": 8,
}  # fmt: skip
"""Bits of a code."""
PACKED_INPUTS: dict[Kind, int] = {kind: 32 // gcd(32, bits) for kind, bits in BITS.items()}
"""Inputs of one feature in a whole number of 32 bits: K and the group are multiples of it."""
VALUES: dict[Kind, tuple[int, ...]] = {
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}
"""What codes that are places in a table stand for; floats of 4 bits (E2M1) doubled."""
SUPER = 256
"""Inputs of a super-block."""
_ROW_BYTES = 8
"""Bytes of the float64 with which a row of scales in two levels begins."""
_BYTE_ZERO = 128
_SCALES = (torch.float16, torch.bfloat16, torch.float32, torch.uint8)


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
        super_block: whether scales and minima are those of super-blocks, in 16-bit words: a float16
            for the scales; another for minima, if there are any, and then 6 bits for each scale and
            each minimum, as in Q4_K; without minima 8 bits for each scale of 16 inputs, as in Q6_K,
            or 6 for each of 32, as in IQ4_XS.
        two_level: whether a scale is float8_e4m3fn times a float64 of the row. The scales of a row
            are bytes then: those 8 of the float64, and one for each group.
    """

    kind: Kind
    group: int
    has_zeros: bool = False
    has_mins: bool = False
    super_block: bool = False
    two_level: bool = False

    @classmethod
    def of(
        cls, kind: Kind, group: int, scales: str, has_zeros: bool = False, has_mins: bool = False
    ) -> GroupForm:
        """The form of a weight whose scales have this dtype, by torch's name."""
        return cls(kind, group, has_zeros, has_mins, scales == "int16", scales == "int8")

    @property
    def default_zero(self) -> int:
        """2^(bits - 1); 0 for codes that are no integers, and with minima."""
        is_signed = self.kind.startswith("int") and not self.has_mins
        return 1 << (BITS[self.kind] - 1) if is_signed else 0

    @property
    def words(self) -> int:
        """16-bit words of a super-block's scales and minima."""
        return 8 if self.has_mins else 9 if self.group == SUPER // 16 else 4

    @property
    def row_bytes(self) -> int:
        """Elements of the scales of a row that belong to no group."""
        return _ROW_BYTES if self.two_level else 0

    def count_scales(self, inputs: int) -> int:
        """Elements of the scales of a row of so many inputs."""
        if self.super_block:
            return inputs // SUPER * self.words
        return self.row_bytes + inputs // self.group

    def widened(self) -> GroupForm:
        """The form of the same values with codes of 4 or 8 bits, and a float for each scale."""
        kind: Kind = self.kind if self.kind in ("int4", "float8") else "int8"
        return replace(self, kind=kind, super_block=False, two_level=False)

    @property
    def is_packable(self) -> bool:
        """Whether codes of a group fill whole words."""
        return self.group % PACKED_INPUTS[self.kind] == 0

    def cut(self, runs: Runs) -> GroupForm:
        """The form of slices along the inputs.

        A group of which a slice has a part becomes several smaller ones with its scale. If this
        cuts super-blocks, or codes that share a word, the form is the widened one's.
        """
        edges = [edge for run in runs for edge in run]
        form = replace(self, group=gcd(self.group, *edges))
        fits = form.is_packable and not (self.super_block and gcd(SUPER, *edges) < SUPER)
        return form if fits or self == self.widened() else self.widened().cut(runs)

    def misfit(self, inputs: int) -> str | None:
        """Why a weight of so many inputs cannot have this form; None if it can."""
        step = PACKED_INPUTS[self.kind]
        if self.super_block and (inputs % SUPER or self.group not in (16, 32) or self.has_zeros):
            return f"super-blocks of {SUPER} do not divide {inputs} inputs into groups of 16 or 32"
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
class Decoded:
    """What the bytes of a file hold of a weight.

    Attributes:
        codes: uint8 or float8_e4m3fn.
        scales: the grid of scales.
        zeros: uint8, the grid of zero points, or of the scales' dtype, the grid of minima; None if
            all zero points are `GroupForm.default_zero`.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None


@dataclass(frozen=True)
class GroupedWeight:
    """A weight [..., N, K], or a stack of them, as its codes.

    Attributes:
        form: how to read the codes.
        codes: uint8 [..., N, K], each less than 2^bits; float8_e4m3fn [..., N, K] for float8.
        scales: float16, bfloat16, float32 or uint8 [..., N, K / group]; the words of super-blocks,
            int16 [..., N, K / 256 * words]; in two levels, int8 [..., N, 8 + K / group].
        zeros: uint8 [..., N, K / group], of the codes' range; minima, if the form has them outside
            of super-blocks, of the scales' dtype; None if it has neither.
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
        # Words of super-blocks, bytes of two levels, floats or exponents.
        scales = (torch.int8,) if self.form.two_level else _SCALES
        scales = (torch.int16,) if self.form.super_block else scales
        shape = torch.Size((*rows, inputs // self.form.group))
        zeros = self.scales.dtype if self.form.has_mins else torch.uint8
        for name, tensor, dtypes, wanted in (
            ("codes", self.codes, (codes,), self.codes.shape),
            ("scales", self.scales, scales, (*rows, self.form.count_scales(inputs))),
            ("zeros", self.zeros, (zeros,), shape),
        ):
            if tensor is not None and (tensor.dtype not in dtypes or tensor.shape != wanted):
                raise ValueError(
                    f"{name} of {self.form}: expected {' or '.join(map(str, dtypes))} "
                    f"{list(wanted)}, found {tensor.dtype} {list(tensor.shape)}"
                )
        has_any = self.form.has_zeros or (self.form.has_mins and not self.form.super_block)
        if (self.zeros is not None) != has_any:
            raise ValueError(f"{self.form}: zeros are {'missing' if has_any else 'given'}")

    @property
    def numbers(self) -> list[Tensor]:
        """Floating-point tensors that are finite if the weight is."""
        if self.form.two_level:
            return list(_levels(self.scales))
        if not self.form.super_block:
            tensors = (self.scales, self.codes, self.zeros)
            return [t for t in tensors if t is not None and t.is_floating_point()]
        blocks = self.scales.unflatten(-1, (-1, self.form.words))
        return [blocks[..., : 1 + self.form.has_mins].contiguous().view(torch.float16)]

    def decoded(self) -> GroupedWeight:
        """Itself; see `BlockRows`."""
        return self

    def widened(self) -> GroupedWeight:
        """The same values with codes of 4 or 8 bits, and a float for each scale."""
        form, codes, scales, zeros = self.form.widened(), self.codes, self.scales, self.zeros
        if self.form.kind in VALUES:
            table = torch.tensor(VALUES[self.form.kind]) + _BYTE_ZERO
            codes = table.to(torch.uint8)[codes.int()]
        elif form.kind != self.form.kind:
            codes = codes + (form.default_zero - self.form.default_zero)
        if self.form.super_block:
            scales, zeros = _expand(scales.unflatten(-1, (-1, self.form.words)), self.form)
        elif self.form.two_level:
            row, small = _levels(scales)
            scales = (small.double() * row).float()
        elif scales.dtype == torch.uint8:
            scales = power_of_two(scales, 128).bfloat16()
        return GroupedWeight(form, codes, scales, zeros)

    def dequantise(self) -> Tensor:
        """The weight in float32 [..., N, K]."""
        wide = self.widened()
        codes = wide.codes.unflatten(-1, (-1, wide.form.group))
        zeros = None if wide.zeros is None else wide.zeros[..., None]
        return values_of(wide.form, codes, wide.scales[..., None], zeros).flatten(-2)


def _levels(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Of scales in two levels: float64 [..., 1] of rows, and float8_e4m3fn [..., K / group]."""
    # Copied, so that it begins where a float64 may.
    row = scales[..., :_ROW_BYTES].clone(memory_format=torch.contiguous_format)
    return row.view(torch.float64), scales[..., _ROW_BYTES:].view(torch.float8_e4m3fn)


def _expand(words: Tensor, form: GroupForm) -> tuple[Tensor, Tensor | None]:
    """Scales and minima of super-blocks, float32 [..., K / group], of int16 [..., B, words]."""
    step = words[..., :1].contiguous().view(torch.float16).float()
    small = words[..., 1 + form.has_mins :].contiguous().view(torch.uint8)
    if not form.has_mins and form.group == SUPER // 16:
        return (step * small.view(torch.int8)).flatten(-2), None
    if not form.has_mins:
        pairs = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
        low = torch.stack((small[..., 2:] & 15, small[..., 2:] >> 4), -1).flatten(-2)
        high = (small[..., :2, None] >> pairs & 3).flatten(-2) << 4
        return (step * ((low | high).float() - 32)).flatten(-2), None
    low, high, rest = small.split(4, -1)
    scales = torch.cat((low & 63, (rest & 15) | (low >> 2 & 48)), -1)
    mins = torch.cat((high & 63, (rest >> 4) | (high >> 2 & 48)), -1)
    least = words[..., 1:2].contiguous().view(torch.float16).float()
    return (step * scales).flatten(-2), (least * mins).flatten(-2)


def power_of_two(exponents: Tensor, bias: int) -> Tensor:
    """2^(e - bias) of exponents uint8, in float32; 255 is NaN."""
    values = torch.exp2(exponents.double() - bias).float()
    return torch.where(exponents == 255, torch.nan, values)


def values_of(form: GroupForm, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """The values of codes of a widened form in float32; scales and zeros have a place for each, or
    are broadcast."""
    codes, scales = codes.float(), scales.float()
    points = form.default_zero if zeros is None else zeros.float()
    return codes * scales - points if form.has_mins else (codes - points) * scales


def raw_codes(codes: Tensor, kind: Kind) -> Tensor:
    """The bytes of codes [..., N, K], before they are put into tiles: [..., N, K * bits / 8]."""
    raw = codes.view(torch.uint8)
    if BITS[kind] == 8:
        return raw
    # Eight codes at once: the last four move beside the first four.
    eight = raw.contiguous().clone() if raw.storage_offset() % 8 else raw.contiguous()
    if BITS[kind] == 4:
        pairs = eight.view(torch.int64)
        return (pairs | pairs >> 28).to(torch.int32).view(torch.uint8)
    pairs = (eight & 15).view(torch.int64)
    low = (pairs | pairs >> 28).to(torch.int32).unflatten(-1, (-1, PACKED_INPUTS[kind] // 8))
    quads = (eight >> 4).view(torch.int32).unflatten(-1, (-1, PACKED_INPUTS[kind] // 4))
    above = BITS[kind] - 4
    rest = quads[..., 0].clone()
    for quad in range(1, quads.shape[-1]):
        rest |= quads[..., quad] << above * quad
    return torch.cat((low, rest[..., None]), -1).flatten(-2).view(torch.uint8)


def unpack_codes(packed: Tensor, kind: Kind, features: int) -> Tensor:
    """Codes [..., features, K] from their tiles [..., ceil(N / 32), K * bits / 32, 32, 4]."""
    codes = codes_of(unpack(packed.view(torch.uint8), features), kind)
    return codes.view(packed.dtype) if kind == "float8" else codes


def codes_of(raw: Tensor, kind: Kind) -> Tensor:
    """Codes uint8 [..., K] from the bytes of rows; the inverse of `raw_codes`."""
    if BITS[kind] == 8:
        return raw
    quads, above = PACKED_INPUTS[kind] // 4, BITS[kind] - 4
    words = raw.unflatten(-1, (-1, quads // 2 + (above > 0), 4))
    low = words[..., : quads // 2, :]
    codes = torch.stack((low & 15, low >> 4), -2).flatten(-3, -2)
    if above:
        places = above * torch.arange(quads, dtype=torch.uint8)[:, None]
        codes = codes | (words[..., -1:, :] >> places & (1 << above) - 1) << 4
    return codes.flatten(-3)


def pack_scales(scales: Tensor) -> Tensor:
    """Scales or zero points [..., N, K / group], or words of super-blocks, in the order in which
    kernels read them: [..., ceil(N / 32), K / group, 32]. Features that fill the last tile are
    zero."""
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
    steps, count = codes.shape[-3], scales.shape[-2]
    kinds: tuple[Kind, ...] = (
        ("float8",) if codes.dtype == torch.float8_e4m3fn
        else ("iq4",) if codes.dtype == torch.int8
        else ("e2m1",) if scales.dtype in (torch.uint8, torch.int8)
        else ("int4", "int5", "int6", "int8")
    )  # fmt: skip
    has_mins = zeros is not None and zeros.dtype.is_floating_point
    has = (zeros is not None and not has_mins, has_mins)
    two_level = scales.dtype == torch.int8
    groups = max(count - _ROW_BYTES * two_level, 1)
    forms = [
        GroupForm(kind, inputs // groups, *has, two_level=two_level)
        for kind in kinds
        if steps * 32 == inputs * BITS[kind] > 0
    ]
    if scales.dtype == torch.int16:
        of_all = [(32, False, True, True), (16, False, False, True), (32, False, False, True)]
        forms = [GroupForm(form.kind, *of) for form in forms for of in of_all]
    for form in forms:
        if form.misfit(inputs) is None and form.count_scales(inputs) == count:
            return form
    raise ValueError(
        f"codes {list(codes.shape)} and scales {list(scales.shape)} do not fit {inputs} inputs"
    )

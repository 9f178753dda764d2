"""Recipes on grouped weights: joining, taking rows and packing work on codes, scales and zeros.

All three have a row for each row of the weight. So a recipe does to their rows what it does to the
rows of the weight, and never dequantises. Rows are read and packed a few at a time, so that packing
needs little more memory than its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import index
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mtpc.weights.block_rows import BlockRows
from mtpc.weights.grouped import (
    BITS,
    SUPER,
    GroupedWeight,
    GroupForm,
    Kind,
    Runs,
    pack_scales,
    raw_codes,
)
from mtpc.weights.packing import (
    PACKER,
    TILE,
    Allocate,
    PackedWeight,
    Packer,
    Piece,
    count_tiles,
    packed_shape,
)
from mtpc.weights.recipes import (
    Cast,
    CodesOf,
    Grouped,
    Join,
    Recipe,
    Rows,
    Source,
    TensorOf,
    part_spec,
    shape_of,
    take_early,
)

_AT_ONCE, _BLOCKS_AT_ONCE = 1 << 20, 1 << 23
"""Weights that are packed at once, so that temporaries stay in the processor's caches; and of rows
that are packed as they are, which has no temporaries but for those that join two tensors."""

_DTYPES: Mapping[Kind, torch.dtype] = {"float8": torch.float8_e4m3fn, "iq4": torch.int8}
"""Dtypes of packed codes that are not uint8; kernels tell them by these."""
_WIDENED = {"int16": "float32", "int8": "float32", "uint8": "bfloat16"}
"""Dtypes of scales that are no floats -> those of the floats that they stand for."""
SomeRows: TypeAlias = GroupedWeight | BlockRows
"""Rows as they are read."""


@dataclass(frozen=True)
class GroupSpec:
    """All that shapes the tensors of a grouped weight.

    Attributes:
        form: the form of the weight.
        scales: torch's name of the dtype of the scales.
        by_largest: whether `quantise` takes the scale that maps a group's largest magnitude to the
            largest code. That is twenty times as fast as the search for a better scale.
        turned: whether models have the inputs of a stack before its features. Codes have them last.
    """

    form: GroupForm
    scales: str
    by_largest: bool = False
    turned: bool = False

    @property
    def pieces(self) -> tuple[Piece, ...]:
        has_zeros = self.form.has_zeros or (self.form.has_mins and not self.form.super_block)
        return ("codes", "scales", "zeros") if has_zeros else ("codes", "scales")

    def cut(self, runs: Runs) -> GroupSpec:
        """The spec of slices along the inputs; see `GroupForm.cut`."""
        form = self.form.cut(runs)
        as_stored = (form.kind, form.super_block) == (self.form.kind, self.form.super_block)
        return replace(self if as_stored else self.widened(), form=form)

    def widened(self) -> GroupSpec:
        scales = _WIDENED.get(self.scales, self.scales)
        return replace(self, form=self.form.widened(), scales=scales)

    def is_of(self, stored: GroupSpec | None) -> bool:
        """Whether this is the spec of a weight as it is stored, or the widened one."""
        return stored is not None and self in (stored, stored.widened())

    def nbytes(self, count: int) -> int:
        """Bytes of so many weights, without those that fill last tiles, or are of rows."""
        form, size = self.form, getattr(torch, self.scales).itemsize
        codes, scales = count * BITS[form.kind] // 8, size * form.count_scales(count)
        if form.has_zeros:
            return codes + scales + count // form.group
        return codes + scales * (len(self.pieces) - 1)

    def to_list(self) -> list[Any]:
        """What `from_list` reads, as JSON has it; flags after the last that is set are left out."""
        form = self.form
        flags = [self.by_largest, True] if self.turned else [True] * self.by_largest
        return [form.kind, form.group, form.has_zeros, form.has_mins, self.scales, *flags]

    @classmethod
    def from_list(cls, said: Sequence[Any]) -> GroupSpec:
        """The spec of `to_list`.

        Raises:
            Exception: of any kind, if it is something else.
        """
        kind, group, has_zeros, has_mins, scales, *flags = said
        form = GroupForm.of(kind, index(group), scales, bool(has_zeros), bool(has_mins))
        return cls(form, scales, *map(bool, flags))

    def __str__(self) -> str:
        zeros = ", zeros" if self.form.has_zeros else ", minima" if self.form.has_mins else ""
        if self.form.super_block:
            return f"{self.form.kind} by {self.form.group}{zeros}, scales of super-blocks"
        if self.form.two_level:
            return f"{self.form.kind} by {self.form.group}, scales in two levels"
        return f"{self.form.kind} by {self.form.group}{zeros}, {self.scales} scales"


@dataclass(frozen=True)
class GroupedRows:
    """A grouped weight whose rows are read on demand.

    Attributes:
        shape: [N, K]; or [E, N, K], a stack, whose matrices are read as the rows of a matrix.
        read: (start, stop) -> rows [start, stop).
        take: (runs [start, stop), dimension) -> these slices. None: they are taken from what is
            read.
    """

    shape: tuple[int, ...]
    read: Callable[[int, int], SomeRows]
    take: Callable[[Runs, int], GroupedRows] | None = None

    def whole(self) -> GroupedWeight:
        return self.read(0, self.shape[0]).decoded()


def allocate_piece(
    piece: Piece, spec: GroupSpec, shape: Sequence[int], allocate: Allocate
) -> Tensor:
    """Uninitialised memory for one of the tensors of a packed weight of this shape [..., N, K]."""
    *stack, features, inputs = shape
    form = spec.form
    if piece == "codes":
        width = inputs * BITS[form.kind] // 8
        codes = allocate(packed_shape((*stack, features, width), torch.uint8), torch.uint8)
        return codes.view(_DTYPES.get(form.kind, torch.uint8))
    is_byte = piece == "zeros" and form.has_zeros
    dtype = torch.uint8 if is_byte else getattr(torch, spec.scales)
    count = inputs // form.group if piece == "zeros" else form.count_scales(inputs)
    return allocate((*stack, count_tiles(features), count, TILE), dtype)


def pack_rows(rows: GroupedRows, spec: GroupSpec, packer: Packer = PACKER) -> PackedWeight:
    """A grouped weight [..., N, K] in the kernels' order, some rows at a time."""
    shape, place = rows.shape, packer.allocate
    packed = {piece: allocate_piece(piece, spec, shape, place) for piece in spec.pieces}
    unit = TILE if len(rows.shape) == 2 else 1
    as_they_are = packer.fill_blocks is not None and isinstance(rows.read(0, 1), BlockRows)
    at_once = _BLOCKS_AT_ONCE if as_they_are else _AT_ONCE
    step = max(1, at_once // (unit * prod(rows.shape[1:]))) * unit
    for start in range(0, rows.shape[0], step):
        stop = min(start + step, rows.shape[0])
        part = rows.read(start, stop)
        tiles = slice(start // unit, -(-stop // unit))
        as_stored = part.form == spec.form
        if isinstance(part, BlockRows) and packer.fill_blocks is not None and as_stored:
            packer.fill_blocks(part, {piece: tensor[tiles] for piece, tensor in packed.items()})
            continue
        part = part.decoded() if as_stored else part.widened()
        codes = raw_codes(part.codes, spec.form.kind).contiguous()
        packer.fill(codes, packed["codes"][tiles].view(torch.uint8))
        packed["scales"][tiles] = pack_scales(part.scales)
        if part.zeros is not None:
            packed["zeros"][tiles] = pack_scales(part.zeros)
    return packed


def rows_of(weight: GroupedWeight) -> GroupedRows:
    def read(start: int, stop: int) -> SomeRows:
        return _map([weight], lambda tensors: tensors[0][start:stop])

    return GroupedRows(tuple(weight.codes.shape), read)


def take_rows(weight: GroupedRows, runs: Runs, dim: int = 0) -> GroupedRows:
    """Rows of a matrix or matrices of a stack; or slices along another dimension, -1 for inputs."""
    if weight.take is not None:
        return weight.take(runs, dim)
    if dim:
        return _take_within(weight, runs, dim)

    def run(begin: int, end: int) -> GroupedRows:
        return GroupedRows(
            (end - begin, *weight.shape[1:]),
            lambda start, stop: weight.read(begin + start, begin + stop),
        )

    return join([run(begin, end) for begin, end in runs])


def _take_within(weight: GroupedRows, runs: Runs, dim: int) -> GroupedRows:
    """Slices of every row or, along dimension 1 of a stack, of every matrix."""
    shape = list(weight.shape)
    shape[dim] = sum(stop - start for start, stop in runs)

    def slices(tensor: Tensor, step: int = 1) -> Tensor:
        found = [tensor.narrow(dim, a // step, (b - a) // step) for a, b in runs]
        return _cat(found, dim)

    def read(start: int, stop: int) -> SomeRows:
        rows = weight.read(start, stop)
        if dim != -1:
            return _map([rows], lambda tensors: slices(tensors[0]))
        form = rows.form.cut(runs)
        as_stored = (form.kind, form.super_block) == (rows.form.kind, rows.form.super_block)
        part = rows.decoded() if as_stored else rows.widened()

        def of_groups(tensor: Tensor) -> Tensor:
            if form.super_block:
                blocks = tensor.unflatten(-1, (-1, form.words))
                taken = [blocks[..., a // SUPER : b // SUPER, :] for a, b in runs]
                return _cat(taken, -2).flatten(-2)
            row, each = tensor[..., : form.row_bytes], tensor[..., form.row_bytes :]
            each = each.repeat_interleave(part.form.group // form.group, -1)
            return _cat([row, slices(each, form.group)], -1)

        zeros = None if part.zeros is None else of_groups(part.zeros)
        return GroupedWeight(form, slices(part.codes), of_groups(part.scales), zeros)

    return GroupedRows(tuple(shape), read)


def join(weights: Sequence[GroupedRows], dim: int = 0) -> GroupedRows:
    """Weights of one spec as one, along the first or, in stacks, the second dimension."""
    shape = list(weights[0].shape)
    shape[dim] = sum(weight.shape[dim] for weight in weights)

    def read(start: int, stop: int) -> SomeRows:
        if dim:
            return _cat_all([weight.read(start, stop) for weight in weights], dim)
        found, begin = [], 0
        for weight in weights:
            low, high = max(start - begin, 0), min(stop - begin, weight.shape[0])
            if low < high:
                found.append(weight.read(low, high))
            begin += weight.shape[0]
        return found[0] if len(found) == 1 else _cat_all(found, 0)

    return GroupedRows(tuple(shape), read)


def stack(weights: Sequence[GroupedRows]) -> GroupedRows:
    """Weights of one spec and shape as a stack."""

    def read(start: int, stop: int) -> SomeRows:
        parts = [weight.read(0, weight.shape[0]) for weight in weights[start:stop]]
        return _map(parts, lambda tensors: _cat([tensor[None] for tensor in tensors], 0))

    return GroupedRows((len(weights), *weights[0].shape), read)


def _cat_all(weights: Sequence[SomeRows], dim: int) -> SomeRows:
    return _map(weights, lambda tensors: _cat(tensors, dim))


def _map(weights: Sequence[SomeRows], together: Callable[[list[Tensor]], Tensor]) -> SomeRows:
    first, raw = weights[0], [rows.raw for rows in weights if isinstance(rows, BlockRows)]
    if isinstance(first, BlockRows) and len(raw) == len(weights):
        return BlockRows(first.block, together(raw))
    parts = [rows.decoded() for rows in weights]
    codes, scales = (together([getattr(w, n) for w in parts]) for n in ("codes", "scales"))
    zeros = [weight.zeros for weight in parts if weight.zeros is not None]
    return GroupedWeight(first.form, codes, scales, together(zeros) if zeros else None)


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """torch.cat, for float8 as well, which torch cannot join."""
    dtype = tensors[0].dtype
    raw = [t.view(torch.uint8) if dtype.itemsize == 1 else t for t in tensors]
    return torch.cat(raw, dim).view(dtype)


def make_grouped(recipe: Recipe, spec: GroupSpec, codes_of: CodesOf) -> GroupedRows:
    """The weight of a recipe as codes, without dequantising. `spec` is that of all that the weight
    is made of (its own is `part_spec`), or what plain weights get.

    Raises:
        TypeError: the recipe does more than join and take rows.
    """
    if isinstance(recipe, (str, Cast)):
        return codes_of(recipe, spec)
    if isinstance(recipe, Rows):
        return take_rows(make_grouped(recipe.part, spec, codes_of), recipe.runs, recipe.dim)
    if not isinstance(recipe, Join):
        raise TypeError(f"a {type(recipe).__name__} of a weight in groups has no groups")
    parts = [make_grouped(part, spec, codes_of) for part in recipe.parts]
    return stack(parts) if recipe.op == "stack" else join(parts, 0 if recipe.op == "cat" else 1)


def make_pieces(recipe: Grouped, source: Source, packer: Packer) -> dict[Recipe, Tensor]:
    """All tensors of a weight, of which a recipe makes one; see `mtpc.weights.recipes.make_all`."""
    rows = make_grouped(take_early(recipe.part, source.form), recipe.spec, source.codes)
    packed = pack_rows(rows, part_spec(recipe.part, recipe.spec), packer)
    return {replace(recipe, piece=piece): tensor for piece, tensor in packed.items()}


def allocate_grouped(recipe: Grouped, tensor_of: TensorOf, place: Allocate) -> Tensor:
    """Host memory for the tensor of a recipe; see `mtpc.weights.recipes.allocate`."""
    shape, _ = shape_of(recipe.part, tensor_of)
    if recipe.spec.turned:
        shape[-2:] = reversed(shape[-2:])
    return allocate_piece(recipe.piece, part_spec(recipe.part, recipe.spec), shape, place)


def seen_rows(rows: GroupedRows, see: Callable[[SomeRows], None]) -> GroupedRows:
    """The same rows; `see` is called with all that is read of them."""

    def read(start: int, stop: int) -> SomeRows:
        part = rows.read(start, stop)
        see(part)
        return part

    def take(runs: Runs, dim: int) -> GroupedRows:
        return seen_rows(take_rows(rows, runs, dim), see)

    return GroupedRows(rows.shape, read, take)

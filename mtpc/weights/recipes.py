"""Recipes: how a weight is made from other tensors, as data that the cache can store.

A recipe is the name of a tensor, several recipes joined, a part of one, or one converted for the
kernels. A weight that is stored in groups is converted from its codes. Passes derive weights by
recipes, and recipes read checkpoints that store experts one by one. So a warm start makes its
weights from the checkpoint's present values, even if the cached program was built with other
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Literal, Protocol, TypeAlias, get_args

import torch
from torch import Tensor

from mtpc.weights import packing
from mtpc.weights.grouped import GroupForm
from mtpc.weights.grouped_recipes import (
    GroupedOf,
    GroupedRows,
    GroupSpec,
    PackedWeight,
    Piece,
    allocate_piece,
    join,
    pack_rows,
    stack,
    take_rows,
)
from mtpc.weights.packing import Fill
from mtpc.weights.quantise import quantised_rows


@dataclass(frozen=True)
class Join:
    """Several tensors as one.

    Attributes:
        op: "cat" joins along the first dimension; "cat_rows" along the second, so that each matrix
            of a stack gets the rows of another; "stack" along a new first dimension.
        parts: recipes of the tensors.
    """

    op: Literal["cat", "cat_rows", "stack"]
    parts: tuple[Recipe, ...]


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor, or slices along another dimension, such as one rank's part of a weight.

    Attributes:
        runs: the rows, as ascending runs [start, stop).
        part: the tensor.
        dim: the dimension whose rows these are; -1 for inputs of a matrix or of a stack of them.
    """

    runs: tuple[tuple[int, int], ...]
    part: Recipe
    dim: int = 0


@dataclass(frozen=True)
class Blocks:
    """The same rows of each block of a matrix, as a stack of matrices; usually a head is a block.

    Attributes:
        count: number of blocks of equal size.
        start: first row to take from each block.
        stop: the row after the last one to take.
        transposed: whether each matrix of the stack is transposed.
        part: the matrix.
    """

    count: int
    start: int
    stop: int
    transposed: bool
    part: Recipe


@dataclass(frozen=True)
class Packed:
    """A weight in the kernels' order, see `mtpc.weights.packing`.

    Attributes:
        part: the weight; its recipe must not contain another `Packed`.
    """

    part: Recipe


@dataclass(frozen=True)
class Grouped:
    """One tensor of a weight that is stored in groups, in the kernels' order.

    Attributes:
        piece: which tensor.
        spec: that every weight of `part` has, whole; see `part_spec`.
        part: the weight: a name, or rows of names joined or stacked.
    """

    piece: Piece
    spec: GroupSpec
    part: Recipe


Recipe: TypeAlias = "str | Join | Rows | Blocks | Packed | Grouped"
TensorOf: TypeAlias = Callable[[str], Tensor]


class Elsewhere(Protocol):
    """Weights that are made by recipes, without all of them in memory."""

    def __contains__(self, name: object) -> bool:
        """Whether it has a weight of that name."""

    def make(self, recipe: Recipe) -> Tensor:
        """What a recipe makes of them, in the host's memory."""

    def check(self) -> None:
        """Check the values that were read so far.

        Raises:
            CheckpointError: they hold NaN or infinity.
        """


def make(recipe: Recipe, tensor_of: TensorOf, fill: Fill = packing.fill_packed) -> Tensor:
    """Make the tensor of a recipe: for a name the named tensor itself, otherwise a new one.

    Args:
        recipe: what to make.
        tensor_of: name -> tensor.
        fill: packs a weight.

    Raises:
        TypeError: the recipe packs a packed weight.
    """
    if isinstance(recipe, str):
        return tensor_of(recipe)
    if isinstance(recipe, Grouped):
        return GroupedMaker(lambda name, spec: quantised_rows(tensor_of(name), spec), fill).make(
            recipe
        )
    if isinstance(recipe, Packed):
        out = allocate(recipe, tensor_of)
        _place(recipe.part, out, tensor_of, fill)
        # It is packed in the host's memory, which has huge pages, and then moved.
        return out.to(tensor_of(next(names(recipe.part))).device)
    if isinstance(recipe, Rows):
        held = take(recipe, make(recipe.part, tensor_of, fill))
        return held.clone(memory_format=torch.contiguous_format)  # It does not keep the whole.
    if isinstance(recipe, Blocks):
        whole = make(recipe.part, tensor_of, fill)
        blocks = whole.view(recipe.count, -1, whole.shape[-1])[:, recipe.start : recipe.stop]
        return (blocks.transpose(1, 2) if recipe.transposed else blocks).contiguous()
    parts = [make(part, tensor_of, fill) for part in recipe.parts]
    if recipe.op == "stack":
        return torch.stack(parts)
    return torch.cat(parts, 0 if recipe.op == "cat" else 1)


def allocate(recipe: Recipe, tensor_of: TensorOf) -> Tensor:
    """Host memory for the tensor of a recipe, not filled.

    Args:
        recipe: what the memory is for.
        tensor_of: name -> tensor; only shapes and dtypes are read.
    """
    if isinstance(recipe, Grouped):
        shape, _ = _extent(recipe.part, tensor_of)
        return allocate_piece(recipe.piece, part_spec(recipe.part, recipe.spec), shape)
    if isinstance(recipe, Packed):
        return packing.allocate_packed(*_extent(recipe.part, tensor_of))
    shape, dtype = _extent(recipe, tensor_of)
    return torch.empty(shape, dtype=dtype)


def _extent(recipe: Recipe, tensor_of: TensorOf) -> tuple[list[int], torch.dtype]:
    """Shape and dtype of the tensor of a recipe that packs nothing; does not make it."""
    if isinstance(recipe, str):
        return list(tensor_of(recipe).shape), tensor_of(recipe).dtype
    if isinstance(recipe, (Packed, Grouped)):
        raise TypeError("a packed weight cannot be joined or packed again")
    if isinstance(recipe, Rows):
        shape, dtype = _extent(recipe.part, tensor_of)
        shape[recipe.dim] = sum(stop - start for start, stop in recipe.runs)
        return shape, dtype
    if isinstance(recipe, Blocks):
        (*_, inputs), dtype = _extent(recipe.part, tensor_of)
        matrix = [recipe.stop - recipe.start, inputs]
        return [recipe.count, *(matrix[::-1] if recipe.transposed else matrix)], dtype
    parts = [_extent(part, tensor_of) for part in recipe.parts]
    (first, *inner), dtype = parts[0]
    if recipe.op == "stack":
        return [len(parts), first, *inner], dtype
    if recipe.op == "cat_rows":
        return [first, sum(shape[1] for shape, _ in parts), *inner[1:]], dtype
    return [sum(shape[0] for shape, _ in parts), *inner], dtype


def _place(recipe: Recipe, out: Tensor, tensor_of: TensorOf, fill: Fill) -> None:
    """Pack the tensor of a recipe, part by part if possible, so that the whole is never made.

    Args:
        recipe: a recipe that packs nothing.
        out: memory of the result.
        tensor_of: name -> tensor.
        fill: packs one part.
    """
    if isinstance(recipe, Join) and recipe.op == "stack":
        for part, to in zip(recipe.parts, out, strict=True):
            _place(part, to, tensor_of, fill)
        return
    if isinstance(recipe, Join) and recipe.op == "cat":
        shapes = [_extent(part, tensor_of)[0] for part in recipe.parts]
        is_matrix = all(len(shape) == 2 for shape in shapes)
        if is_matrix and not any(shape[0] % packing.TILE for shape in shapes[:-1]):
            pieces = out.split([packing.count_tiles(shape[0]) for shape in shapes])
            for part, to in zip(recipe.parts, pieces, strict=True):
                _place(part, to, tensor_of, fill)
            return
    fill(make(recipe, tensor_of).contiguous(), out)


def spec_of(recipe: Recipe, specs: Mapping[str, GroupSpec]) -> GroupSpec | None:
    """The spec of the weight that a recipe makes from grouped weights; None if it is not grouped.

    Args:
        recipe: of the weight.
        specs: of the weights that are grouped, by name.
    """
    if isinstance(recipe, str):
        return specs.get(recipe)
    if isinstance(recipe, Rows):
        spec = spec_of(recipe.part, specs)
        return spec if spec is not None and part_spec(recipe, spec).form.is_packable else None
    if not isinstance(recipe, Join):
        return None
    found = {spec_of(part, specs) for part in recipe.parts}
    return found.pop() if len(found) == 1 else None


def part_spec(recipe: Recipe, spec: GroupSpec) -> GroupSpec:
    """The spec of what a recipe makes of weights of one spec: a cut between inputs changes it."""
    if isinstance(recipe, Join):
        (found,) = {part_spec(part, spec) for part in recipe.parts}
        return found
    if not isinstance(recipe, Rows):
        return spec
    inner = part_spec(recipe.part, spec)
    return inner.cut(recipe.runs) if recipe.dim == -1 else inner


def make_grouped(recipe: Recipe, spec: GroupSpec, grouped_of: GroupedOf) -> GroupedRows:
    """The weight of a recipe as codes, without dequantising.

    Args:
        recipe: of the weight, which `spec_of` knows; or of plain weights, which get this spec.
        spec: of all that the weight is made of; its own is `part_spec`.
        grouped_of: (name, spec) -> a weight as codes.

    Raises:
        TypeError: the recipe does more than join and take rows.
    """
    if isinstance(recipe, str):
        return grouped_of(recipe, spec)
    if isinstance(recipe, Rows):
        return take_rows(make_grouped(recipe.part, spec, grouped_of), recipe.runs, recipe.dim)
    if not isinstance(recipe, Join):
        raise TypeError(f"a {type(recipe).__name__} of a weight in groups has no groups")
    parts = [make_grouped(part, spec, grouped_of) for part in recipe.parts]
    return stack(parts) if recipe.op == "stack" else join(parts, 0 if recipe.op == "cat" else 1)


class GroupedMaker:
    """Makes tensors of grouped weights; keeps those of the last weight, which are asked for in
    turn.

    Args:
        grouped_of: (name, spec) -> a weight as codes.
        fill: packs codes.
    """

    def __init__(self, grouped_of: GroupedOf, fill: Fill = packing.fill_packed):
        self._grouped_of, self._fill = grouped_of, fill
        self._last: tuple[tuple[GroupSpec, Recipe], PackedWeight] | None = None

    def make(self, recipe: Grouped) -> Tensor:
        """One tensor of a weight, in the host's memory."""
        wanted = (recipe.spec, recipe.part)
        if self._last is None or self._last[0] != wanted:
            self._last = None  # Its memory goes before the next weight is made.
            rows = make_grouped(recipe.part, recipe.spec, self._grouped_of)
            own = part_spec(recipe.part, recipe.spec)
            self._last = (wanted, pack_rows(rows, own, self._fill))
        return self._last[1][recipe.piece]


def take_early(recipe: Recipe, tensor_of: TensorOf) -> Recipe:
    """A recipe that takes rows before it joins tensors, so that it reads only these rows.

    Args:
        recipe: whose tensor stays the same.
        tensor_of: name -> tensor; only shapes and dtypes are read.
    """
    if isinstance(recipe, str):
        return recipe
    if isinstance(recipe, Join):
        return replace(recipe, parts=tuple(take_early(part, tensor_of) for part in recipe.parts))
    part = take_early(recipe.part, tensor_of)
    if not isinstance(recipe, Rows) or not isinstance(part, Join):
        return replace(recipe, part=part)
    joined = 1 if part.op == "cat_rows" else 0
    if part.op == "stack" and recipe.dim == 0:
        return replace(recipe, part=part)
    if recipe.dim != joined:
        dim = recipe.dim - (part.op == "stack" and recipe.dim > 0)
        of_each = tuple(Rows(recipe.runs, each, dim) for each in part.parts)
        return replace(part, parts=tuple(take_early(each, tensor_of) for each in of_each))
    start, taken = 0, []
    for each in part.parts:
        size = _extent(each, tensor_of)[0][joined]
        own = [(max(a, start), min(b, start + size)) for a, b in recipe.runs]
        runs = tuple((a - start, b - start) for a, b in own if a < b)
        taken += [take_early(Rows(runs, each, joined), tensor_of)] if runs else []
        start += size
    return taken[0] if len(taken) == 1 else Join(part.op, tuple(taken))


def parts_read(recipe: Recipe) -> Iterator[str | Rows]:
    """All tensors that a recipe reads: names of whole tensors, and `Rows` of named tensors."""
    if isinstance(recipe, str) or (isinstance(recipe, Rows) and isinstance(recipe.part, str)):
        yield recipe
    elif isinstance(recipe, Join):
        for part in recipe.parts:
            yield from parts_read(part)
    else:
        yield from parts_read(recipe.part)


def rename_read(recipe: Recipe, name_of: Callable[[str | Rows], str]) -> Recipe:
    """The recipe with a name in place of each of `parts_read`."""
    if isinstance(recipe, str) or (isinstance(recipe, Rows) and isinstance(recipe.part, str)):
        return name_of(recipe)
    if isinstance(recipe, Join):
        return replace(recipe, parts=tuple(rename_read(part, name_of) for part in recipe.parts))
    return replace(recipe, part=rename_read(recipe.part, name_of))


def take(rows: Rows, tensor: Tensor) -> Tensor:
    """These rows of a tensor: a view of adjacent ones, otherwise a copy."""
    held = [tensor.narrow(rows.dim, start, stop - start) for start, stop in rows.runs]
    return held[0] if len(held) == 1 else torch.cat(held, rows.dim)


def packs_all(recipe: Recipe) -> bool:
    """Whether all values of `parts_read` are packed, so that the packing sees each of them."""
    return isinstance(recipe, Packed) and _takes_all(recipe.part)


def _takes_all(recipe: Recipe) -> bool:
    if isinstance(recipe, Join):
        return all(map(_takes_all, recipe.parts))
    return isinstance(recipe, str) or (isinstance(recipe, Rows) and isinstance(recipe.part, str))


def names(recipe: Recipe) -> Iterator[str]:
    """Names of all tensors that a recipe uses."""
    for read in parts_read(recipe):
        yield from [read] if isinstance(read, str) else names(read.part)


def substitute(recipe: Recipe, recipe_of: Callable[[str], Recipe]) -> Recipe:
    """The recipe with each name replaced by the recipe of that name."""
    if isinstance(recipe, str):
        return recipe_of(recipe)
    if isinstance(recipe, (Packed, Rows, Blocks, Grouped)):
        return replace(recipe, part=substitute(recipe.part, recipe_of))
    return Join(recipe.op, tuple(substitute(part, recipe_of) for part in recipe.parts))


def to_json(recipe: Recipe) -> Any:
    """The recipe as JSON: a name, or an operation with its arguments.

    Examples: `{"cat": [...]}`, `{"pack": ...}`, `{"rows": [[[0, 8], [9, 12]], ...]}`,
    `{"blocks": [[4, 0, 8, true], ...]}`,
    `{"grouped": [["codes", "int4", 32, false, false, "bfloat16"], ...]}`.
    """
    if isinstance(recipe, str):
        return recipe
    if isinstance(recipe, Packed):
        return {"pack": to_json(recipe.part)}
    if isinstance(recipe, Rows):
        other = [recipe.dim] if recipe.dim else []
        return {"rows": [[list(run) for run in recipe.runs], to_json(recipe.part), *other]}
    if isinstance(recipe, Blocks):
        taken = [recipe.count, recipe.start, recipe.stop, recipe.transposed]
        return {"blocks": [taken, to_json(recipe.part)]}
    if isinstance(recipe, Grouped):
        form = recipe.spec.form
        has = [form.has_zeros, form.has_mins]
        says = [recipe.piece, form.kind, form.group, *has, recipe.spec.scales]
        says += [True] if recipe.spec.by_largest else []
        return {"grouped": [says, to_json(recipe.part)]}
    return {recipe.op: [to_json(part) for part in recipe.parts]}


def from_json(value: Any) -> Recipe:
    """The recipe from the JSON that `to_json` wrote.

    Raises:
        Exception: of any kind, if it is something else.
    """
    if isinstance(value, str):
        return value
    ((op, parts),) = value.items()
    if op == "pack":
        return Packed(from_json(parts))
    if op == "rows":
        runs, part, *dim = parts
        kept = tuple((index(start), index(stop)) for start, stop in runs)
        return Rows(kept, from_json(part), *map(index, dim))
    if op == "blocks":
        (count, start, stop, transposed), part = parts
        return Blocks(index(count), index(start), index(stop), bool(transposed), from_json(part))
    if op == "grouped":
        (piece, kind, group, has_zeros, has_mins, scales, *by_largest), part = parts
        if piece not in get_args(Piece):
            raise ValueError(f"a grouped weight has no {piece!r}")
        form = GroupForm(kind, index(group), bool(has_zeros), bool(has_mins), scales == "int16")
        return Grouped(piece, GroupSpec(form, scales, *map(bool, by_largest)), from_json(part))
    if op not in ("cat", "cat_rows", "stack") or not isinstance(parts, list):
        raise ValueError(f"a recipe has the operation {op!r} of {type(parts).__name__}")
    return Join(op, tuple(map(from_json, parts)))

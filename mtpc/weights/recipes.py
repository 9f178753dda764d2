"""How a weight is made from others, as data: it can be written into a cache and repeated.

A recipe is the name of a tensor, several recipes joined, rows of one, or one converted for the
kernels. Passes
derive weights by recipes, and checkpoints that store experts one by one are read by them; so a
program that comes from the cache makes its weights from the checkpoint's values of today, whatever
values it was built with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from mtpc.weights import packing
from mtpc.weights.packing import Fill

Conversion: TypeAlias = Literal["pack", "quantise", "scales"]


@dataclass(frozen=True)
class Join:
    """Several tensors as one: along their first dimension (cat), along their second (cat_rows: a
    stack of matrices, each continued by another's rows), or along a new one (stack)."""

    op: Literal["cat", "cat_rows", "stack"]
    parts: tuple[Recipe, ...]


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor: those of ascending runs [start, stop)."""

    runs: tuple[tuple[int, int], ...]
    part: Recipe


@dataclass(frozen=True)
class Blocks:
    """A part of each of a matrix' blocks of rows (one a head, as a rule), as a stack of matrices.

    Attributes:
        count: equal blocks.
        start: first row of each that is taken.
        stop: the row after the last.
        transposed: each matrix is transposed.
        part: the matrix.
    """

    count: int
    start: int
    stop: int
    transposed: bool
    part: Recipe


@dataclass(frozen=True)
class Convert:
    """A matrix in a form of `weights.packing`: packed; packed in int8; the scales of the latter.

    What is converted is plain: names, joins, rows and blocks of them, not converted again.
    """

    op: Conversion
    part: Recipe


Recipe: TypeAlias = "str | Join | Rows | Blocks | Convert"
TensorOf: TypeAlias = Callable[[str], Tensor]


def make(recipe: Recipe, tensor_of: TensorOf, fill: Fill = packing.fill_packed) -> Tensor:
    """Carry a recipe out; a mere name gives that very tensor, anything else a new one.

    Args:
        recipe: what to make.
        tensor_of: the tensor of each name.
        fill: how weights are packed.
    """
    if isinstance(recipe, str):
        return tensor_of(recipe)
    if isinstance(recipe, Convert):
        return _convert(recipe, tensor_of, fill)
    if isinstance(recipe, Rows):
        whole = make(recipe.part, tensor_of, fill)
        return torch.cat([whole[start:stop] for start, stop in recipe.runs])
    if isinstance(recipe, Blocks):
        return _take_blocks(recipe, make(recipe.part, tensor_of, fill))
    parts = [make(part, tensor_of, fill) for part in recipe.parts]
    if recipe.op == "stack":
        return torch.stack(parts)
    return torch.cat(parts, 0 if recipe.op == "cat" else 1)


def _take_blocks(recipe: Blocks, whole: Tensor) -> Tensor:
    blocks = whole.view(recipe.count, -1, whole.shape[-1])[:, recipe.start : recipe.stop]
    return (blocks.transpose(1, 2) if recipe.transposed else blocks).contiguous()


def _convert(recipe: Convert, tensor_of: TensorOf, fill: Fill) -> Tensor:
    shape, dtype = _extent(recipe.part, tensor_of)

    def measure(part: Tensor, to: Tensor) -> None:
        to.copy_(packing.row_scales(part))

    def round_and_fill(part: Tensor, to: Tensor) -> None:
        if part.dim() == 2:
            fill(packing.quantise(part), to)
            return
        for matrix, place in zip(part, to, strict=True):  # Rounding takes four bytes a weight.
            round_and_fill(matrix, place)

    convert: Fill
    if recipe.op == "scales":
        out, rows, convert = torch.empty(shape[:-1], dtype=torch.float32), 1, measure
    elif recipe.op == "quantise":
        out, rows = packing.allocate_packed(shape, torch.uint8), packing.TILE
        convert = round_and_fill
    else:
        out, rows, convert = packing.allocate_packed(shape, dtype), packing.TILE, fill
    _place(recipe.part, out, rows, tensor_of, convert)
    # Packed in the host's memory, wherever the weight is: that is where huge pages are.
    return out.to(tensor_of(next(names(recipe.part))).device)


def _extent(recipe: Recipe, tensor_of: TensorOf) -> tuple[list[int], torch.dtype]:
    """Shape and dtype of what a recipe without conversions gives, without making it."""
    if isinstance(recipe, str):
        return list(tensor_of(recipe).shape), tensor_of(recipe).dtype
    if isinstance(recipe, Convert):
        raise TypeError("what is converted cannot be joined or converted again")
    if isinstance(recipe, Rows):
        (_, *inner), dtype = _extent(recipe.part, tensor_of)
        return [sum(stop - start for start, stop in recipe.runs), *inner], dtype
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


def _place(recipe: Recipe, out: Tensor, rows: int, tensor_of: TensorOf, fill: Fill) -> None:
    """Convert what a recipe gives part by part, where parts allow: the whole is never made.

    Args:
        recipe: names and joins.
        out: the result's memory.
        rows: of the matrix, per entry of `out`'s first dimension.
        tensor_of: the tensor of each name.
        fill: converts one part.
    """
    if isinstance(recipe, Join) and recipe.op == "stack":
        for part, to in zip(recipe.parts, out, strict=True):
            _place(part, to, rows, tensor_of, fill)
        return
    if isinstance(recipe, Join) and recipe.op == "cat":
        shapes = [_extent(part, tensor_of)[0] for part in recipe.parts]
        is_matrix = all(len(shape) == 2 for shape in shapes)
        if is_matrix and not any(shape[0] % rows for shape in shapes[:-1]):
            pieces = out.split([-(-shape[0] // rows) for shape in shapes])
            for part, to in zip(recipe.parts, pieces, strict=True):
                _place(part, to, rows, tensor_of, fill)
            return
    fill(make(recipe, tensor_of).contiguous(), out)


def names(recipe: Recipe) -> Iterator[str]:
    """Every tensor a recipe takes."""
    if isinstance(recipe, str):
        yield recipe
    elif isinstance(recipe, (Convert, Rows, Blocks)):
        yield from names(recipe.part)
    else:
        for part in recipe.parts:
            yield from names(part)


def substitute(recipe: Recipe, recipe_of: Callable[[str], Recipe]) -> Recipe:
    """The same recipe with every name replaced by what that is made of."""
    if isinstance(recipe, str):
        return recipe_of(recipe)
    if isinstance(recipe, Convert):
        return Convert(recipe.op, substitute(recipe.part, recipe_of))
    if isinstance(recipe, Rows):
        return Rows(recipe.runs, substitute(recipe.part, recipe_of))
    if isinstance(recipe, Blocks):
        return replace(recipe, part=substitute(recipe.part, recipe_of))
    return Join(recipe.op, tuple(substitute(part, recipe_of) for part in recipe.parts))


def to_json(recipe: Recipe) -> Any:
    """A name, or the operation with what it takes: `{"cat": [...]}`, `{"pack": ...}`,
    `{"rows": [[[0, 8], [9, 12]], ...]}`, `{"blocks": [[4, 0, 8, true], ...]}`."""
    if isinstance(recipe, str):
        return recipe
    if isinstance(recipe, Convert):
        return {recipe.op: to_json(recipe.part)}
    if isinstance(recipe, Rows):
        return {"rows": [[list(run) for run in recipe.runs], to_json(recipe.part)]}
    if isinstance(recipe, Blocks):
        taken = [recipe.count, recipe.start, recipe.stop, recipe.transposed]
        return {"blocks": [taken, to_json(recipe.part)]}
    return {recipe.op: [to_json(part) for part in recipe.parts]}


def from_json(value: Any) -> Recipe:
    """What `to_json` wrote."""
    if isinstance(value, str):
        return value
    ((op, parts),) = value.items()
    if op in get_args(Conversion):
        return Convert(op, from_json(parts))
    if op == "rows":
        runs, part = parts
        return Rows(tuple((start, stop) for start, stop in runs), from_json(part))
    if op == "blocks":
        (count, start, stop, transposed), part = parts
        return Blocks(count, start, stop, transposed, from_json(part))
    return Join(op, tuple(map(from_json, parts)))

"""Recipes: how a weight is made from other tensors, as data that the cache can store.

A recipe is the name of a tensor, several recipes joined, a part of one, or one converted for the
kernels. A weight that is stored in groups is converted from its codes. Passes derive weights by
recipes, and recipes read checkpoints that store experts one by one. So a warm start has the values
that the checkpoint has then. A recipe reads nothing; `Weights` makes its tensor, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import index
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

import torch
from torch import Tensor

from mtpc.weights import packing
from mtpc.weights.packing import Packer, Piece

if TYPE_CHECKING:
    from mtpc.weights.grouped_recipes import GroupedRows, GroupSpec


@dataclass(frozen=True)
class Join:
    """Several tensors as one: "cat" joins along the first dimension; "cat_rows" along the second,
    so that each matrix of a stack gets the rows of another; "stack" along a new first dimension."""

    op: Literal["cat", "cat_rows", "stack"]
    parts: tuple[Recipe, ...]


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor, as ascending runs [start, stop), or slices along another dimension, such as
    one rank's part of a weight. The dimension -1 is the inputs of a matrix or of a stack of
    them."""

    runs: tuple[tuple[int, int], ...]
    part: Recipe
    dim: int = 0


@dataclass(frozen=True)
class Blocks:
    """The same rows [start, stop) of each of `count` equal blocks of a matrix, as a stack of
    matrices, which may be transposed; usually a head is a block."""

    count: int
    start: int
    stop: int
    transposed: bool
    part: Recipe


@dataclass(frozen=True)
class Cast:
    """A named tensor in another dtype, by its name in torch."""

    dtype: str
    part: Recipe


@dataclass(frozen=True)
class Packed:
    """A weight in the kernels' order, see `mtpc.weights.packing`. Its recipe must not contain
    another `Packed`."""

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


Recipe: TypeAlias = "str | Join | Rows | Blocks | Cast | Packed | Grouped"
TensorOf: TypeAlias = Callable[[str], Tensor]
CodesOf: TypeAlias = "Callable[[Recipe, GroupSpec], GroupedRows]"
"""(a name, which may be cast; its spec) -> the weight as codes, [N, K] or a stack [E, N, K]."""


def parts_of(recipe: Recipe) -> tuple[Recipe, ...]:
    """What an operation is applied to; () for a name."""
    if isinstance(recipe, str):
        return ()
    return recipe.parts if isinstance(recipe, Join) else (recipe.part,)


def with_parts(recipe: Recipe, change: Callable[[Recipe], Recipe]) -> Recipe:
    """The operation on other parts; a name stays."""
    if isinstance(recipe, str):
        return recipe
    if isinstance(recipe, Join):
        return replace(recipe, parts=tuple(map(change, recipe.parts)))
    return replace(recipe, part=change(recipe.part))


def names(recipe: Recipe) -> Iterator[str]:
    if isinstance(recipe, str):
        yield recipe
    for part in parts_of(recipe):
        yield from names(part)


def substitute(recipe: Recipe, recipe_of: Callable[[str], Recipe]) -> Recipe:
    """The recipe with each name replaced by the recipe of that name."""
    if isinstance(recipe, str):
        return recipe_of(recipe)
    return with_parts(recipe, lambda part: substitute(part, recipe_of))


class Source(Protocol):
    """Where recipes find the tensors that they name."""

    def form(self, name: str) -> Tensor:
        """A tensor of the shape and dtype of one; its values are not read."""

    def read(self, part: Recipe) -> Tensor:
        """What `is_read` describes."""

    def codes(self, part: Recipe, spec: GroupSpec) -> GroupedRows:
        """A name, which may be cast, as codes: [N, K], or a stack [E, N, K]."""


@dataclass(frozen=True)
class Held:
    """Tensors in memory by name, as a `Source`; as codes, they are rounded."""

    form: TensorOf

    def read(self, part: Recipe) -> Tensor:
        """A named tensor itself, or rows of it, which do not keep the whole."""
        if isinstance(part, Rows):
            held = take(part, self.form(next(names(part))))
            return cast(held, part.part).clone(memory_format=torch.contiguous_format)
        return cast(self.form(next(names(part))), part)

    def codes(self, part: Recipe, spec: GroupSpec) -> GroupedRows:
        from mtpc.weights.quantise import quantised_rows  # Few starts round weights.

        return quantised_rows(self.read(part), spec)


def make(recipe: Recipe, tensor_of: TensorOf, fill: packing.Fill = packing.fill_packed) -> Tensor:
    """The tensor of a recipe over tensors in memory, packed on their device; see `make_all`."""
    made = make_all(recipe, Held(tensor_of), Packer(fill))[recipe]
    return made.to(tensor_of(next(names(recipe))).device) if isinstance(recipe, Packed) else made


def make_all(recipe: Recipe, source: Source, packer: Packer) -> dict[Recipe, Tensor]:
    """The tensor of a recipe: for a name the named tensor itself, otherwise a new one.

    All tensors of a weight in groups are made together. What is packed is in the host's memory,
    which has huge pages.

    Raises:
        TypeError: the recipe packs a packed weight.
    """
    if isinstance(recipe, Grouped):
        from mtpc.weights.grouped_recipes import make_pieces  # Not above: many weights are plain.

        return make_pieces(recipe, source, packer)
    early = take_early(recipe, source.form)
    if not isinstance(early, Packed):
        return {recipe: _plain(early, source.read)}
    out = allocate(early, source.form, packer.allocate)
    _place(early.part, out, source, packer.fill)
    return {recipe: out}


def _plain(recipe: Recipe, read: Callable[[Recipe], Tensor]) -> Tensor:
    """The tensor of a recipe that packs nothing."""
    if is_read(recipe):
        return read(recipe)
    if isinstance(recipe, (Packed, Grouped)):
        raise TypeError("a packed weight cannot be joined or packed again")
    first, *more = parts = [_plain(part, read) for part in parts_of(recipe)]
    if isinstance(recipe, Cast):
        return cast(first, recipe)
    if isinstance(recipe, Rows):
        return take(recipe, first).clone(memory_format=torch.contiguous_format)
    if isinstance(recipe, Blocks):
        blocks = first.view(recipe.count, -1, first.shape[-1])[:, recipe.start : recipe.stop]
        return (blocks.transpose(1, 2) if recipe.transposed else blocks).contiguous()
    assert isinstance(recipe, Join)
    if recipe.op == "stack":
        return torch.stack(parts)
    return torch.cat([first, *more], 0 if recipe.op == "cat" else 1)


def shape_of(recipe: Recipe, tensor_of: TensorOf) -> tuple[list[int], torch.dtype]:
    """Shape and dtype of the tensor of a recipe that packs nothing; no value is read.

    It is arithmetic, because torch's `cat` imports its compilers for tensors without memory.

    Raises:
        TypeError: the recipe packs something.
    """
    if isinstance(recipe, str):
        held = tensor_of(recipe)
        return [*held.shape], held.dtype
    if isinstance(recipe, (Packed, Grouped)):
        raise TypeError("a packed weight cannot be joined or packed again")
    (shape, dtype), *more = [shape_of(part, tensor_of) for part in parts_of(recipe)]
    if isinstance(recipe, Cast):
        return shape, getattr(torch, recipe.dtype)
    if isinstance(recipe, Rows):
        shape[recipe.dim] = sum(stop - start for start, stop in recipe.runs)
    elif isinstance(recipe, Blocks):
        matrix = [recipe.stop - recipe.start, shape[-1]]
        shape = [recipe.count, *(matrix[::-1] if recipe.transposed else matrix)]
    elif recipe.op == "stack":
        shape = [1 + len(more), *shape]
    else:
        dim = 0 if recipe.op == "cat" else 1
        shape[dim] += sum(other[dim] for other, _ in more)
    return shape, reduce(torch.promote_types, (other for _, other in more), dtype)


def allocate(
    recipe: Recipe, tensor_of: TensorOf, place: packing.Allocate = packing.allocate
) -> Tensor:
    """Host memory for the tensor of a recipe, not filled. Of named tensors only shapes and dtypes
    are read."""
    if isinstance(recipe, Grouped):
        from mtpc.weights.grouped_recipes import allocate_grouped

        return allocate_grouped(recipe, tensor_of, place)
    whole = recipe.part if isinstance(recipe, Packed) else recipe
    shape, dtype = shape_of(whole, tensor_of)
    return place(tuple(shape) if whole is recipe else packing.packed_shape(shape, dtype), dtype)


def _place(recipe: Recipe, out: Tensor, source: Source, fill: packing.Fill) -> None:
    """Pack the tensor of a recipe that packs nothing, part by part if possible, so that the whole
    is never made."""
    pieces: Iterator[Tensor] | None = None
    if isinstance(recipe, Join) and recipe.op == "stack":
        pieces = iter(out)
    elif isinstance(recipe, Join) and recipe.op == "cat":
        shapes = [shape_of(part, source.form)[0] for part in recipe.parts]
        is_matrix = all(len(shape) == 2 for shape in shapes)
        if is_matrix and not any(shape[0] % packing.TILE for shape in shapes[:-1]):
            pieces = iter(out.split([packing.count_tiles(shape[0]) for shape in shapes]))
    if pieces is None:
        fill(_plain(recipe, source.read).contiguous(), out)
        return
    for part, to in zip(parts_of(recipe), pieces, strict=True):
        _place(part, to, source, fill)


def spec_of(recipe: Recipe, specs: Mapping[str, GroupSpec]) -> GroupSpec | None:
    """The spec of the weight that a recipe makes from grouped weights, which have `specs` by name;
    None if it is not grouped."""
    if isinstance(recipe, str):
        return specs.get(recipe)
    found = {spec_of(part, specs) for part in parts_of(recipe)}
    spec = found.pop() if len(found) == 1 else None
    if isinstance(recipe, Rows) and spec is not None:
        fits = not (spec.turned and recipe.dim) and part_spec(recipe, spec).form.is_packable
        return spec if fits else None
    return spec if isinstance(recipe, (Join, Cast)) else None


def part_spec(recipe: Recipe, spec: GroupSpec) -> GroupSpec:
    """The spec of what a recipe makes of weights of one spec: a cut between inputs changes it."""
    if isinstance(recipe, Join):
        (found,) = {part_spec(part, spec) for part in recipe.parts}
        return found
    if not isinstance(recipe, Rows):
        return spec
    inner = part_spec(recipe.part, spec)
    return inner.cut(recipe.runs) if recipe.dim == -1 else inner


def take_early(recipe: Recipe, tensor_of: TensorOf) -> Recipe:
    """A recipe of the same tensor that takes rows before it joins tensors, so that it reads only
    these rows. Of named tensors only shapes and dtypes are read."""
    recipe = with_parts(recipe, lambda part: take_early(part, tensor_of))
    part = recipe.part if isinstance(recipe, Rows) else None
    if not isinstance(recipe, Rows) or not isinstance(part, Join):
        return recipe
    joined = 1 if part.op == "cat_rows" else 0
    if part.op == "stack" and recipe.dim == 0:
        return recipe
    if recipe.dim != joined:
        dim = recipe.dim - (part.op == "stack" and recipe.dim > 0)
        return with_parts(part, lambda each: take_early(Rows(recipe.runs, each, dim), tensor_of))
    start, taken = 0, []
    for each in part.parts:
        size = shape_of(each, tensor_of)[0][joined]
        own = [(max(a, start), min(b, start + size)) for a, b in recipe.runs]
        runs = tuple((a - start, b - start) for a, b in own if a < b)
        taken += [take_early(Rows(runs, each, joined), tensor_of)] if runs else []
        start += size
    return taken[0] if len(taken) == 1 else Join(part.op, tuple(taken))


def is_read(recipe: Recipe) -> bool:
    """Whether a recipe is a tensor as it is read: a name or rows of it, which may be cast."""
    held = recipe.part if isinstance(recipe, Rows) else recipe
    return isinstance(held.part if isinstance(held, Cast) else held, str)


def parts_read(recipe: Recipe) -> Iterator[Recipe]:
    """All tensors that a recipe reads, each as `is_read` says."""
    if is_read(recipe):
        yield recipe
        return
    for part in parts_of(recipe):
        yield from parts_read(part)


def take(rows: Rows, tensor: Tensor) -> Tensor:
    """These rows of a tensor: a view of adjacent ones, otherwise a copy."""
    held = [tensor.narrow(rows.dim, start, stop - start) for start, stop in rows.runs]
    return held[0] if len(held) == 1 else torch.cat(held, rows.dim)


def cast(tensor: Tensor, part: Recipe) -> Tensor:
    """A tensor in the dtype of a `Cast`; where `part` is none, the tensor itself."""
    return tensor.to(getattr(torch, part.dtype)) if isinstance(part, Cast) else tensor


def takes_all(recipe: Recipe) -> bool:
    """Whether the tensor of a recipe has all values of `parts_read`."""
    return all(map(takes_all, recipe.parts)) if isinstance(recipe, Join) else is_read(recipe)


def to_json(recipe: Recipe) -> Any:
    """The recipe as JSON: a name, or an operation with its arguments.

    Examples: `{"cat": [...]}`, `{"pack": ...}`, `{"rows": [[[0, 8], [9, 12]], ...]}`,
    `{"blocks": [[4, 0, 8, true], ...]}`, `{"cast": ["float32", ...]}`,
    `{"grouped": [["codes", "int4", 32, false, false, "bfloat16"], ...]}`.
    """
    if isinstance(recipe, str):
        return recipe
    if isinstance(recipe, Join):
        return {recipe.op: [to_json(part) for part in recipe.parts]}
    part = to_json(recipe.part)
    if isinstance(recipe, Packed):
        return {"pack": part}
    if isinstance(recipe, Cast):
        return {"cast": [recipe.dtype, part]}
    if isinstance(recipe, Rows):
        other = [recipe.dim] if recipe.dim else []
        return {"rows": [[list(run) for run in recipe.runs], part, *other]}
    if isinstance(recipe, Blocks):
        return {"blocks": [[recipe.count, recipe.start, recipe.stop, recipe.transposed], part]}
    return {"grouped": [[recipe.piece, *recipe.spec.to_list()], part]}


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
    if op == "cast":
        dtype, part = parts
        if not isinstance(getattr(torch, dtype), torch.dtype):
            raise ValueError(f"a tensor is cast to {dtype!r}")
        return Cast(dtype, from_json(part))
    if op == "rows":
        runs, part, *dim = parts
        kept = tuple((index(start), index(stop)) for start, stop in runs)
        return Rows(kept, from_json(part), *map(index, dim))
    if op == "blocks":
        (count, start, stop, transposed), part = parts
        return Blocks(index(count), index(start), index(stop), bool(transposed), from_json(part))
    if op == "grouped":
        from mtpc.weights.grouped_recipes import GroupSpec

        (piece, *said), part = parts
        if piece not in get_args(Piece):
            raise ValueError(f"a grouped weight has no {piece!r}")
        return Grouped(piece, GroupSpec.from_list(said), from_json(part))
    if op not in ("cat", "cat_rows", "stack") or not isinstance(parts, list):
        raise ValueError(f"a recipe has the operation {op!r} of {type(parts).__name__}")
    return Join(op, tuple(map(from_json, parts)))

"""How a weight is made from others, as data: it can be written into a cache and repeated.

A recipe is the name of a tensor, several recipes joined, or one packed for the kernels. Passes
derive weights by recipes, and checkpoints that store experts one by one are read by them; so a
program that comes from the cache makes its weights from the checkpoint's values of today, whatever
values it was built with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from mtpc import packing


@dataclass(frozen=True)
class Join:
    """Several tensors as one: along their first dimension (cat), or along a new one (stack)."""

    op: Literal["cat", "stack"]
    parts: tuple[Recipe, ...]


@dataclass(frozen=True)
class Pack:
    """A matrix in the order of `mtpc.packing`."""

    part: Recipe


Recipe: TypeAlias = "str | Join | Pack"


Fill: TypeAlias = Callable[[Tensor, Tensor], None]
"""Packs a weight into memory at hand, as `mtpc.packing.fill_packed`, in its own time."""


def make(
    recipe: Recipe, tensor_of: Callable[[str], Tensor], fill: Fill = packing.fill_packed
) -> Tensor:
    """Carry a recipe out; a mere name gives that very tensor, anything else a new one.

    Args:
        recipe: what to make.
        tensor_of: the tensor of each name.
        fill: how weights are packed.
    """
    if isinstance(recipe, str):
        return tensor_of(recipe)
    if isinstance(recipe, Pack):
        packed = packing.allocate_packed(*_extent(recipe.part, tensor_of))
        _fill(recipe.part, packed, tensor_of, fill)
        return packed
    parts = [make(part, tensor_of, fill) for part in recipe.parts]
    return torch.cat(parts) if recipe.op == "cat" else torch.stack(parts)


def _extent(recipe: Recipe, tensor_of: Callable[[str], Tensor]) -> tuple[list[int], torch.dtype]:
    """Shape and dtype of what a recipe of names and joins gives, without making it."""
    if isinstance(recipe, str):
        return list(tensor_of(recipe).shape), tensor_of(recipe).dtype
    if isinstance(recipe, Pack):
        raise TypeError("what is packed cannot be joined or packed again")
    parts = [_extent(part, tensor_of) for part in recipe.parts]
    (first, *inner), dtype = parts[0]
    if recipe.op == "stack":
        return [len(parts), first, *inner], dtype
    return [sum(shape[0] for shape, _ in parts), *inner], dtype


def _fill(recipe: Recipe, packed: Tensor, tensor_of: Callable[[str], Tensor], fill: Fill) -> None:
    """Pack what a recipe gives, part by part where tiles allow: the whole is never made."""
    if isinstance(recipe, Join) and recipe.op == "stack":
        for part, to in zip(recipe.parts, packed, strict=True):
            _fill(part, to, tensor_of, fill)
        return
    if isinstance(recipe, Join):
        sizes = [_extent(part, tensor_of)[0][0] for part in recipe.parts]
        if packed.dim() == 4 and not any(size % packing.TILE for size in sizes[:-1]):
            tiles = packed.split([packing.count_tiles(size) for size in sizes])
            for part, to in zip(recipe.parts, tiles, strict=True):
                _fill(part, to, tensor_of, fill)
            return
    fill(make(recipe, tensor_of).contiguous(), packed)


def names(recipe: Recipe) -> Iterator[str]:
    """Every tensor a recipe takes."""
    if isinstance(recipe, str):
        yield recipe
    elif isinstance(recipe, Pack):
        yield from names(recipe.part)
    else:
        for part in recipe.parts:
            yield from names(part)


def substitute(recipe: Recipe, recipe_of: Callable[[str], Recipe]) -> Recipe:
    """The same recipe with every name replaced by what that is made of."""
    if isinstance(recipe, str):
        return recipe_of(recipe)
    if isinstance(recipe, Pack):
        return Pack(substitute(recipe.part, recipe_of))
    return Join(recipe.op, tuple(substitute(part, recipe_of) for part in recipe.parts))


def to_json(recipe: Recipe) -> Any:
    """A name, `{"cat": [...]}`, or `{"pack": ...}`."""
    if isinstance(recipe, str):
        return recipe
    if isinstance(recipe, Pack):
        return {"pack": to_json(recipe.part)}
    return {recipe.op: [to_json(part) for part in recipe.parts]}


def from_json(value: Any) -> Recipe:
    """What `to_json` wrote."""
    if isinstance(value, str):
        return value
    ((op, parts),) = value.items()
    if op == "pack":
        return Pack(from_json(parts))
    return Join(op, tuple(map(from_json, parts)))

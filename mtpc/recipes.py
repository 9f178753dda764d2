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


Packer: TypeAlias = Callable[[Tensor], Tensor]


def make(
    recipe: Recipe, tensor_of: Callable[[str], Tensor], packer: Packer = packing.pack
) -> Tensor:
    """Carry a recipe out; a mere name gives that very tensor, anything else a new one.

    Args:
        recipe: what to make.
        tensor_of: the tensor of each name.
        packer: makes the same copy as `mtpc.packing.pack`, in its own time.
    """
    if isinstance(recipe, str):
        return tensor_of(recipe)
    if isinstance(recipe, Pack):
        return packer(make(recipe.part, tensor_of, packer))
    parts = [make(part, tensor_of, packer) for part in recipe.parts]
    return torch.cat(parts) if recipe.op == "cat" else torch.stack(parts)


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

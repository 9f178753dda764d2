"""The weights of a program: each is held, or made once by its recipe when it is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtpc.weights.packing import Packer
from mtpc.weights.recipes import (
    Grouped,
    Held,
    Join,
    Recipe,
    allocate,
    make_all,
    names,
    spec_of,
    substitute,
)
from mtpc.weights.stored import StoredWeights

if TYPE_CHECKING:
    from mtpc.weights.grouped_recipes import GroupSpec
    from mtpc.weights.orders import Orders


class Weights:
    """Weights by name, for all graphs of a program: the model's, and those that passes derive.

    All steps share them. A weight is made from the files of a checkpoint, where these explain it,
    or else of weights that are held; the same recipe over the same memory gives the same tensor.

    Args:
        held: weights of the model that are in memory, or memory without contents.
        stored: the weights that files explain; None if none are.
        owned: whether nothing else holds the tensors. The parts of a concatenation then become
            views of it, so that no weight is in memory twice.

    Attributes:
        recipes: derived weights by name: how each is made from weights of the model.
        wholes: parts that this rank holds by name: the weight that each is a part of.
        defers: whether a derived weight is memory without contents until `value` asks for it. A
            build that only writes packages needs no contents.
    """

    def __init__(
        self,
        held: Mapping[str, Tensor] | None = None,
        stored: StoredWeights | None = None,
        owned: bool = False,
    ):
        self.recipes: dict[str, Recipe] = {}
        self.wholes: dict[str, str] = {}
        self.defers, self._owned, self._stored = False, owned, stored
        self._specs = stored.specs if stored else {}
        self._held = dict(held or {})
        self._name_of = {id(tensor): name for name, tensor in self._held.items()}
        self._deferred: set[str] = set()
        self._made: dict[tuple[bool, Recipe], Tensor] = {}
        self._holders: dict[Hashable, str] = {}

    @cached_property
    def orders(self) -> Orders:
        """The orders of elements in which steps read weights."""
        from mtpc.weights.orders import Orders  # Not above: weights of files are in one order.

        return Orders(self._held, self.recipes, self._owned)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor that graphs have by that name, with contents or without."""
        return self._held[name]

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def items(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._held.items()

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of this very tensor object; None if it is not here."""
        return self._name_of.get(id(tensor))

    def spec(self, name: str) -> GroupSpec | None:
        """How a weight is stored in groups; None for a plain one."""
        return spec_of(self.recipes.get(name, name), self._specs)

    def bind(self, name: str, tensor: Tensor) -> None:
        """Add a tensor by its name. Loaders use it; passes use `derive`."""
        self._held[name] = tensor
        self._name_of[id(tensor)] = name

    def add_constant(self, tensor: Tensor) -> str:
        """Add a constant of the model's code; returns its name, a digest of its contents."""
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        content = f"{tensor.dtype}{list(tensor.shape)}".encode() + data.numpy().tobytes()
        name = f"constant.{hashlib.sha256(content).hexdigest()[:16]}"
        if name not in self:
            self.bind(name, tensor)
        return name

    def know(
        self, derived: Mapping[str, Recipe], stored: Mapping[str, Recipe], ends: Iterable[str]
    ) -> None:
        """Add weights by their recipes: over weights, and over tensors of the files; no value is
        read. Where there are no files, the weights that they would explain are held."""
        self.recipes |= derived
        if self._stored is not None:
            self._stored.know(stored, ends)

    def derive(self, name: str, recipe: Recipe) -> Tensor:
        """The weight of that name. The first call adds it by the recipe.

        This is the only way for passes to add a weight. So graphs do not depend on the values of
        weights, and steps compiled for one checkpoint serve its fine-tunes.
        """
        if name not in self:
            self.recipes[name] = self._whole(recipe)
            if self.defers:
                self._deferred.add(name)
                self.bind(name, allocate(self._over_held(recipe), self._tensor))
            else:
                self.bind(name, self._make(recipe))
        return self[name]

    def is_made(self, name: str) -> bool:
        return name in self and name not in self._deferred

    def can_make(self, name: str) -> bool:
        """Whether a recipe of the weight is known, or the files explain it."""
        return name in self.recipes or (self._stored is not None and self._stored.has(name))

    def value(self, name: str) -> Tensor:
        """The weight with its values, which the first call makes."""
        if not self.is_made(name):
            self.bind(name, self._make(self.recipes.get(name, name)))
            self._deferred.discard(name)
        return self[name]

    def _make(self, recipe: Recipe) -> Tensor:
        stored, whole = self._stored, self._whole(recipe)
        if stored is not None and stored.has(whole):
            return self._once(recipe, stored.over_tensors(whole), stored)
        return self._once(recipe, substitute(self._over_held(recipe), self._holder), None)

    def _whole(self, recipe: Recipe) -> Recipe:
        """A recipe over weights of the model alone."""
        return substitute(recipe, lambda part: self.recipes.get(part, part))

    def _over_held(self, recipe: Recipe) -> Recipe:
        """A recipe over what is held; of codes, over the model's: cuts have smaller groups."""
        return self._whole(recipe) if isinstance(recipe, Grouped) else recipe

    def _once(self, recipe: Recipe, same: Recipe, stored: StoredWeights | None) -> Tensor:
        """The tensor of a recipe; that of another one that is the same over files or memory."""
        key = (stored is not None, same)
        if key not in self._made:
            device = next((self[n].device for n in names(recipe) if n in self), None)
            made = stored.make(same) if stored else make_all(same, Held(self._tensor), Packer())
            self._made |= {(key[0], each): tensor.to(device) for each, tensor in made.items()}
            if self._owned and isinstance(recipe, Join) and recipe.op == "cat":
                self._take_the_place(self._made[key], recipe)
        return self._made[key]

    def _take_the_place(self, made: Tensor, recipe: Join) -> None:
        """Make the parts of a concatenation views of it. Views taken before keep the old memory."""
        start = 0
        for part in recipe.parts:
            tensor = self._held.get(part) if isinstance(part, str) else None
            if tensor is None or tensor.dtype != made.dtype or tensor.is_meta:
                return
            stop = start + tensor.shape[0]
            tensor.data = made[start:stop]
            start = stop

    def _holder(self, name: str) -> str:
        """The first weight seen in the memory of this one: itself, or the one it is a copy of."""
        tensor = self._tensor(name)
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        return self._holders.setdefault(memory, name)

    def _tensor(self, name: str) -> Tensor:
        self.orders.check_stored(name)
        return self[name].detach()

    def reading_ahead(
        self, wanted: Iterable[str], free: int | None, need: int
    ) -> AbstractContextManager[None]:
        """Within the block, files are read ahead of these weights; see `StoredWeights`."""
        if self._stored is None:
            return nullcontext()
        recipes = (self.recipes.get(name, name) for name in wanted)
        return self._stored.reading_ahead(recipes, free, need)

    def check(self) -> None:
        """Check the values that were read from files so far.

        Raises:
            CheckpointError: they hold NaN or infinity.
        """
        if self._stored is not None:
            self._stored.check()

"""Packed copies of a module's parameters, which may change between two calls.

Parameters are inputs of Dynamo's graphs. Two calls may pass different ones, because Dynamo compiles
equal submodules once; and a parameter may be updated in place. So each call looks up packed weights
by the identity, version counter and address of the parameters that it passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mtpc.backends.cpu_kernels import fill_packed
from mtpc.weights.packing import Packer
from mtpc.weights.recipes import Held, Recipe, make_all, substitute

State: TypeAlias = tuple[int, int]
"""A parameter's version counter, which in-place updates increment, and its address."""
WeightStore: TypeAlias = weakref.WeakValueDictionary[Recipe, Tensor]
"""The packed weights of all graphs, by recipe, with parameters named by identity and state."""


def state_of(parameter: Tensor) -> State:
    return parameter._version, parameter.data_ptr()


@dataclass(frozen=True)
class _Packed:
    """The derived weights of one set of parameters.

    Attributes:
        states: the parameters' states when they were packed.
        tensors: the derived weights.
        watches: weak references that drop this entry when a parameter is freed.
    """

    states: list[State]
    tensors: list[Tensor]
    watches: list[Any]


class CallWeights:
    """The derived weights of a graph, for the parameters of each call.

    Args:
        recipes: recipes of the derived weights; they refer to parameters by name.
        positions: indices of these parameters among a call's arguments.
        store: packed weights that graphs of the same parameters share.
    """

    def __init__(
        self, recipes: Mapping[str, Recipe], positions: Mapping[str, int], store: WeightStore
    ) -> None:
        self._recipes = tuple(recipes.values())
        self._names, self._positions = tuple(positions), tuple(positions.values())
        self._store = store
        self._packed: dict[tuple[int, ...], _Packed] = {}

    def of(self, args: Sequence[Any]) -> list[Tensor]:
        """The derived weights, in order, of the present values of a call's parameters."""
        parameters = [args[i] for i in self._positions]
        # When a parameter is freed its entries are dropped, so an id here is never a reused one.
        key, states = tuple(map(id, parameters)), [*map(state_of, parameters)]
        packed = self._packed.get(key)
        if packed is None or packed.states != states:
            self._packed.pop(key, None)
            tensors = self._make_all(dict(zip(self._names, parameters, strict=True)))
            forget = partial(_forget, weakref.ref(self), key)
            watches = [weakref.ref(parameter, forget) for parameter in parameters]
            packed = self._packed.setdefault(key, _Packed(states, tensors, watches))
        return packed.tensors

    def _make_all(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """Make the derived weights, or take them from the store."""

        def identity(name: str) -> str:
            return f"{id(parameters[name])} {state_of(parameters[name])}"

        def values(name: str) -> Tensor:
            return parameters[name].detach()

        found: dict[Recipe, Tensor] = {}
        # Tensors made in inference mode could not be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            for recipe in self._recipes:
                held = self._store.get(substitute(recipe, identity))
                if held is not None:
                    found[recipe] = held
                elif recipe not in found:
                    found |= make_all(recipe, Held(values), Packer(fill_packed))
        self._store.update({substitute(r, identity): tensor for r, tensor in found.items()})
        return [found[recipe] for recipe in self._recipes]


def _forget(weights: Callable[[], CallWeights | None], key: tuple[int, ...], _: Any) -> None:
    """Drop the packed weights of a set of parameters, because one of them has been freed."""
    held = weights()
    if held is not None:
        held._packed.pop(key, None)

"""Packed weights of a module that its owner may change at any time.

A graph of Dynamo's takes parameters as inputs, so a call may bring other parameters than the one
before: Dynamo compiles equal submodules once. And a parameter may be updated in place. So each call
looks up the packed weights of its own parameters, by identity, version counter and address.
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
from mtpc.weights.quantise import quantised_rows
from mtpc.weights.recipes import Grouped, GroupedMaker, Recipe, make, substitute

State: TypeAlias = tuple[int, int]
"""A parameter's version counter, which every update in place raises, and its address."""
WeightStore: TypeAlias = weakref.WeakValueDictionary[Recipe, Tensor]
"""Packed weights that some graph holds, by their recipes over parameters and their states."""


def state_of(parameter: Tensor) -> State:
    return parameter._version, parameter.data_ptr()


@dataclass(frozen=True)
class _Packed:
    """The derived weights of some parameters, what these were then, and watches of their ends."""

    states: list[State]
    tensors: list[Tensor]
    watches: list[Any]


class CallWeights:
    """The derived weights of a graph, for the parameters of each call.

    Args:
        recipes: of the derived weights, over names of parameters.
        positions: of these parameters among a call's arguments.
        store: what other graphs have packed of the same parameters.
    """

    def __init__(
        self, recipes: Mapping[str, Recipe], positions: Mapping[str, int], store: WeightStore
    ) -> None:
        self._recipes = tuple(recipes.values())
        self._names, self._positions = tuple(positions), tuple(positions.values())
        self._store = store
        self._packed: dict[tuple[int, ...], _Packed] = {}

    def of(self, args: Sequence[Any]) -> list[Tensor]:
        """The derived weights in order, of what the parameters of a call hold now."""
        parameters = [args[i] for i in self._positions]
        # A parameter that is freed takes its entries with it, so no id here is that of another.
        packed = self._packed.get(tuple(map(id, parameters)))
        if packed is None or packed.states != [*map(state_of, parameters)]:
            packed = self._pack(parameters)
        return packed.tensors

    def _pack(self, parameters: list[Tensor]) -> _Packed:
        key = tuple(map(id, parameters))
        states = [*map(state_of, parameters)]
        self._packed.pop(key, None)
        tensors = self._make_all(dict(zip(self._names, parameters, strict=True)))
        forget = partial(_forget, weakref.ref(self), key)
        watches = [weakref.ref(parameter, forget) for parameter in parameters]
        return self._packed.setdefault(key, _Packed(states, tensors, watches))

    def _make_all(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """The derived weights; those that a graph has packed before are shared."""

        def identity(name: str) -> str:
            return f"{id(parameters[name])} {state_of(parameters[name])}"

        def values(name: str) -> Tensor:
            return parameters[name].detach()

        maker = GroupedMaker(lambda name, spec: quantised_rows(values(name), spec), fill_packed)
        tensors: list[Tensor] = []
        # Calls in inference mode would leave tensors that no other call could take.
        with torch.inference_mode(False), torch.no_grad():
            for recipe in self._recipes:
                same = substitute(recipe, identity)
                tensor = self._store.get(same)
                if tensor is None and isinstance(recipe, Grouped):
                    tensor = maker.make(recipe)
                elif tensor is None:
                    tensor = make(recipe, values, fill_packed)
                self._store[same] = tensor
                tensors.append(tensor)
        return tensors


def _forget(weights: Callable[[], CallWeights | None], key: tuple[int, ...], _: Any) -> None:
    """Drop what was packed of parameters of which one has been freed."""
    held = weights()
    if held is not None:
        held._packed.pop(key, None)

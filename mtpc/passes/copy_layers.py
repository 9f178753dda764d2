"""copy-layers: add the layers that were not traced, as copies of a period of those that were.

    before | period A | period B | after      ->      before | A | B | B' | B'' | ... | after

A and B are runs of calls. B has the operators of A in the same order. The names of its weights and
state are those of the layers one period later, and where A takes a value from the calls before it,
B takes the matching result of A. So the period after B can be made from B in the same way. Copies
are made until all layers are there. Layers after the copies get the names that they have in the
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from mtpc.capture.graph import StepGraph, get_tensor, module_of
from mtpc.capture.inline import add_attribute, all_same, fake_call, fake_mode_of
from mtpc.layout.layers import LayerPattern
from mtpc.layout.specs import is_buffer_name
from mtpc.passes.base import Pass
from mtpc.weights.recipes import substitute


class LayersDiffer(Exception):
    """A graph's calls do not repeat as its layers do, or a kernel cannot read the weights of all
    layers in its order: every layer must be traced."""


@dataclass(frozen=True)
class CopyLayers(Pass, policy="required"):
    """Give a graph of the first layers all of them; counts the periods that it copies.

    Its copies keep the values of the verified calls that they are made of.

    `shared` has state and caches of all layers, by name.

    Raises:
        LayersDiffer: the graph is left as it is.
    """

    pattern: LayerPattern
    shared: Mapping[str, Tensor]

    def apply(self, graph: StepGraph) -> int:
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        periods = _find_periods(calls, self.pattern)
        if periods is None:
            raise LayersDiffer
        writer = _Writer(graph, self.pattern, self.shared, calls, periods)
        if not writer.can_read_weights():
            raise LayersDiffer
        graph.module = writer.run()
        return self.pattern.copies


def _find_periods(calls: list[fx.Node], pattern: LayerPattern) -> tuple[int, int] | None:
    """The index of the first call, and the number of calls, of two adjacent periods.

    A period begins with the first call that uses the state of its first layer. They are the second
    and the third period, because the first one also has calls that all layers share.
    """
    marks: list[int] = []
    for count in range(1, 4):
        cache = (pattern.first + count * pattern.period) * pattern.caches
        uses = (i for i, call in enumerate(calls) if _uses_state(call, f"kv.{cache}."))
        mark = next(uses, None)
        if mark is None:
            return None
        marks.append(mark)
    size = marks[1] - marks[0]
    if size <= 0 or marks[2] - marks[1] != size:
        return None
    return (marks[0], size) if _repeats(calls, marks[0], size, pattern) else None


def _uses_state(call: fx.Node, prefix: str) -> bool:
    return any(
        a.op == "get_attr" and str(a.target).startswith(prefix) for a in call.all_input_nodes
    )


def _repeats(calls: list[fx.Node], start: int, size: int, pattern: LayerPattern) -> bool:
    """Whether the calls are two periods, by every operator and argument."""
    place = {call: index for index, call in enumerate(calls)}
    # Value from before A that a call of A takes -> result of A that the same call of B takes.
    carried: dict[fx.Node, fx.Node] = {}

    def same(one: Any, other: Any) -> bool:
        if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
            return type(one) is type(other) and bool(one == other)
        if "get_attr" in (one.op, other.op):
            moved = pattern.shifted(str(one.target), pattern.period)
            return one.op == other.op and moved == other.target
        first, second = place[one], place[other]
        if first >= start:
            return second == first + size
        if second < start:
            return one is other
        return second < start + size and carried.setdefault(one, other) is other

    for one, other in zip(calls[start : start + size], calls[start + size :], strict=False):
        given = (one.args, one.kwargs), (other.args, other.kwargs)
        if one.target is not other.target or not all_same(*given, same):
            return False
    inside = set(calls[start : start + size])
    after = calls[start + 2 * size :]
    return all(inside.isdisjoint(call.all_input_nodes) for call in after)


class _Writer:
    """Writes the graph with all layers, in order of execution."""

    def __init__(
        self,
        graph: StepGraph,
        pattern: LayerPattern,
        shared: Mapping[str, Tensor],
        calls: list[fx.Node],
        periods: tuple[int, int],
    ):
        self.old, self.pattern, self.shared = graph, pattern, shared
        self.calls, self.periods = calls, periods
        self.mode = fake_mode_of(graph.graph)
        self.graph, self.root = fx.Graph(), nn.Module()
        self.made: dict[fx.Node, fx.Node] = {}
        self.attributes: dict[str, fx.Node] = {}

    def can_read_weights(self) -> bool:
        """Whether the weights of all layers can be in the orders in which calls read them."""
        (start, size), weights, pattern = self.periods, self.old.weights, self.pattern
        end = start + 2 * size
        copies = [(n, self.calls[start + size : end]) for n in range(1, pattern.copies + 1)]
        for number, calls in [*copies, (pattern.copies, self.calls[end:])]:
            for node in (node for call in calls for node in call.all_input_nodes):
                old = str(node.target)
                if node.op != "get_attr" or is_buffer_name(old):
                    continue
                name = pattern.shifted(old, number * pattern.period)
                if name in weights and not weights.orders.can_read_alike(name, old):
                    return False
        return True

    def run(self) -> fx.GraphModule:
        start, size = self.periods
        end = start + 2 * size
        for call in self.calls[:end]:
            self._write(call, 0)
        first, second = self.calls[start : start + size], self.calls[start + size : end]
        for number in range(1, self.pattern.copies + 1):
            # Where B takes results of A, the copy takes those of the period before it.
            before = {one: self.made[other] for one, other in zip(first, second, strict=True)}
            self.made |= before
            for call in second:
                self._write(call, number * self.pattern.period)
        for call in self.calls[end:]:
            self._write(call, self.pattern.copies * self.pattern.period)
        self.graph.output(())
        return module_of(self.root, self.graph)

    def _write(self, call: fx.Node, layers: int) -> None:
        """Append a copy of a call, with the names of weights and state moved by so many layers."""

        def of(node: fx.Node) -> fx.Node:
            if node.op == "get_attr":
                return self._attribute(node, layers)
            return self.made[node]

        args, kwargs = fx.node.map_arg(call.args, of), fx.node.map_arg(call.kwargs, of)
        target: Any = call.target
        new = self.graph.call_function(target, args, kwargs)
        new.meta = {**call.meta, **fake_call(self.mode, target, args, kwargs)}
        self.made[call] = new

    def _attribute(self, node: fx.Node, layers: int) -> fx.Node:
        name = self.pattern.shifted(str(node.target), layers) if layers else str(node.target)
        if name not in self.attributes:
            tensor = self._tensor(str(node.target), name, layers)
            self.attributes[name] = add_attribute(self.root, self.graph, self.mode, name, tensor)
        return self.attributes[name]

    def _tensor(self, old: str, name: str, layers: int) -> Tensor:
        """The buffer or weight of that name; derived weights are made by the moved recipe."""
        if name == old:
            return get_tensor(self.old.module, old)
        if is_buffer_name(name):
            return self.shared[name]
        weights = self.old.weights
        if name not in weights:
            recipe = weights.recipes[old]
            weights.derive(name, substitute(recipe, lambda n: self.pattern.shifted(n, layers)))
        weights.orders.read_alike(name, old)
        return weights[name]

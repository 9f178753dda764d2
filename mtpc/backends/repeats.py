"""Cutting a flat step into segments, so that what repeats in it, such as a layer, is compiled once.

    before | A | A | A | ... | after

Nothing says what a layer is. A segment is a run of calls; two segments have one form if their calls
are the same, on values of equal forms, wired in the same way. So the module of one serves both, on
each one's own tensors. The calls before and after a repetition may hold further ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from mtpc.backends.base import Run
from mtpc.capture.effects import Effects, analyse
from mtpc.capture.fake_calls import form_of

_LEAST_SAVED = 12
"""A repetition must save at least this many calls: values that cross a cut go through memory."""


@dataclass(frozen=True)
class Segment:
    """Calls that are compiled together.

    Attributes:
        calls: in order of execution. Views of the step's tensors come first: each segment makes its
            own.
        inputs: values from outside, in the order of their first use.
        outputs: values that are used outside, in order of execution.
        wiring: for every value that a call takes, in order: its index in `inputs`, or the number
            of inputs plus the index of the call that computes it.
    """

    calls: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    wiring: tuple[int, ...]


@dataclass(frozen=True)
class CutStep:
    """A flat graph in segments, in order of execution, with the form of each, counted in the order
    in which forms begin, and the tensors of the graph's placeholders."""

    segments: tuple[Segment, ...]
    forms: tuple[int, ...]
    tensors: Mapping[fx.Node, Tensor]

    def modules(self) -> list[tuple[fx.GraphModule, list[Tensor]]]:
        """The module of each form, and tensors like its inputs: real, or fake where computed."""
        made = []
        for form in range(max(self.forms) + 1):
            segment = self.segments[self.forms.index(form)]
            examples: list[Tensor] = [
                self.tensors[n] if n in self.tensors else n.meta["val"] for n in segment.inputs
            ]
            made.append((_module_of(segment), examples))
        return made

    def counts(self) -> Counter[int]:
        return Counter(self.forms)

    def run_of(self, compiled: Sequence[Callable[..., Any]]) -> Run:
        """A run of the whole step, of what computes each form: tensors -> its results."""
        last = {node: i for i, s in enumerate(self.segments) for node in (*s.inputs, *s.outputs)}
        held = dict(self.tensors)
        plan = [
            (compiled[form], segment, [n for n in last if last[n] == i and n not in held])
            for i, (segment, form) in enumerate(zip(self.segments, self.forms, strict=True))
        ]

        def run() -> None:
            values = dict(held)
            for function, segment, done in plan:
                results = function(*(values[node] for node in segment.inputs))
                values.update(zip(segment.outputs, results, strict=True))
                for node in done:  # Others get its memory.
                    del values[node]

        return run


def cut_repeats(graph: fx.Graph, tensors: Sequence[Tensor]) -> CutStep:
    """Cut a flat graph that returns nothing, and whose nodes have their values in "val". It stays
    one segment if nothing repeats, or if a cut would separate a write from the memory that it
    writes. The tensors are those of its placeholders, in order."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    given = [node for node in graph.nodes if node.op == "placeholder"]
    cutter = _Cutter(calls, analyse(graph))
    segments = cutter.cut(calls)
    if not all(map(cutter.stands_alone, segments)):
        segments = [cutter.segment(calls)]
    seen: dict[Any, int] = {}
    forms = [seen.setdefault(cutter.form(segment), len(seen)) for segment in segments]
    return CutStep(tuple(segments), tuple(forms), dict(zip(given, tensors, strict=True)))


class _Cutter:
    """Cuts the calls of a graph, and knows which segments are alike."""

    def __init__(self, calls: Sequence[fx.Node], effects: Effects):
        kinds: dict[Any, int] = {}
        self.effects = effects
        self.signs = {call: kinds.setdefault(_sign(call), len(kinds)) for call in calls}

    def cut(self, calls: Sequence[fx.Node]) -> list[Segment]:
        """Segments for the longest repetition, and for what is before and after it."""
        # Begin, end and period of the repetition that saves the most calls.
        signs = [self.signs[call] for call in calls]
        most, found = 0, None
        for size in range(1, len(signs) // 2 + 1):
            alike = 0
            for i in range(len(signs) - size):
                alike = alike + 1 if signs[i] == signs[i + size] else 0
                saved = alike // size * size
                if saved >= max(most + 1, _LEAST_SAVED):
                    most, found = saved, (i + 1 - alike, i + 1 + size, size)
        if found is None:
            return [self.segment(calls)] if calls else []
        start, end, size = found
        best, at = list[Segment](), 0
        for first in range(start, start + size):  # A period may begin at any of its calls.
            count = (end - first) // size
            begins = range(first, first + count * size, size)
            segments = _aligned([self.segment(calls[a : a + size]) for a in begins])
            if (
                (count - 1) * size >= _LEAST_SAVED
                and self._are_alike(segments)
                and _worth(segments) > _worth(best)
            ):
                best, at = segments, first
        if not best:
            return [self.segment(calls)]
        after = calls[at + len(best) * size :]
        return [*self.cut(calls[:at]), *best, *self.cut(after)]

    def segment(self, calls: Sequence[fx.Node]) -> Segment:
        calls = [*self._views(calls), *calls]
        place = {call: index for index, call in enumerate(calls)}
        inputs: dict[fx.Node, int] = {}
        taken: list[fx.Node] = []
        for call in calls:
            fx.node.map_arg((call.args, call.kwargs), taken.append)
        for node in taken:
            if node not in place:
                inputs.setdefault(node, len(inputs))
        wiring = tuple(inputs[n] if n in inputs else len(inputs) + place[n] for n in taken)
        outputs = tuple(
            call
            for call in calls
            if not self._is_view(call) and any(user not in place for user in call.users)
        )
        return Segment(tuple(calls), tuple(inputs), outputs, wiring)

    def form(self, segment: Segment) -> Any:
        """A key: segments with equal keys can share a module."""
        outputs = tuple(segment.calls.index(node) for node in segment.outputs)
        roots = [self.effects.roots[node] for node in segment.inputs]
        shared = tuple(
            tuple(i for i, other in enumerate(roots) if not own.isdisjoint(other)) for own in roots
        )
        return tuple(self.signs[c] for c in segment.calls), segment.wiring, outputs, shared

    def stands_alone(self, segment: Segment) -> bool:
        """Whether a segment takes and gives tensors only, gives no view of what it takes, and
        writes nothing from outside but whole tensors of the step that it takes once."""
        own, roots = set(segment.calls), self.effects.roots
        values = [node.meta.get("val") for node in (*segment.inputs, *segment.outputs)]
        if not all(isinstance(value, Tensor) for value in values):
            return False
        if any(not roots[node] <= own for node in segment.outputs):
            return False
        written = frozenset().union(*(self.effects.writes[call] for call in segment.calls)) - own
        holders = [[n for n in segment.inputs if root in roots[n]] for root in written]
        return all(len(held) == 1 and held[0].op == "placeholder" for held in holders)

    def _are_alike(self, segments: Sequence[Segment]) -> bool:
        forms = {self.form(segment) for segment in segments}
        return len(forms) == 1 and all(map(self.stands_alone, segments))

    def _views(self, calls: Sequence[fx.Node]) -> list[fx.Node]:
        """Views of the step's tensors that calls take from outside, in order."""
        found: dict[fx.Node, None] = {}
        own = set(calls)

        def add(node: fx.Node) -> None:
            if node not in own and self._is_view(node):
                for source in node.all_input_nodes:
                    add(source)
                found.setdefault(node)

        for call in calls:
            for node in call.all_input_nodes:
                add(node)
        return list(found)

    def _is_view(self, node: fx.Node) -> bool:
        """Whether a call only looks at tensors of the step in another way."""
        roots = self.effects.roots[node]
        return (
            node.op == "call_function"
            and bool(roots)
            and not self.effects.writes[node]
            and all(isinstance(root, fx.Node) and root.op == "placeholder" for root in roots)
        )


def _worth(segments: Sequence[Segment]) -> tuple[int, int]:
    """A key to compare cuts: more segments are better, then fewer values that cross a cut."""
    crossing = len(segments[0].inputs) + len(segments[0].outputs) if segments else 0
    return len(segments), -crossing


def _aligned(segments: Sequence[Segment]) -> list[Segment]:
    """The same, each with the outputs that any of them has."""
    places = sorted({s.calls.index(node) for s in segments for node in s.outputs})
    if any(len(s.calls) != len(segments[0].calls) for s in segments):
        return list(segments)
    return [replace(s, outputs=tuple(s.calls[place] for place in places)) for s in segments]


def _sign(call: fx.Node) -> Any:
    """A key: calls with equal keys do the same on other tensors."""
    given = fx.node.map_arg((call.args, call.kwargs), lambda node: node.meta.get("val"))
    return call.target, form_of(given), form_of(call.meta.get("val"))


def _module_of(segment: Segment) -> fx.GraphModule:
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for index, node in enumerate(segment.inputs):
        made[node] = graph.placeholder(f"value_{index}")
    for call in segment.calls:
        made[call] = graph.node_copy(call, made.__getitem__)
    graph.output(tuple(made[node] for node in segment.outputs))
    return fx.GraphModule(torch.nn.Module(), graph)

"""Collects facts about a StepGraph for the tables and the drawing of `mtpc inspect`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from mtpc.capture.effects import Effects, analyse
from mtpc.capture.graph import StepGraph
from mtpc.layout import BufferSpec, Layout
from mtpc.layout.specs import is_buffer_name
from mtpc.weights.recipes import Grouped, Packed, names

_INDEXED = re.compile(r"^(\w+)\.(\d+)\.(.+)$")


def operations(graph: StepGraph) -> Iterator[tuple[str, str]]:
    """Yield the piece and the operator of every operation that `StepGraph.num_nodes` counts."""
    for node in graph.graph.nodes:
        inner = inner_graph(graph, node)
        if inner is not None:
            names = (operator_name(n) for n in inner.nodes if n.op.startswith("call_"))
            yield from ((piece_of(node), name) for name in names)
        elif node.op.startswith("call_"):
            yield piece_of(node), operator_name(node)


def position(graph: StepGraph) -> str:
    """The last pass that has run on the graph, as text."""
    return f"after {graph.history[-1].name}" if graph.history else "as traced, before any pass"


def weight_kinds(graph: StepGraph) -> list[tuple[str, int, int, int]]:
    """How the weights that a step reads are stored, the largest kind first.

    Each has its number of tensors, how many of them the checkpoint stores quantised, and bytes.
    """
    table, found = graph.weights, dict[str, list[tuple[bool, int]]]()
    held = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    for name in sorted(name for name in held if name in table and not is_buffer_name(name)):
        recipe, tensor = table.recipes.get(name, name), table[name]
        if isinstance(recipe, Grouped):
            kind, wide = str(recipe.spec), False
        else:
            packed = ", packed" if isinstance(recipe, Packed) else ""
            kind = f"{str(tensor.dtype).removeprefix('torch.')}{packed}"
            wide = any(table.spec(part) is not None for part in names(recipe))
        found.setdefault(kind, []).append((wide, tensor.nbytes))
    rows = (
        (kind, len(each), sum(wide for wide, _ in each), sum(nbytes for _, nbytes in each))
        for kind, each in found.items()
    )
    return sorted(rows, key=lambda row: -row[-1])


def inner_graph(graph: StepGraph, node: fx.Node) -> fx.Graph | None:
    """The graph of a node that calls a piece which is not inlined yet, else None."""
    if node.op != "call_module":
        return None
    piece = graph.module.get_submodule(str(node.target))
    return piece.graph if isinstance(piece, fx.GraphModule) else None


def piece_of(node: fx.Node) -> str:
    """The piece of the step that a node comes from; "step" for nodes that connect the pieces."""
    if node.op == "call_module":
        return str(node.target).removeprefix("pieces.")
    return node.meta.get("piece", "step")


def operator_name(node: fx.Node) -> str:
    """`aten.add`, `mtpc.paged_attention`, `getitem`, or "(not inlined)" for a piece's call."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket)
    if node.op == "call_module":
        return "(not inlined)"
    return getattr(node.target, "__name__", str(node.target))


def actor(node: fx.Node) -> str:
    """An operation and its piece, such as `aten.copy_ in step`."""
    name, piece = operator_name(node), piece_of(node)
    return f"{piece} {name}" if node.op == "call_module" else f"{name} in {piece}"


def accesses(
    graph: StepGraph, effects: Effects | None = None
) -> Iterator[tuple[fx.Node, set[str], set[str]]]:
    """Yield the operations that read or write buffers, and which, in order. Views do neither.

    An operation that writes a buffer also reads it only if it takes the buffer as two inputs.
    """
    effects = effects or analyse(graph.graph)
    for node in graph.graph.nodes:
        writes = set(effects.buffer_writes(node))
        schema = getattr(node.target, "_schema", None)
        has_result = schema is None or bool(schema.returns)
        is_view = has_result and not writes and node not in effects.roots[node]
        if node.op in ("get_attr", "output") or is_view:
            continue
        taken = [root for arg in node.all_input_nodes for root in effects.roots[arg]]
        reads = {r for r in taken if isinstance(r, str) and is_buffer_name(r)}
        reads = {name for name in reads if name not in writes or taken.count(name) > 1}
        if reads or writes:
            yield node, reads, writes


@dataclass(frozen=True)
class BufferGroup:
    """Buffers that differ only in their layer, under a label such as `kv.0-1.k`, with the first
    one's spec."""

    label: str
    names: tuple[str, ...]
    spec: BufferSpec

    def nbytes(self, layout: Layout) -> int:
        return sum(layout.nbytes(name) for name in self.names)


def buffer_groups(layout: Mapping[str, BufferSpec], names: Iterable[str]) -> list[BufferGroup]:
    """Group buffers such as `kv.0.k`, `kv.1.k` of one shape into `kv.0-1.k`.

    A buffer without a layer number forms a group alone.
    """
    grouped: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        spec, indexed = layout[name], _INDEXED.match(name)
        stem = (indexed[1], indexed[3]) if indexed else (name,)
        grouped.setdefault((stem, spec.dims, spec.dtype, spec.writers), []).append(name)
    return [
        BufferGroup(_group_label(group), tuple(group), layout[group[0]])
        for group in grouped.values()
    ]


def growth(layout: Layout, symbol: sympy.Symbol) -> int:
    """Bytes that the buffers shared by all buckets grow by if `symbol` grows by one."""
    larger = Layout(layout.values(), {**layout.sizes, symbol: layout.sizes[symbol] + 1})
    names = [name for name, spec in layout.items() if spec.shared]
    return sum(larger.nbytes(name) - layout.nbytes(name) for name in names)


def _group_label(names: list[str]) -> str:
    matches = [_INDEXED.match(name) for name in names]
    indexed = [match for match in matches if match]
    if len(indexed) < 2:
        return names[0]
    layers = number_ranges({int(match[2]) for match in indexed})
    return f"{indexed[0][1]}.{layers}.{indexed[0][3]}"


def number_ranges(numbers: set[int]) -> str:
    """`{0, 1, 2, 5}` -> `0-2,5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

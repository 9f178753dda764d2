"""Condenses a step graph for drawing: boxes in execution order, with their buffers and their data.

A box is a run of consecutive nodes of one piece. Inlining keeps the order of pieces, so each run is
one execution of a piece. The draft layer, for example, has one box for each draft step.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from math import prod

from torch import Tensor, fx

from mtpc.capture.effects import analyse
from mtpc.capture.graph import DRAFT_PIECES, StepGraph, dim_of
from mtpc.cli.anatomy import accesses, inner_graph, number_ranges, piece_of
from mtpc.cli.tables import format_bytes, format_shape
from mtpc.layout import Layout, dtype_name
from mtpc.layout.specs import is_buffer_name


@dataclass
class Box:
    """One execution of a piece.

    Attributes:
        band: "verify", "propose" or "advance".
        weights: names of the weights that the box uses.
        reads: buffers that the box reads; `writes`: that it writes.
        data: temporaries that an earlier box computes and this one uses: the index of that box, and
            a label.
    """

    piece: str
    band: str = "verify"
    title: str = ""
    num_nodes: int = 0
    weights: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    data: list[tuple[int, str]] = field(default_factory=list)

    def layers(self) -> str:
        """The cache layers that the box accesses, such as `0-46`, or an empty string."""
        caches = {name for name in self.reads | self.writes if name.startswith("kv.")}
        return number_ranges({int(name.split(".")[1]) for name in caches})


def condense(graph: StepGraph) -> list[Box]:
    """Condense a step graph to boxes in execution order."""
    effects = analyse(graph.graph)
    boxes: list[Box] = []
    box_of: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        if not node.op.startswith("call_"):
            continue
        box_of[node] = index = _box_index(node, boxes, box_of)
        inner = inner_graph(graph, node)
        inside = [node] if inner is None else [n for n in inner.nodes if n.op.startswith("call_")]
        boxes[index].num_nodes += len(inside)
        held = {str(n.target) for n in node.all_input_nodes if n.op == "get_attr"}
        boxes[index].weights |= {name for name in held if not is_buffer_name(name)}
    for node, reads, writes in accesses(graph, effects):
        boxes[box_of[node]].reads |= reads
        boxes[box_of[node]].writes |= writes
    _name_boxes(boxes)
    flowing: dict[tuple[int, int], dict[fx.Node, None]] = {}
    for node, target in box_of.items():
        for arg in node.all_input_nodes:
            source = box_of.get(arg, target)
            # A view of a buffer or weight counts as an access to it, not as data of the step.
            is_temporary = any(isinstance(root, fx.Node) for root in effects.roots[arg])
            if source != target and is_temporary:
                flowing.setdefault((source, target), {})[arg] = None
    for (source, target), nodes in sorted(flowing.items()):
        fakes = [node.meta.get("val") for node in nodes]
        label = _label([fake for fake in fakes if isinstance(fake, Tensor)], graph.layout)
        boxes[target].data.append((source, label))
    return boxes


def _box_index(node: fx.Node, boxes: list[Box], box_of: dict[fx.Node, int]) -> int:
    """The index of a node's box. Appends a new box if another piece begins with this node."""
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, fx.Node) and source in box_of:
        return box_of[source]
    piece = piece_of(node)
    if not boxes or boxes[-1].piece != piece or node.op == "call_module":
        boxes.append(Box(piece))
    return len(boxes) - 1


def _label(fakes: list[Tensor], layout: Layout) -> str:
    """Dtype and shape of the largest value, the number of others, and the bytes of all.

    Sizes that the step leaves open are those of its bucket.
    """
    values = []
    for fake in fakes:
        mode = getattr(fake, "fake_mode", None)
        shape = [layout.value(dim_of(mode, size)) for size in fake.shape]
        text = f"{dtype_name(fake.dtype)}{format_shape(shape)}"
        values.append((prod(shape) * fake.dtype.itemsize, text))
    if not values:
        return ""
    more = f" +{len(values) - 1}" if len(values) > 1 else ""
    largest, total = max(values, key=lambda value: value[0]), sum(size for size, _ in values)
    return f"{largest[1]}{more}, {format_bytes(total)}"


def _name_boxes(boxes: list[Box]) -> None:
    """Set titles and bands, from the order of the pieces and the buffers that they write."""
    proposing = [i for i, box in enumerate(boxes) if box.piece.startswith(DRAFT_PIECES)]
    picks = [i for i, box in enumerate(boxes) if box.piece == "pick"]
    accepted = next((i + 1 for i, box in enumerate(boxes) if box.piece == "accept"), len(boxes))
    first = proposing[0] if proposing else accepted
    last = max(picks, default=first - 1)
    draft = 0
    for index, box in enumerate(boxes):
        box.band = "verify" if index < first else "propose" if index <= last else "advance"
        if box.piece.startswith(DRAFT_PIECES):
            draft += 1
            layer = box.piece.partition(".")[2]
            box.title = f"draft {draft}: " + (f"MTP layer {layer}" if layer else "last MTP layer")
        elif box.piece == "pick":
            box.title = f"pick draft {draft}"
        elif box.piece == "step":
            box.title = "publish metadata" if box.writes else "select rows"
        else:
            box.title = box.piece.replace("_", " ").replace("target head", "head")

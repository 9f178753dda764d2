"""The drawing of `mtpc inspect --svg`: boxes in execution order, each between its buffers and data.

On the left of a box are the buffers that it reads and writes, on the right the temporaries that it
takes from earlier boxes, by their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from mtpc.capture.graph import StepGraph
from mtpc.cli.anatomy import buffer_groups
from mtpc.cli.flow import Box, condense
from mtpc.cli.tables import format_bytes, format_shape
from mtpc.layout import dtype_name

WIDTH, MARGIN, TITLE, HEADER, GAP, LINE = 1180, 24, 66, 32, 24, 17
NAME_X, SIZE_X, BOX_X, BOX_WIDTH, DATA_X, LABEL_X = 44, 424, 452, 290, 756, 886
SANS = "Inter, 'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"
MONO = "'JetBrains Mono', 'SF Mono', Consolas, 'DejaVu Sans Mono', monospace"
INK, FAINT = "#334155", "#64748b"
WITH_WEIGHTS, WITHOUT = ("#dbe8fd", "#1d4ed8"), ("#ffffff", FAINT)
BAND_COLOURS = {"verify": "#eef4fc", "propose": "#f4f0fb", "advance": "#eef7f0"}
KIND_COLOURS = {"state": "#a85b00", "batch": "#0b6b61", "kv": "#b3205e", "cross": INK}


def draw(graph: StepGraph, caption: str) -> str:
    """Draw one step, before, between or after passes, as an SVG document with a caption under the
    title."""
    boxes, y = condense(graph), TITLE
    style = {"xmlns": "http://www.w3.org/2000/svg", "font-family": SANS, "font-size": "11"}
    root = Element("svg", style)
    page = _add(root, "rect", width=WIDTH, fill="#ffffff")
    title = f"{graph.key}: {graph.num_nodes} nodes"
    _text(root, MARGIN, 32, title, font_size=19, font_weight=600)
    _text(root, MARGIN, 52, caption, font_size=12)
    for band, members in groupby(range(len(boxes)), key=lambda index: boxes[index].band):
        place = {"x": MARGIN, "y": y, "width": WIDTH - 2 * MARGIN, "rx": 10}
        area = _add(root, "rect", fill=BAND_COLOURS[band], **place)
        _text(root, NAME_X, y + 20, band.upper(), font_size=12, font_weight=600)
        top, y = y, y + HEADER
        for index in members:
            y = _draw_box(root, boxes, index, y, graph) + GAP
        area.set("height", str(y - top - GAP // 2))
    _draw_legend(root, y + 12)
    page.set("height", str(y + 50))
    root.set("width", str(WIDTH))
    root.set("height", str(y + 50))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _draw_box(root: Element, boxes: list[Box], index: int, y: int, graph: StepGraph) -> int:
    """Draw a box with what stands beside it, and return its lower end."""
    box = boxes[index]
    buffers = [*_buffers(box, graph)]
    height = 10 + LINE * max(2, len(buffers), len(box.data))
    fill, stroke = WITH_WEIGHTS if box.weights else WITHOUT
    place = {"x": BOX_X, "y": y, "width": BOX_WIDTH, "height": height, "rx": 4}
    _add(root, "rect", fill=fill, stroke=stroke, **place)
    middle, centre = BOX_X + BOX_WIDTH // 2, y + height // 2
    _text(root, BOX_X + 6, y + 14, str(index + 1), fill=FAINT)
    if index:
        _text(root, middle, y - 8, "↓", text_anchor="middle", fill=FAINT)
    _text(root, middle, centre - 4, box.title, text_anchor="middle", font_weight=600, font_size=13)
    _text(root, middle, centre + 12, ", ".join(_facts(box, graph)), text_anchor="middle")
    first = centre - LINE * len(buffers) // 2 - 5
    for line, (name, size, arrow) in enumerate(buffers, start=1):
        colour = KIND_COLOURS[name.split(".")[0]]
        _text(root, NAME_X, first + LINE * line, name, fill=colour, font_weight=600)
        _text(
            root, SIZE_X, first + LINE * line, size,
            font_family=MONO, font_size=10, text_anchor="end",
        )  # fmt: skip
        _text(root, SIZE_X + 8, first + LINE * line, arrow, fill=colour, font_size=13)
    first = centre - LINE * len(box.data) // 2 - 5
    for line, (source, label) in enumerate(box.data, start=1):
        taken = f"← {source + 1} {boxes[source].title.partition(':')[0]}"
        _text(root, DATA_X, first + LINE * line, taken, fill=FAINT)
        _text(root, LABEL_X, first + LINE * line, label, font_family=MONO, font_size=10)
    return y + height


def _buffers(box: Box, graph: StepGraph) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the size and an arrow for each group of buffers that a box accesses."""
    layout = graph.layout
    for arrow, names in (
        ("→", box.reads - box.writes),
        ("↔", box.reads & box.writes),
        ("←", box.writes - box.reads),
    ):
        for group in buffer_groups(layout, (name for name in layout if name in names)):
            shape = f"{dtype_name(group.spec.dtype)}{format_shape(layout.shape(group.names[0]))}"
            yield group.label, f"{shape} {format_bytes(group.nbytes(layout))}", arrow


def _facts(box: Box, graph: StepGraph) -> Iterator[str]:
    """Yield the numbers of a box's nodes, layers and weights."""
    yield _count(box.num_nodes, "node")
    if layers := box.layers():
        yield f"layer{'' if layers.isdigit() else 's'} {layers}"
    if box.weights:
        size = sum(graph.weights[name].nbytes for name in box.weights if name in graph.weights)
        yield f"{_count(len(box.weights), 'weight')}, {format_bytes(size)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _draw_legend(root: Element, y: int) -> None:
    kinds = ("state: one row per request", "batch: one set per bucket", "kv: pages of all requests")
    for place, text in enumerate(kinds):
        colour = KIND_COLOURS[text.partition(":")[0]]
        _text(root, NAME_X + 190 * place, y, text, fill=colour, font_weight=600)
    text = "Blue boxes have weights. Left: → a buffer is read, ← written, ↔ both. Right: data of "
    text += "earlier boxes; +n: n more tensors, and the bytes are of all."
    _text(root, NAME_X, y + 18, text)


def _text(root: Element, x: int, y: int, content: str, **style: str | int) -> None:
    _add(root, "text", **{"x": x, "y": y, "fill": INK, **style}).text = content


def _add(root: Element, tag: str, **attributes: str | int) -> Element:
    """Add a shape; `_` in the name of an attribute stands for a hyphen."""
    given = {name.replace("_", "-"): str(value) for name, value in attributes.items()}
    return ElementTree.SubElement(root, tag, given)

"""The drawing of `mtpc inspect --svg`: a column of boxes, buffers on the left, data on the right.

The boxes are in execution order. An arrow from a box to the next one shows data for that box. Data
for later boxes runs along a vertical line on the right (a lane), with an arrow to each of them (a
tap).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, groupby, pairwise
from typing import Literal

from mtpc.capture.graph import DRAFT_PIECES, StepGraph
from mtpc.cli.anatomy import buffer_groups
from mtpc.cli.flow import Box, DataEdge, Flow, condense
from mtpc.cli.svg import Canvas, Font, Heads, Rect
from mtpc.cli.tables import format_bytes, format_shape
from mtpc.layout import dtype_name

MARGIN, GAP, BAND_HEADER, BAND_PADDING = 24, 32, 34, 14
CARD_X, CARD_WIDTH, CARD_LINE, CARD_GAP = 44, 372, 17, 6
BOX_X, BOX_WIDTH, BOX_HEIGHT, TAP_HEIGHT = 484, 250, 36, 19
LANE_X, LANE_STEP = 1004, 16
TITLE_HEIGHT, LEGEND_HEIGHT, LEGEND_STEP = 66, 74, 204

INK, FAINT = "#334155", "#94a3b8"
BAND_COLOURS = {"verify": "#eef4fc", "propose": "#f4f0fb", "advance": "#eef7f0"}
CARD_COLOURS = {
    "state": ("#fff8e8", "#c2740a"),
    "batch": ("#e8faf6", "#0f8073"),
    "kv": ("#fdebf2", "#b3205e"),
    "cross": ("#eef0f4", "#475569"),
}
LANE_COLOURS = (
    *("#2563eb", "#15803d", "#b91c1c", "#7c3aed", "#c2410c"),
    *("#0e7490", "#a16207", "#be185d", "#4d7c0f", "#475569"),
)

Mode = Literal["read", "update", "write"]


@dataclass(frozen=True)
class Card:
    """Buffers of one kind (such as "kv") that a box accesses in the same way, with their sizes."""

    kind: str
    mode: Mode
    lines: tuple[tuple[str, str], ...]

    @property
    def height(self) -> float:
        return len(self.lines) * CARD_LINE + 8


@dataclass(frozen=True)
class Lane:
    """A vertical line for the data of box `source`, in column `track` from the left."""

    source: int
    edges: tuple[DataEdge, ...]
    track: int
    colour: str

    @property
    def x(self) -> float:
        return LANE_X + self.track * LANE_STEP


def draw(graph: StepGraph, caption: str) -> str:
    """Draw one step as an SVG document.

    Args:
        graph: the step, before, between or after passes.
        caption: a line of text under the title.
    """
    flow = condense(graph)
    cards = [list(_cards(box, graph)) for box in flow.boxes]
    lanes = _assign_lanes(flow)
    areas = _place(flow, cards, lanes)
    width = LANE_X + LANE_STEP * (1 + max((lane.track for lane in lanes), default=0)) + MARGIN
    canvas, bottom = Canvas(), areas[-1].bottom + BAND_PADDING
    page = Rect(0, 0, width, bottom + LEGEND_HEIGHT)
    canvas.rect(page, "#ffffff")
    title = f"{graph.key}: {graph.num_nodes} nodes"
    canvas.text(MARGIN, 32, title, Font(19, bold=True))
    canvas.text(MARGIN, 52, caption, Font(12, colour=INK))
    _draw_bands(canvas, flow, areas, width)
    _draw_spine(canvas, flow, areas)
    for lane in lanes:
        _draw_lane(canvas, lane, flow, areas)
    for box, area, stack in zip(flow.boxes, areas, cards, strict=True):
        _draw_box(canvas, box, area, graph)
        _draw_cards(canvas, stack, area)
    _draw_legend(canvas, bottom + 26)
    return canvas.document(page.width, page.height)


def _cards(box: Box, graph: StepGraph) -> Iterator[Card]:
    """Yield a card for each way of access and each kind of a box's buffers."""
    layout = graph.layout
    modes: tuple[tuple[Mode, set[str]], ...] = (
        ("read", box.reads - box.writes),
        ("update", box.reads & box.writes),
        ("write", box.writes - box.reads),
    )
    for mode, names in modes:
        in_order = [name for name in layout if name in names]
        for kind, group in groupby(in_order, key=lambda name: name.split(".")[0]):
            lines = []
            for buffers in buffer_groups(layout, group):
                shape = format_shape(layout.shape(buffers.names[0]))
                size = format_bytes(buffers.nbytes(layout))
                dtype = dtype_name(buffers.spec.dtype)
                lines.append((buffers.label, f"{dtype}{shape} {size}"))
            yield Card(kind, mode, tuple(lines))


def _assign_lanes(flow: Flow) -> list[Lane]:
    """Assign a lane to each box with data for a box after the next one.

    Short lanes get the leftmost free tracks.
    """
    by_source: dict[int, list[DataEdge]] = {}
    for edge in flow.edges:
        if edge.target > edge.source + 1:
            by_source.setdefault(edge.source, []).append(edge)
    spans = {source: max(e.target for e in edges) for source, edges in by_source.items()}
    colours = dict(zip(sorted(spans), cycle(LANE_COLOURS), strict=False))
    taken: list[list[tuple[int, int]]] = []
    lanes = []
    for source in sorted(spans, key=lambda s: (spans[s] - s, s)):
        span = (source, spans[source])
        free = (
            index
            for index, used in enumerate(taken)
            if all(span[1] < low or high < span[0] for low, high in used)
        )
        track = next(free, len(taken))
        if track == len(taken):
            taken.append([])
        taken[track].append(span)
        lanes.append(Lane(source, tuple(by_source[source]), track, colours[source]))
    return lanes


def _place(flow: Flow, cards: list[list[Card]], lanes: list[Lane]) -> list[Rect]:
    """The area of each box. Its height fits its cards on the left and its taps on the right."""
    ports = [0] * len(flow.boxes)
    for lane in lanes:
        ports[lane.source] += 1
        for edge in lane.edges:
            ports[edge.target] += 1
    areas: list[Rect] = []
    y: float = TITLE_HEIGHT
    for index, box in enumerate(flow.boxes):
        if index == 0 or box.band != flow.boxes[index - 1].band:
            y += BAND_HEADER
        stack = sum(card.height + CARD_GAP for card in cards[index]) - CARD_GAP
        height = max(BOX_HEIGHT, stack, ports[index] * TAP_HEIGHT + 10)
        areas.append(Rect(BOX_X, y, BOX_WIDTH, height))
        y += height + GAP
    return areas


def _draw_bands(canvas: Canvas, flow: Flow, areas: list[Rect], width: float) -> None:
    for band, members in groupby(range(len(flow.boxes)), key=lambda i: flow.boxes[i].band):
        indices = list(members)
        top = areas[indices[0]].y - BAND_HEADER + 6
        bottom = areas[indices[-1]].bottom + BAND_PADDING
        area = Rect(MARGIN, top, width - 2 * MARGIN, bottom - top)
        canvas.rect(area, BAND_COLOURS[band], radius=10)
        canvas.text(CARD_X, top + 20, band.upper(), Font(12, colour=INK, bold=True))


def _draw_spine(canvas: Canvas, flow: Flow, areas: list[Rect]) -> None:
    """Connect each box to the next: an arrow if data flows, else a dashed line for the order."""
    labels = {e.source: e.label for e in flow.edges if e.target == e.source + 1}
    for index, (above, below) in enumerate(pairwise(areas)):
        x, has_data = above.middle[0], index in labels
        ends = [(x, above.bottom), (x, below.y)]
        canvas.path(ends, INK if has_data else FAINT, "end" if has_data else "none", not has_data)
        if has_data:
            font = Font(10.5, colour=INK, mono=True)
            canvas.text(x + 9, above.bottom + GAP / 2 + 4, labels[index], font)


def _draw_lane(canvas: Canvas, lane: Lane, flow: Flow, areas: list[Rect]) -> None:
    start = areas[lane.source].bottom - TAP_HEIGHT / 2
    taps = [(edge, _tap_y(edge, flow, areas)) for edge in lane.edges]
    last = max(y for _, y in taps)
    right = areas[lane.source].right
    canvas.path([(right, start), (lane.x, start), (lane.x, last)], lane.colour)
    canvas.dot(right, start, lane.colour)
    for edge, y in taps:
        canvas.path([(lane.x, y), (areas[edge.target].right + 1, y)], lane.colour, "end")
        text = ": ".join(filter(None, (flow.boxes[lane.source].title.split(":")[0], edge.label)))
        font = Font(10.5, colour=lane.colour, mono=True)
        canvas.text(areas[edge.target].right + 12, y - 4, text, font)


def _tap_y(edge: DataEdge, flow: Flow, areas: list[Rect]) -> float:
    """The height of an edge's tap. A box's taps stand below each other, in the order of sources."""
    sources = [e.source for e in flow.edges if e.target == edge.target and e.source + 1 < e.target]
    return areas[edge.target].y + TAP_HEIGHT * (sources.index(edge.source) + 0.85)


def _draw_box(canvas: Canvas, box: Box, area: Rect, graph: StepGraph) -> None:
    is_model = box.piece == "target" or box.piece.startswith(DRAFT_PIECES)
    has_weights = is_model or box.piece.endswith(("head", "heads"))
    fill, stroke = ("#dbe8fd", "#1d4ed8") if has_weights else ("#ffffff", "#64748b")
    canvas.rect(area, fill, stroke, radius=4)
    lines = [_count(box.num_nodes, "node")]
    if box.layers():
        lines.append(
            f"layer {box.layers()}" if box.layers().isdigit() else f"layers {box.layers()}"
        )
    if box.weights:
        size = sum(graph.weights[name].nbytes for name in box.weights if name in graph.weights)
        lines.append(f"{_count(len(box.weights), 'weight')}, {format_bytes(size)}")
    x, y = area.middle
    if area.height < BOX_HEIGHT + 16 * len(lines):
        canvas.text(area.x + 12, y + 4, box.title, Font(13, bold=True))
        font = Font(11, colour=INK, anchor="end")
        canvas.text(area.right - 12, y + 4, ", ".join(lines), font)
        return
    top = y - 8 * len(lines) + 4
    canvas.text(x, top, box.title, Font(14 if is_model else 13, bold=True, anchor="middle"))
    for index, line in enumerate(lines):
        canvas.text(x, top + 17 + 16 * index, line, Font(11, colour=INK, anchor="middle"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _draw_cards(canvas: Canvas, cards: list[Card], area: Rect) -> None:
    """Draw the cards on the left of a box, vertically centred, each with its arrow."""
    stack = sum(card.height + CARD_GAP for card in cards) - CARD_GAP
    y = area.middle[1] - stack / 2
    for card in cards:
        place = Rect(CARD_X, y, CARD_WIDTH, card.height)
        _draw_card(canvas, card, place)
        ends = [(place.right + 2, place.middle[1]), (area.x - 2, place.middle[1])]
        if card.mode == "write":
            ends.reverse()
        heads: Heads = "both" if card.mode == "update" else "end"
        canvas.path(ends, CARD_COLOURS[card.kind][1], heads)
        y += card.height + CARD_GAP


def _draw_card(canvas: Canvas, card: Card, area: Rect) -> None:
    fill, stroke = CARD_COLOURS[card.kind]
    canvas.rect(area, fill, stroke, radius=min(12, area.height / 2))
    for index, (label, size) in enumerate(card.lines):
        y = area.y + CARD_LINE * (index + 1) - 1
        canvas.text(area.x + 12, y, label, Font(11, colour=stroke, bold=True))
        font = Font(10, colour=INK, mono=True, anchor="end")
        canvas.text(area.right - 12, y, size, font)


def _draw_legend(canvas: Canvas, y: float) -> None:
    keys = (
        (4, "#dbe8fd", "#1d4ed8", "piece with weights"),
        (4, "#ffffff", "#64748b", "piece without weights"),
        (8, *CARD_COLOURS["state"], "state: one row per request"),
        (8, *CARD_COLOURS["batch"], "batch: one set per bucket"),
        (8, *CARD_COLOURS["kv"], "kv: pages of all requests"),
    )
    notes = Font(11, colour=INK)
    for index, (radius, fill, stroke, text) in enumerate(keys):
        x = CARD_X + LEGEND_STEP * index
        canvas.rect(Rect(x, y, 28, 16), fill, stroke, radius)
        canvas.text(x + 36, y + 12, text, notes)
    text = (
        "Arrows: buffers read, written, or both. Data for the next piece goes straight down; data "
        "for later pieces takes a lane on the right. +n: n more tensors; the bytes are of all."
    )
    canvas.text(CARD_X, y + 36, text, notes)

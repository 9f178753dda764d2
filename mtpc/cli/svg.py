"""A small SVG writer: collects shapes, and writes one well-formed document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

Anchor = Literal["start", "middle", "end"]
Heads = Literal["none", "end", "both"]

SANS = "Inter, 'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"
MONO = "'JetBrains Mono', 'SF Mono', Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True)
class Rect:
    """An axis-parallel rectangle."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


@dataclass(frozen=True)
class Font:
    """The style of a text."""

    size: float = 12
    colour: str = "#1e293b"
    bold: bool = False
    mono: bool = False
    anchor: Anchor = "start"


class Canvas:
    """Collects shapes. A later shape covers an earlier one."""

    def __init__(self) -> None:
        self._root = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg")
        self._definitions = ElementTree.SubElement(self._root, "defs")
        self._arrowheads: set[str] = set()

    def rect(self, area: Rect, fill: str, stroke: str = "none", radius: float = 0) -> None:
        """Add a filled rectangle, with corners rounded by `radius`."""
        self._add("rect", rx=radius, fill=fill, stroke=stroke, **vars(area))

    def text(self, x: float, y: float, content: str, font: Font) -> None:
        """Add one line of text, on the baseline `y`."""
        element = self._add("text", x=x, y=y, fill=font.colour)
        element.set("font-family", MONO if font.mono else SANS)
        element.set("font-size", _number(font.size))
        element.set("font-weight", "600" if font.bold else "400")
        element.set("text-anchor", font.anchor)
        element.text = content

    def path(
        self,
        points: list[tuple[float, float]],
        colour: str,
        heads: Heads = "none",
        dashed: bool = False,
    ) -> None:
        """Add straight lines through points, with arrowheads at no end, the last or both."""
        steps = " L ".join(f"{_number(x)} {_number(y)}" for x, y in points)
        element = self._add("path", d=f"M {steps}", fill="none", stroke=colour)
        element.set("stroke-width", "1.4")
        element.set("stroke-linejoin", "round")
        if dashed:
            element.set("stroke-dasharray", "3 4")
        if heads != "none":
            element.set("marker-end", f"url(#{self._arrowhead(colour)})")
        if heads == "both":
            element.set("marker-start", f"url(#{self._arrowhead(colour)})")

    def dot(self, x: float, y: float, colour: str) -> None:
        """Add a small filled circle."""
        self._add("circle", cx=x, cy=y, r=3, fill=colour)

    def document(self, width: float, height: float) -> str:
        """The SVG text of all shapes so far."""
        self._root.set("width", _number(width))
        self._root.set("height", _number(height))
        self._root.set("viewBox", f"0 0 {_number(width)} {_number(height)}")
        ElementTree.indent(self._root)
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def _add(self, tag: str, **attributes: str | float) -> ElementTree.Element:
        strings = {k: v if isinstance(v, str) else _number(v) for k, v in attributes.items()}
        return ElementTree.SubElement(self._root, tag, strings)

    def _arrowhead(self, colour: str) -> str:
        """The id of an arrowhead of this colour. It is defined at the first use."""
        name = f"arrow-{colour.removeprefix('#')}"
        if name not in self._arrowheads:
            self._arrowheads.add(name)
            marker = ElementTree.fromstring(
                f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" '
                'markerHeight="6" orient="auto-start-reverse">'
                f'<path d="M 0 1 L 10 5 L 0 9 z" fill="{colour}"/></marker>'
            )
            self._definitions.append(marker)
        return name


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")

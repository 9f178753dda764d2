"""The names of what layers own, and how they repeat."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class LayerPattern:
    """A decoder whose layers repeat.

    Attributes:
        prefix: of the layers' weights, up to their number: "model.layers.".
        first: the layer with which the pattern begins.
        period: layers after which it repeats.
        traced: how many of the first layers are traced.
        total: how many layers there are.
        caches: see `ModelFamily.caches_per_layer`.
        stored_alike: whether layers are also stored in the same forms. If not, they are copied
            before weights are packed.
    """

    prefix: str
    first: int
    period: int
    traced: int
    total: int
    caches: int
    stored_alike: bool = True

    @property
    def copies(self) -> int:
        """How often a period is copied."""
        return (self.total - self.traced) // self.period

    def shifted(self, name: str, layers: int) -> str:
        """The name of a weight or of state, of so many layers later; other names stay."""
        for prefix, end, numbers in (
            (self.prefix, ".", 1),
            (self.prefix.replace(".", "_"), "_", 1),  # In names of derived weights.
            ("kv.", ".", self.caches),
        ):
            start = r"(?<![a-zA-Z0-9_])" if end == "_" else "^"
            pattern = rf"{start}({re.escape(prefix)})(\d+)(?={re.escape(end)})"
            name = re.sub(pattern, partial(self._later, layers, numbers), name)
        return name

    def _later(self, layers: int, numbers: int, match: re.Match[str]) -> str:
        """A number moved on, of which each layer has so many."""
        number = int(match[2])
        is_traced = number < self.traced * numbers
        return f"{match[1]}{number + layers * numbers if is_traced else number}"

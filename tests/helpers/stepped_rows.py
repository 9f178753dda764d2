"""A model's pieces stepped by hand on poisoned state, row by row against rows that are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mtpc.layout import Layout
from mtpc.step.metadata import flat_metadata
from mtpc.step.records import Metadata

SLOTS, DRAFTS = 4, 3


def poisoned(layout: Layout) -> dict[str, Tensor]:
    """State of a model, in which a value that no step has written shows."""
    pools = {name: layout.allocate(name) for name in layout if name.startswith("kv.")}
    for pool in pools.values():
        pool.fill_(math.nan if pool.is_floating_point() else 2**30)
    return pools


@dataclass
class SteppedRows:
    """Two requests, in slots 2 and 3; the one between them is off.

    Attributes:
        target: (ids [T], *metadata) -> features [T, ...], over poisoned state.
        draft: (ids [T], features, *metadata) -> features, of an MTP layer.
        texts: int64 [2, L].
        expected: what the target gives in the rows of each text.
        drafted: what the MTP layer gives there, without the last row.
        generator: draws tokens that are rejected, and how many.
        page: positions of a page.
        tolerance: of rows, relative and absolute.
    """

    target: Any
    draft: Any
    texts: Tensor
    expected: Sequence[Tensor]
    drafted: Sequence[Tensor]
    generator: torch.Generator
    page: int
    tolerance: float
    lens: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.int32))

    @staticmethod
    def blocks(length: int, page: int) -> int:
        """Pages of a text of `length` tokens, and of the drafts after it."""
        return -(-(length + DRAFTS) // page)

    def step(self, counts: list[int], right: list[int]) -> None:
        """Run `counts` rows of each text, the first `right` of them its own; compare those."""
        begins = [int(self.lens[0]), int(self.lens[2])]
        ids, nexts = [], []
        for text, begin, count, own in zip(self.texts, begins, counts, right, strict=True):
            wrong = torch.randint(2, 96, (count - own,), generator=self.generator)
            ids.append(torch.cat([text[begin : begin + own], wrong]))
            nexts.append(torch.cat([text[begin + 1 : begin + own + 1], wrong]))
        metadata = self._metadata([counts[0], 0, counts[1]])
        features = self.target(torch.cat([*ids, torch.tensor([0])]), *metadata)
        out = self.draft(torch.cat([*nexts, torch.tensor([0])]), features, *metadata)
        assert torch.isfinite(features).all()
        assert torch.isfinite(out).all()
        close = {"rtol": self.tolerance, "atol": self.tolerance}
        for i, (begin, own, start) in enumerate(zip(begins, right, [0, counts[0]], strict=True)):
            rows, at = slice(start, start + own), slice(begin, begin + own)
            torch.testing.assert_close(features[rows], self.expected[i][at], **close)
            torch.testing.assert_close(out[rows], self.drafted[i][at], **close)
        self.lens += torch.tensor([right[0], 0, right[1]])

    def verify_the_rest(self) -> None:
        """Steps of which drafts are rejected, to the end of the texts."""
        while int(self.lens.max()) < self.texts.shape[1] - DRAFTS - 2:
            right = torch.randint(0, DRAFTS + 1, (2,), generator=self.generator) + 1
            self.step([DRAFTS + 1] * 2, right.tolist())

    def _metadata(self, counts: list[int]) -> Metadata:
        """Of `counts` rows a request, and one padded row."""
        blocks = self.blocks(self.texts.shape[1], self.page)
        table = (torch.arange(3 * blocks) + 1).view(3, blocks).int()
        slots, starts = torch.tensor([2, 0, 3]), torch.tensor([0, *counts]).cumsum(0).int()
        tokens = int(starts[-1]) + 1
        rows = flat_metadata(self.lens, slots != 0, table, starts, tokens, self.page)
        certain = torch.tensor(counts if max(counts) > DRAFTS + 1 else [1, 0, 1]).int()
        return Metadata(*rows, starts, table, slots, certain)

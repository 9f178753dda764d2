"""A layer of a recurrence with its state, for the kernel tests of every backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mtpc.layout import SCRATCH_SLOT

KEY_HEADS, HEADS, KEY, VALUE, WIDTH = 2, 4, 8, 12, 4
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE
DRAFTS, SLOTS = 4, 5
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Rule:
    """A recurrence: its operator, the shapes of its weights, its inputs per row and its options."""

    name: str
    weights: tuple[tuple[int, ...], ...]
    inputs: int
    options: tuple[int, ...] = ()


DELTA = Rule("gated_delta_rule", ((CHANNELS, WIDTH), (HEADS,), (HEADS,)), CHANNELS + 2 * HEADS)
NARROW = Rule(
    "gated_delta_rule", ((2 * KEY + 2 * VALUE, WIDTH), (2,), (2,)), 2 * KEY + 2 * VALUE + 4
)
"""With one key head and two value heads, for many rows."""
MAMBA = Rule(
    "mamba2_scan",
    ((CHANNELS, WIDTH), (CHANNELS,), (HEADS,), (HEADS,), (HEADS,)),
    CHANNELS + HEADS,
    (KEY_HEADS,),
)
"""As many groups as the other has key heads."""


@dataclass
class Layer:
    """Weights of one layer, and the state of all request slots: NaN or invalid until written."""

    ops: Any
    dtype: torch.dtype = torch.float64
    rule: Rule = DELTA
    weights: tuple[Tensor, ...] = field(init=False)
    state: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.weights = tuple(
            torch.randn(shape, generator=generator).to(self.dtype) for shape in self.rule.weights
        )
        wide = torch.promote_types(self.dtype, torch.float32)
        kept = (SLOTS, DRAFTS + WIDTH - 1, self.rule.inputs)
        self.state = (
            torch.full((SLOTS, *self.rule.weights[-1], KEY, VALUE), torch.nan, dtype=wide),
            torch.full(kept, torch.nan, dtype=self.dtype),
            torch.full((SLOTS,), 2**30, dtype=torch.int32),
        )

    def run(
        self,
        rows: Sequence[Tensor],
        slots: Sequence[int],
        lens: Sequence[int],
        certain: Sequence[int],
        padding: int = 0,
    ) -> list[Tensor]:
        """Run a step of ragged requests with committed `lens`; returns the outputs of each."""
        counts = [len(r) for r in rows]
        on = torch.tensor([slot != SCRATCH_SLOT for slot in slots])
        seq_lens = torch.tensor([a + b for a, b in zip(lens, counts, strict=True)])
        given = torch.cat([*rows, torch.full((padding, CHANNELS + 2 * HEADS), torch.nan)])
        out = getattr(self.ops, self.rule.name)(
            given[:, : self.rule.inputs].to(self.dtype),
            *self.weights,
            *self.state,
            torch.tensor(slots),
            torch.where(on, seq_lens, 0).int(),
            torch.tensor([0, *counts]).cumsum(0).int(),
            torch.tensor(certain, dtype=torch.int32),
            *self.rule.options,
        )
        assert not out[sum(counts) :].any()
        return list(out[: sum(counts)].split(counts))


def make_rows(count: int, seed: int = 0) -> Tensor:
    """Random inputs of `count` positions."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, CHANNELS + 2 * HEADS, generator=generator, dtype=torch.float64)


def plain(layer: Layer, rows: Tensor) -> Tensor:
    """Run all positions at once, all certain, in request slot 4."""
    return layer.run([rows], [4], [0], [len(rows)])[0]


def close(found: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def two_steps(ops: Any, dtype: torch.dtype, rule: Rule = DELTA) -> tuple[list[Tensor], Layer]:
    """A prefill of three requests, one longer than the kept inputs, then two verify steps."""
    layer = Layer(ops, dtype, rule)
    first = [make_rows(11, seed=1), make_rows(1, seed=2), make_rows(4, seed=3)]
    found = layer.run(first, [4, 1, 2], [0, 0, 0], [11, 1, 4])
    second = [make_rows(5, seed=4), make_rows(4, seed=5), make_rows(5, seed=6)]
    found += layer.run(second, [1, 4, 2], [1, 11, 4], [1, 1, 1])
    third = [make_rows(2, seed=7), make_rows(5, seed=8), make_rows(3, seed=9)]
    return [*found, *layer.run(third, [2, 1, 4], [7, 6, 12], [1, 1, 1], padding=1)], layer

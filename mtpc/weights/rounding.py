"""Rounding numbers to a grid of codes: scales of least squared error, and error feedback.

Weights are [group, M]: the members of a group come first, so that sums over a group add whole rows.
The error of a group is sum(importance * (number * scale - weight)^2). Given the numbers, the
best scale is sum(i * n * w) / sum(i * n^2), and the error follows from the same two sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mtpc.weights.grouped import BITS, VALUES, Kind

_DAMPING = 0.01
"""Added to the second moments, as a share of their mean: inputs that a text hardly shows are not
free to take all errors."""
_MOST_PAIRED = 1024
_TRIED = 12 << 14
"""Numbers that are tried at once: a few such tensors fit into a processor's caches."""
_COLUMNS = 4
"""Inputs whose errors reach each other one by one."""


@dataclass(frozen=True)
class Sensitivity:
    """What errors of a weight [N, K] cost, in nats a token: scale / 2 * e^T moments e, of errors e
    of a row, on average over the rows.

    Attributes:
        moments: of blocks of the inputs, float32 [K / B, B, B].
        scale: as above.
    """

    moments: Tensor
    scale: float


@dataclass(frozen=True)
class Grid:
    """The numbers that codes of a kind stand for.

    Attributes:
        kind: of the codes, with symmetric scales.
    """

    kind: Kind

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest number."""
        if self.kind == "float8":
            limits = torch.finfo(torch.float8_e4m3fn)
            return limits.min, limits.max
        if self.kind in VALUES:
            return min(VALUES[self.kind]), max(VALUES[self.kind])
        half = 1 << BITS[self.kind] - 1
        return -half, half - 1

    @cached_property
    def factors(self) -> tuple[float, ...]:
        """Scales to try, in units of: a group's largest magnitude / the highest number.

        Numbers that are not spread alike on both sides of zero are tried on either side.
        """
        if self.kind in VALUES:
            low, high = self.ends
            return tuple(f * s for s in (1, high / low) for f in _spread(0.88, 1.06, 4))
        of = {"int4": (0.66, 1.1, 12), "int5": (0.8, 1.1, 7), "int8": (0.85, 1.0, 5)}
        return _spread(*of[self.kind]) if self.kind in of else ()

    @cached_property
    def _table(self) -> Tensor:
        """The nearest number of each half step from the lowest on."""
        numbers, (low, high) = torch.tensor(VALUES[self.kind]).sort()[0].float(), self.ends
        steps = low + (torch.arange(int(2 * (high - low)) + 1) + 0.5) / 2
        return numbers[torch.bucketize(steps, (numbers[1:] + numbers[:-1]) / 2)]

    @cached_property
    def _code_table(self) -> Tensor:
        values = torch.tensor(VALUES[self.kind])
        table = torch.zeros(int(values.max() - values.min()) + 1, dtype=torch.uint8)
        table[values - values.min()] = torch.arange(len(values), dtype=torch.uint8)
        return table

    def nearest(self, weights: Tensor, inverse: Tensor) -> Tensor:
        """The numbers nearest to weights * inverse, float32."""
        low, high = self.ends
        scaled = (weights * inverse).clamp_(low, high)
        if self.kind == "float8":
            return scaled.to(torch.float8_e4m3fn).float()
        if self.kind not in VALUES:
            return scaled.round_()
        table = self._table.to(weights.device)
        index = scaled.sub_(low).mul_(2).to(torch.int32).clamp_(0, len(table) - 1)  # NaN is 0.
        return table.index_select(0, index.flatten()).view(index.shape)

    def codes(self, numbers: Tensor) -> Tensor:
        """Codes of numbers of the grid: uint8, or float8_e4m3fn."""
        if self.kind == "float8":
            return numbers.to(torch.float8_e4m3fn)
        index = numbers - self.ends[0]
        if self.kind not in VALUES:
            return index.to(torch.uint8)
        table = self._code_table.to(numbers.device)
        return table.index_select(0, index.to(torch.int32).flatten()).view(numbers.shape)


def _spread(first: float, last: float, count: int) -> tuple[float, ...]:
    return tuple(first + (last - first) * i / (count - 1) for i in range(count))


def inverse_of(scales: Tensor) -> Tensor:
    """1 / scale; 0 for 0."""
    return torch.where(scales == 0, 0.0, 1 / scales)


def best_scales(
    weights: Tensor, importance: Tensor | None, grid: Grid, dtype: torch.dtype, by_largest: bool
) -> Tensor:
    """Scales of least squared error among those tried, as rounded to their dtype.

    Args:
        weights: [group, M], float32.
        importance: of each squared error, of this shape; None where all count alike.
        grid: of the codes.
        dtype: of the scales.
        by_largest: take the scale that maps the largest magnitude to the highest number.

    Returns:
        [M]; 0 for groups of zeros.
    """
    largest = weights.abs().amax(0)
    if grid.kind in VALUES:  # Its sign counts.
        largest = torch.where(weights.amax(0) == largest, largest, -largest)
    whole = largest / grid.ends[1]
    best, most = whole.to(dtype), torch.full_like(whole, -torch.inf)
    if by_largest or not grid.factors:
        return best
    factors = torch.tensor(grid.factors, device=weights.device)[:, None]
    weights = weights[:, None]
    if importance is not None:
        importance = importance[:, None]
    for some in factors.split(max(1, _TRIED // max(weights.numel(), 1))):
        inverse = inverse_of((whole * some).to(dtype).float())
        products, squares = _sum(_terms(weights, importance, grid.nearest(weights, inverse)))
        fitted = torch.where(squares == 0, 0.0, products / squares).to(dtype)
        wide = fitted.float()
        gain, at = (wide * (2 * products - wide * squares)).max(0)
        best = torch.where(gain > most, fitted.gather(0, at[None])[0], best)
        most = torch.maximum(gain, most)
    return best


def _terms(weights: Tensor, importance: Tensor | None, numbers: Tensor) -> Tensor:
    """i * n * w and i * n^2 of numbers [group, tried, M]: [group, 2, tried, M]."""
    terms = numbers.new_empty(len(numbers), 2, *numbers.shape[1:])
    products, squares = terms.unbind(1)
    torch.mul(numbers, numbers, out=squares)
    if importance is not None:
        squares *= importance
        weights = weights * importance
    torch.mul(numbers, weights, out=products)
    return terms


def _sum(terms: Tensor) -> Tensor:
    """The sum over the first dimension, in place, in an order that depends on its size alone.

    So a rank that rounds some rows of a weight finds the scales of the whole; `torch.sum` adds in
    another order where there are fewer columns.
    """
    while len(terms) > 1:
        half = (len(terms) + 1) // 2
        terms[: len(terms) - half] += terms[half:]
        terms = terms[:half]
    return terms[0]


def moments_width(inputs: int) -> int:
    """Inputs of which second moments are kept pair by pair: a divisor of all, and few enough that
    memory and time grow with the inputs, not with their square or cube."""
    return max(width for width in range(1, min(inputs, _MOST_PAIRED) + 1) if inputs % width == 0)


def root_of(moments: Tensor) -> Tensor:
    """Upper triangular R [K / B, B, B] with R R^T = moments, after damping.

    R[j, j]^2 is what an error of input j's weight counts when later weights have made up for it.

    Args:
        moments: second moments of blocks of inputs, float32 [K / B, B, B].
    """
    moments = moments.clone()
    diagonal = moments.diagonal(dim1=1, dim2=2)
    diagonal[diagonal == 0] = 1  # An input that is always 0: its weight may be anything.
    diagonal += _DAMPING * diagonal.mean()
    return torch.linalg.cholesky(moments.flip(1, 2)).flip(1, 2)


def feedback(moments: Tensor) -> Tensor:
    """How the error of an input's weight is made up for by the weights of later inputs: upper
    triangular U [K / B, B, B] with U^T U = moments^-1, after damping."""
    root = root_of(moments)
    return torch.linalg.solve_triangular(root, torch.eye(root.shape[-1]), upper=True)


def round_with_feedback(weight: Tensor, scales: Tensor, grid: Grid, upper: Tensor) -> Tensor:
    """Numbers of rows whose scales are given; errors go on to the inputs that are still to come.

    This is the order of GPTQ (Frantar and others, 2023), without sorting inputs.

    Args:
        weight: [N, K], float32.
        scales: [N, K / group].
        grid: of the codes.
        upper: [K / B, B, B] of `feedback`. All blocks go forward together.

    Returns:
        Numbers, float32 [K, N].
    """
    blocks, width, _ = upper.shape
    inputs = torch.arange(weight.shape[1]).view(blocks, width)
    steps = scales.float().t().contiguous()
    rest = weight.t().contiguous().view(blocks, width, -1)
    _Rounding(
        grid,
        rest,
        torch.empty_like(rest),
        upper / upper.diagonal(dim1=1, dim2=2)[..., None],
        steps,
        inverse_of(steps),
        (inputs // (weight.shape[1] // len(steps))).unbind(1),
    ).run(0, width)
    return rest.flatten(0, 1)


@dataclass(frozen=True)
class _Rounding:
    """Rounding of rows input by input. Halves of the inputs follow each other, and halves of these:
    so most errors reach later inputs by products of large matrices.

    Attributes:
        grid: of the codes.
        rest: weights [blocks, B, N], of which those that are rounded become numbers.
        errors: of those that are rounded, [blocks, B, N].
        shares: [blocks, B, B], what a later input takes of an error.
        steps: scales [groups, N].
        inverse: 1 / scale.
        groups: of each input, int64 [blocks].
    """

    grid: Grid
    rest: Tensor
    errors: Tensor
    shares: Tensor
    steps: Tensor
    inverse: Tensor
    groups: Sequence[Tensor]

    @cached_property
    def inputs(self) -> Sequence[Tensor]:
        """`rest` of each input, [blocks, N]."""
        return self.rest.unbind(1)

    def run(self, start: int, stop: int) -> None:
        """Round the inputs [start, stop) of each block."""
        if stop - start <= _COLUMNS:
            for at in range(start, stop):
                self._round(at, stop)
            return
        middle = (start + stop) // 2
        self.run(start, middle)
        shares = self.shares[:, start:middle, middle:stop].transpose(1, 2)
        self.rest[:, middle:stop].baddbmm_(shares, self.errors[:, start:middle], alpha=-1)
        self.run(middle, stop)

    def _round(self, at: int, stop: int) -> None:
        """Round one input of each block; its errors reach those before `stop`."""
        now, group = self.inputs[at], self.groups[at]
        numbers = self.grid.nearest(now, self.inverse.index_select(0, group))
        step = self.steps.index_select(0, group)
        torch.addcmul(now, numbers, step, value=-1, out=self.errors[:, at])
        now.copy_(numbers)
        shares, error = self.shares[:, at, at + 1 : stop, None], self.errors[:, at : at + 1]
        self.rest[:, at + 1 : stop].addcmul_(shares, error, value=-1)

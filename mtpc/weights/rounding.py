"""Rounding numbers to a grid of codes: scales of least squared error, and error feedback.

Weights are [group, ...]: the members of a group come first, so that sums over a group add whole
rows. The error of a group is sum(importance * (number * scale - weight)^2). Given the numbers, the
best scale is sum(i * n * w) / sum(i * n^2), and the error follows from the same two sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mtpc.weights.grouped import BITS, VALUES, Kind

_DAMPING = 0.01
"""Added to the second moments, as a share of their mean: inputs that a text hardly shows are not
free to take all errors."""
_MOST_PAIRED = 1024
_COLUMNS = 64
"""Inputs that are rounded before their errors reach all later ones."""


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
            return tuple(f * s for s in (1, high / low) for f in _spread(0.76, 1.06, 6))
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
        return table.index_select(0, index.flatten()).view(weights.shape)

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
        weights: [group, ...], float32.
        importance: of each squared error, broadcast; None where all count alike.
        grid: of the codes.
        dtype: of the scales.
        by_largest: take the scale that maps the largest magnitude to the highest number.

    Returns:
        [...]; 0 for groups of zeros.
    """
    largest = weights.abs().amax(0)
    if grid.kind in VALUES:  # Its sign counts.
        largest = torch.where(weights.amax(0) == largest, largest, -largest)
    whole = largest / grid.ends[1]
    best, most = whole.to(dtype), torch.full_like(whole, -torch.inf)
    for factor in () if by_largest else grid.factors:
        numbers = grid.nearest(weights, inverse_of((whole * factor).to(dtype).float()))
        counted = numbers if importance is None else numbers * importance
        squares, products = _sum(numbers * counted), _sum(counted * weights)
        fitted = torch.where(squares == 0, 0.0, products / squares).to(dtype)
        wide = fitted.float()
        gain = wide * (2 * products - wide * squares)
        best, most = torch.where(gain > most, fitted, best), torch.maximum(gain, most)
    return best


def _sum(terms: Tensor) -> Tensor:
    """The sum over the first dimension, in an order that depends on its size alone.

    So a rank that rounds some rows of a weight finds the scales of the whole; `torch.sum` adds in
    another order where there are fewer columns.
    """
    while len(terms) > 1:
        half = len(terms) // 2
        pairs, odd = terms[:half] + terms[half : 2 * half], terms[2 * half :]
        terms = torch.cat((pairs, odd)) if len(odd) else pairs
    return terms[0]


def moments_width(inputs: int) -> int:
    """Inputs of which second moments are kept pair by pair: a divisor of all, and few enough that
    memory and time grow with the inputs, not with their square or cube."""
    return max(width for width in range(1, min(inputs, _MOST_PAIRED) + 1) if inputs % width == 0)


def feedback(moments: Tensor) -> Tensor:
    """How the error of an input's weight is made up for by the weights of later inputs.

    Args:
        moments: second moments of blocks of inputs, float32 [K / B, B, B].

    Returns:
        Upper triangular [K / B, B, B] U with U^T U = moments^-1, after damping.
    """
    moments = moments.clone()
    diagonal = moments.diagonal(dim1=1, dim2=2)
    diagonal[diagonal == 0] = 1  # An input that is always 0: its weight may be anything.
    diagonal += _DAMPING * diagonal.mean()
    root = torch.linalg.cholesky(moments.flip(1, 2)).flip(1, 2)  # Upper: root root^T = moments.
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
        Numbers, float32 [N, K].
    """
    blocks, width, _ = upper.shape
    rest = weight.t().contiguous().view(blocks, width, -1)
    steps = scales.float().t().repeat_interleave(weight.shape[1] // scales.shape[1], 0)
    steps = steps.view(rest.shape)
    numbers = torch.empty_like(rest)
    for start in range(0, width, _COLUMNS):
        stop = min(start + _COLUMNS, width)
        errors = torch.empty_like(rest[:, start:stop])
        for at in range(start, stop):
            step = steps[:, at]
            row = numbers[:, at] = grid.nearest(rest[:, at], inverse_of(step))
            error = (rest[:, at] - row * step) / upper[:, at, at, None]
            errors[:, at - start] = error
            later = upper[:, at, at + 1 : stop, None]
            rest[:, at + 1 : stop].baddbmm_(later, error[:, None], alpha=-1)
        later = upper[:, start:stop, stop:].transpose(1, 2)
        rest[:, stop:].baddbmm_(later, errors, alpha=-1)
    return numbers.flatten(0, 1).t()

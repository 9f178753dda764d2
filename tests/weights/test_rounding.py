"""Rounding by what inputs are like: importance and error feedback."""

from __future__ import annotations

import pytest
import torch

from mtpc.weights.quantise import SCHEMES, quantise
from mtpc.weights.rounding import Grid, feedback, moments_width, round_with_feedback


def inputs_of(width: int, count: int = 4096) -> torch.Tensor:
    """Inputs that depend on each other, some of them larger than others, and one that is zero."""
    torch.manual_seed(0)
    rows = torch.randn(count, width) @ (torch.eye(width) + 0.3 * torch.randn(width, width))
    rows *= torch.rand(width) + 0.1
    rows[:, 5] = 0
    return rows


def blocks_of(rows: torch.Tensor) -> torch.Tensor:
    """Second moments, as `quantise` takes them."""
    width = moments_width(rows.shape[1])
    parts = rows.unflatten(1, (-1, width)).permute(1, 2, 0)
    return parts @ parts.transpose(1, 2) / len(rows)


@pytest.mark.parametrize("scheme", ["iq4_nl", "q5_0", "int4-g32", "fp8"])
def test_outputs_change_less_with_the_inputs_known(scheme: str) -> None:
    """By a third at least, for inputs that depend on each other; on inputs not seen before."""
    rows = inputs_of(128, 6000)
    weight = torch.randn(96, 128)
    spec = SCHEMES[scheme].spec(128, torch.bfloat16)
    assert spec is not None

    def error(moments: torch.Tensor | None) -> float:
        change = quantise(weight, spec, moments).dequantise() - weight
        return float((rows[4096:] @ change.T).square().mean())

    moments = blocks_of(rows[:4096])
    diagonal = moments.diagonal(dim1=1, dim2=2).reshape(-1, 1, 1)
    assert error(moments) < 0.66 * error(None)
    assert error(diagonal) < error(None) * 1.02


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_that_are_not_finite_show(scheme: str) -> None:
    """In the scales or the codes, by which checkpoints are refused."""
    for bad in (torch.nan, torch.inf):
        weight = torch.randn(3, 256)
        weight[1, 7] = bad
        spec = SCHEMES[scheme].spec(256, weight.dtype)
        assert spec is not None
        assert not all(bool(t.float().isfinite().all()) for t in quantise(weight, spec).numbers)


def test_feedback_inverts_the_moments() -> None:
    moments = blocks_of(inputs_of(64))
    diagonal = moments[0].diagonal().clone()
    damped = moments[0] + torch.diag(
        0.01 * torch.where(diagonal == 0, 1, diagonal).mean().expand(64)
    )
    damped[5, 5] += 1
    upper = feedback(moments)[0]
    assert torch.equal(upper, upper.triu())
    torch.testing.assert_close(upper.T @ upper @ damped, torch.eye(64), rtol=0, atol=2e-4)


def test_feedback_is_that_of_input_after_input() -> None:
    """Of two blocks of inputs, in float64, one weight at a time."""
    rows, inputs, group = 40, 96, 32
    scales = (torch.rand(rows, inputs // group) + 0.5).half()
    weight, grid = 2 * torch.randn(rows, inputs), Grid("int4")
    upper = feedback(torch.cat((blocks_of(inputs_of(48)), blocks_of(inputs_of(48).flip(1)))))
    found = round_with_feedback(weight, scales, grid, upper).t()
    rest, steps = weight.double(), scales.double().repeat_interleave(group, 1)
    wanted = torch.empty(rows, inputs)
    for at in range(inputs):
        block, place = divmod(at, 48)
        share = upper[block, place].double() / upper[block, place, place].double()
        number = (rest[:, at] / steps[:, at]).round().clamp(-8, 7)
        error = rest[:, at] - number * steps[:, at]
        rest[:, block * 48 + place : block * 48 + 48] -= error[:, None] * share[place:]
        wanted[:, at] = number
    assert float((found != wanted).float().mean()) < 0.01  # What lies halfway may differ.
    plain = (weight / steps).round().clamp(-8, 7)
    assert float((plain != wanted).float().mean()) > 0.2


def test_blocks_of_moments_divide_the_inputs() -> None:
    assert [moments_width(n) for n in (64, 896, 4864, 18944, 1031)] == [64, 896, 608, 592, 1]

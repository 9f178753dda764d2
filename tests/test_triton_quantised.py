"""The Triton kernels on int8 weights, run by Triton's interpreter, against the reference ops."""

from __future__ import annotations

import os
from importlib import util

import pytest
import torch
from batches import WILD, close, make_mixture

if util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton and TRITON_INTERPRET=1: tests/run_triton.sh", allow_module_level=True)

from mtpc.backends.triton_kernels import ELEMENTS, load_kernels
from mtpc.weights.packing import pack, quantise, row_scales

load_kernels()
OURS = torch.ops.mtpc_triton
REFERENCE = torch.ops.mtpc
DTYPES = list(ELEMENTS)


def _quantised(features: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(features, inputs, generator=torch.Generator().manual_seed(features))
    weight[-1] = 0
    return pack(quantise(weight)), row_scales(weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 70])
@pytest.mark.parametrize("sizes", [(64, 64), (32, 4), (1, 64), (31, 68), (33, 132)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_quantised_linear_equals_the_reference(
    sizes: tuple[int, int], tokens: int, dtype: torch.dtype, has_bias: bool
) -> None:
    """Integers are the reference's, so only the last rounding can differ."""
    weight, scales = _quantised(*sizes)
    x = torch.randn(tokens, sizes[1], generator=torch.Generator().manual_seed(tokens)).to(dtype)
    bias = torch.linspace(-1, 1, sizes[0]).to(dtype) if has_bias else None
    expected = REFERENCE.quantised_linear(x, weight, scales, bias)
    found = OURS.quantised_linear(x, weight, scales, bias)
    close(found, expected)
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=3e-7, atol=3e-7)


def test_quantised_linear_rounds_halves_to_even_as_the_reference_does() -> None:
    """127 is the largest, so a step is 1: 0.5 -> 0, 1.5 -> 2, -2.5 -> -2."""
    weight, scales = _quantised(32, 8)
    x = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.4999]])
    assert torch.equal(
        OURS.quantised_linear(x, weight, scales), REFERENCE.quantised_linear(x, weight, scales)
    )


def test_quantised_linear_of_zeros_nan_and_strides() -> None:
    weight, scales = _quantised(40, 64)
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
    x[0, 1], x[1, 2, 7], x[2, 0, 3] = 0, float("nan"), float("inf")
    expected = REFERENCE.quantised_linear(x, weight, scales)
    found = OURS.quantised_linear(x, weight, scales)
    assert found.shape == (3, 5, 40)
    assert torch.equal(found.isnan(), expected.isnan())
    assert found[1, 2].isnan().all()
    assert not found[0, 1].any()
    close(found.nan_to_num(), expected.nan_to_num())
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(
        OURS.quantised_linear(turned, weight, scales), found, rtol=0, atol=0, equal_nan=True
    )


# ---- quantised_experts -----------------------------------------------------------------------


def _close_but_for_steps(found: torch.Tensor, expected: torch.Tensor) -> None:
    """An activation on the edge between two integers may be rounded to either: one step of it."""
    close(found, expected, scale=4)
    ratio = (found - expected).float().norm() / expected.float().norm()
    assert float(ratio) <= (2e-3 if found.dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(64, 32), (68, 64), (4, 32), (132, 160)])
@pytest.mark.parametrize("tokens", range(1, 6))
def test_quantised_experts_equal_the_reference(
    tokens: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    arguments = make_mixture(tokens, dtype=dtype, hidden=sizes[0], intermediate=sizes[1]).int8()
    _close_but_for_steps(
        OURS.quantised_experts(*arguments), REFERENCE.quantised_experts(*arguments)
    )


@pytest.mark.parametrize("limit_input", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_experts_with_a_limit(dtype: torch.dtype, limit_input: bool) -> None:
    arguments = make_mixture(5, dtype=dtype, hidden=64, intermediate=64).int8()
    expected = REFERENCE.quantised_experts(*arguments, 0.5, limit_input)
    assert not torch.allclose(expected, REFERENCE.quantised_experts(*arguments), atol=0.05)
    _close_but_for_steps(OURS.quantised_experts(*arguments, 0.5, limit_input), expected)


def test_quantised_experts_of_more_rows_than_a_tile() -> None:
    arguments = make_mixture(150, chosen=3, hidden=64, intermediate=32).int8()
    _close_but_for_steps(
        OURS.quantised_experts(*arguments), REFERENCE.quantised_experts(*arguments)
    )
    none = [a[:0] if a.shape[0] == 150 else a for a in arguments]
    assert OURS.quantised_experts(*none).shape == (0, 64)


def test_quantised_experts_beyond_the_table_and_unused_ones_count_for_nothing() -> None:
    mix = make_mixture(5, hidden=64, intermediate=32)
    mix.ids[:, 0] = 2
    mix.ids[:, 1] = torch.tensor([99, -1, WILD, 6, -WILD])
    x, wide, wide_scales, narrow, narrow_scales, *choice = mix.int8()
    expected = REFERENCE.quantised_experts(x, wide, wide_scales, narrow, narrow_scales, *choice)
    unused = [e for e in range(6) if e != 2]
    wide_scales[unused], narrow_scales[unused] = float("nan"), float("nan")
    found = OURS.quantised_experts(x, wide, wide_scales, narrow, narrow_scales, *choice)
    _close_but_for_steps(found, expected)


def test_quantised_experts_rows_are_independent() -> None:
    x, *weights, ids, shares = make_mixture(9, hidden=64, intermediate=32).int8()
    together = OURS.quantised_experts(x, *weights, ids, shares)
    x[4] = float("nan")
    found = OURS.quantised_experts(x, *weights, ids, shares)
    assert found[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(found[others], together[others])


def test_quantised_experts_take_strided_rows_and_int32_ids() -> None:
    x, *weights, ids, shares = make_mixture(4, hidden=64, intermediate=32).int8()
    expected = OURS.quantised_experts(x, *weights, ids, shares)
    turned = x.t().contiguous().t()
    assert torch.equal(OURS.quantised_experts(turned, *weights, ids.int(), shares), expected)

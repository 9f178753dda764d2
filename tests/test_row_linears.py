"""`float32_linear` (routers) and `packed_head_linear` (latent attention): kernels, references."""

from __future__ import annotations

import pytest
import torch
from conftest import run_on
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packed_weights import WITHIN, bf16
from torch import Tensor
from torch.nn import functional as F

from mtpc.backends.cpu_kernels import load_kernels
from mtpc.weights.packing import pack

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_cpu, torch.ops.mtpc
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [(8, 64), (1, 1), (5, 33), (66, 130), (160, 1024)]
"""Output features, inputs."""


@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("inputs", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_float32_linear_against_float64(
    size: tuple[int, int], inputs: torch.dtype, weights: torch.dtype
) -> None:
    """No digit of the operands is lost; sums in float32, whose error grows with their length."""
    x, weight, bias = bf16(3, 5, size[1], seed=1), bf16(*size), bf16(size[0], seed=2)
    x, weight = x.to(inputs), weight.to(weights)
    for add in (None, bias):
        found = OURS.float32_linear(x, weight, add)
        exact = F.linear(x.double(), weight.double(), None if add is None else add.double())
        magnitude = F.linear(x.double().abs(), weight.double().abs())
        assert found.dtype == torch.float32
        bound = (exact.abs() + magnitude * size[1]) * 2**-23
        assert bool(((found.double() - exact).abs() <= bound).all())
        reference = REFERENCE.float32_linear(x, weight, add)
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    at=st.integers(0, 39),
    features=st.integers(1, 100),
    threads=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
)
def test_float32_rows_do_not_depend_on_rows(
    rows: int, at: int, features: int, threads: int, dtype: torch.dtype
) -> None:
    at %= rows
    x, weight = bf16(rows, 150, seed=rows), bf16(features, 150, seed=features).to(dtype)
    with run_on(threads):
        together = OURS.float32_linear(x, weight)
    assert torch.equal(together[at : at + 1], OURS.float32_linear(x[at : at + 1], weight))


def test_float32_linear_takes_any_strides() -> None:
    x, weight = bf16(64, 7, seed=1).t(), bf16(40, 128)[:, 32:96]
    expected = OURS.float32_linear(x.contiguous(), weight.contiguous())
    assert torch.equal(OURS.float32_linear(x, weight), expected)
    across = bf16(64, 40).t()
    expected = OURS.float32_linear(x.contiguous(), across.contiguous())
    assert torch.equal(OURS.float32_linear(x, across), expected)
    assert OURS.float32_linear(x[:0], weight).shape == (0, 40)


def by_head(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("thk,hnk->thn", x, weight)


@pytest.mark.parametrize("rows", [1, 4, 13])
@pytest.mark.parametrize("size", [(2, 64, 32), (3, 33, 66), (1, 1, 2), (16, 128, 512)])
def test_head_linear_against_float64(size: tuple[int, int, int], rows: int) -> None:
    heads, features, inputs = size
    x, weight = bf16(rows, heads, inputs, seed=1), bf16(*size)
    found = OURS.packed_head_linear(x, pack(weight), features)
    exact = by_head(x.double(), weight.double())
    magnitude = by_head(x.double().abs(), weight.double().abs())
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous()
    bound = exact.abs() * WITHIN + magnitude * inputs * 2**-24
    assert bool(((found.double() - exact).abs() <= bound).all())
    reference = REFERENCE.packed_head_linear(x, pack(weight), features)
    torch.testing.assert_close(found, reference, rtol=8e-3, atol=8e-3)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=st.integers(1, 40), at=st.integers(0, 39), threads=st.integers(1, 4))
def test_head_rows_do_not_depend_on_rows(rows: int, at: int, threads: int) -> None:
    at %= rows
    x, weight = bf16(rows, 4, 96, seed=rows), pack(bf16(4, 70, 96, seed=3))
    with run_on(threads):
        together = OURS.packed_head_linear(x, weight, 70)
    alone = OURS.packed_head_linear(x[at : at + 1], weight, 70)
    assert torch.equal(together[at : at + 1], alone)


def test_head_linear_takes_any_strides() -> None:
    wide, weight = bf16(7, 4, 96), pack(bf16(4, 70, 64))
    x = wide[:, :, 16:80]
    expected = OURS.packed_head_linear(x.contiguous(), weight, 70)
    assert torch.equal(OURS.packed_head_linear(x, weight, 70), expected)
    assert OURS.packed_head_linear(x[:0], weight, 70).shape == (0, 4, 70)


def test_schemas_and_fakes() -> None:
    for namespace in (OURS, REFERENCE):
        calls = (
            (namespace.float32_linear.default, (bf16(2, 3, 64), bf16(40, 64), bf16(40))),
            (namespace.packed_head_linear.default, (bf16(3, 2, 64), pack(bf16(2, 40, 64)), 40)),
        )
        for op, arguments in calls:
            tests = ("test_schema", "test_faketensor")
            torch.library.opcheck(op, arguments, test_utils=tests)


def test_misfits_are_refused() -> None:
    x, weight = bf16(3, 64), bf16(40, 64)
    for arguments, message in (
        ((x[:, :32], weight), r"expected x \[\.\.\., K\] and weight"),
        ((x, weight, bf16(39)), r"expected bias \[40\]"),
        ((x.double(), weight), "float64"),
    ):
        with pytest.raises(RuntimeError, match=message):
            OURS.float32_linear(*arguments)
    heads = pack(bf16(2, 40, 64))
    for rows, features, message in (
        (bf16(3, 3, 64), 40, "a weight of 3 heads"),
        (bf16(3, 2, 64), 80, "of 80 features"),
        (bf16(3, 2, 64).float(), 40, "expected bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            OURS.packed_head_linear(rows, heads, features)

"""Kernels on GGUF's blocks as they are stored: the gguf package's values, rows, and memory."""

from __future__ import annotations

import pytest
import torch
from helpers.batches import bf16
from helpers.blocks import KEPT, BlockWeight, random_blocks
from helpers.compiled import run_on
from helpers.grouped import bound

from mtpc.backends.cpu_kernels import load_kernels
from mtpc.backends.cpu_kernels.levels import chosen_level
from mtpc.store.machine import cpu_flags
from mtpc.weights.gguf.blocks import BLOCKS

pytest.importorskip("gguf")
load_kernels()
OURS, REFERENCE = torch.ops.mtpc_cpu, torch.ops.mtpc
ROUNDS_ONCE = chosen_level(cpu_flags()).name != "portable"
"""Whether a product and its addition are rounded as one, as in the reference."""
SIZES = [(70, 256), (33, 768), (64, 1280)]
"""Features and inputs: one super-block, and more than kernels unpack at once."""
types = pytest.mark.parametrize("number", KEPT, ids=lambda number: BLOCKS[number].name)


@types
@pytest.mark.parametrize("sizes", SIZES)
def test_values_are_those_of_the_library(number: int, sizes: tuple[int, int]) -> None:
    """Rounding to int8 leaves rows of the unit matrix as they are: the product is the weight."""
    made = BlockWeight(number, random_blocks(number, *sizes))
    wanted = made.values()
    assert torch.equal(made.weight.dequantise(), wanted)
    found = OURS.grouped_linear(torch.eye(sizes[1]), *made.parts, sizes[0]).t()
    limit = wanted.abs().amax() * 2.0**-22  # A minimum is taken away after the rest.
    torch.testing.assert_close(found, wanted, rtol=2.0**-22, atol=float(limit))


@types
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rows", [1, 2, 7, 9, 17, 40, 150])
def test_products(number: int, sizes: tuple[int, int], rows: int) -> None:
    """The reference's bits, and float64's values within what rounding of rows costs."""
    made = BlockWeight(number, random_blocks(number, *sizes, seed=rows))
    x = bf16(rows, sizes[1], seed=rows).float()
    x[0, -1] *= 100
    found = OURS.grouped_linear(x, *made.parts, sizes[0])
    expected = REFERENCE.grouped_linear(x, *made.parts, sizes[0])
    right = x.double() @ made.values().double().t()
    most = bound(x, made.weight.widened())
    assert bool(((found.double() - right).abs() <= most).all())
    if ROUNDS_ONCE:
        assert torch.equal(found, expected)
    else:
        assert bool(((found - expected).abs() <= 2 * most).all())


@types
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_do_not_depend_on_rows_or_threads(number: int, dtype: torch.dtype) -> None:
    made = BlockWeight(number, random_blocks(number, 200, 768))
    x, bias = bf16(150, 768, seed=1).to(dtype), bf16(200, seed=2)
    operands = (*made.parts, 200, bias)
    with run_on(1):
        together = OURS.grouped_linear(x, *operands)
    for rows in (*range(1, 18), 33, 70, 129):
        with run_on(1 + rows % 2):
            assert torch.equal(OURS.grouped_linear(x[-rows:], *operands), together[-rows:])

"""Kernels on NVFP4: codes of 4 bits, and scales that are float8 times a float64 of the row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers.batches import bf16, mixture
from helpers.compiled import run_on
from helpers.grouped import bound
from torch import Tensor

from mtpc.backends.cpu_kernels import load_kernels
from mtpc.backends.cpu_kernels.levels import chosen_level
from mtpc.store.machine import cpu_flags
from mtpc.weights.grouped import GroupedWeight, GroupForm
from mtpc.weights.grouped_recipes import GroupSpec, pack_rows, rows_of, stack, take_rows

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_cpu, torch.ops.mtpc
ROUNDS_ONCE = chosen_level(cpu_flags()).name != "portable"
SPEC = GroupSpec(GroupForm.of("e2m1", 16, "int8"), "int8")
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
SIZES = [(70, 48), (33, 768), (64, 1280)]
"""Features and inputs: less than kernels unpack at once, and more."""
Operands = tuple[Tensor, Tensor, None]


@dataclass(frozen=True)
class Made:
    """A weight, and its values by the definition, float32 [N, K]."""

    weight: GroupedWeight
    values: Tensor

    @property
    def parts(self) -> Operands:
        """Packed codes and scales."""
        packed = pack_rows(rows_of(self.weight), SPEC)
        return packed["codes"], packed["scales"], None


def made(rows: int, inputs: int, seed: int = 0) -> Made:
    """Every code, float8 of any size, and rows that differ by much."""
    gen = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, inputs), dtype=torch.uint8, generator=gen)
    scales = (448 * torch.rand(rows, inputs // 16, generator=gen) ** 4).to(torch.float8_e4m3fn)
    whole = 1e-4 * (0.5 + torch.rand(rows, 1, generator=gen, dtype=torch.float64))
    raw = torch.cat([(whole / 2).view(torch.int8), scales.view(torch.int8)], 1)
    of_groups = (scales.double() * whole).float().repeat_interleave(16, 1)
    return Made(GroupedWeight(SPEC.form, codes, raw), torch.tensor(E2M1)[codes.int()] * of_groups)


@pytest.mark.parametrize("sizes", SIZES)
def test_values(sizes: tuple[int, int]) -> None:
    """Rounding to int8 leaves rows of the unit matrix as they are: the product is the weight."""
    one = made(*sizes)
    assert torch.equal(one.weight.dequantise(), one.values)
    found = OURS.grouped_linear(torch.eye(sizes[1]), *one.parts, sizes[0]).t()
    torch.testing.assert_close(found, one.values, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rows", [1, 2, 7, 9, 17, 40, 150])
def test_products(sizes: tuple[int, int], rows: int) -> None:
    """The reference's bits, and float64's values within what rounding of rows costs."""
    one = made(*sizes, seed=rows)
    x = bf16(rows, sizes[1], seed=rows).float()
    x[0, -1] *= 100
    found = OURS.grouped_linear(x, *one.parts, sizes[0])
    most = bound(x, one.weight.widened())
    right = x.double() @ one.values.double().t()
    assert bool(((found.double() - right).abs() <= most).all())
    if ROUNDS_ONCE:
        assert torch.equal(found, REFERENCE.grouped_linear(x, *one.parts, sizes[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_do_not_depend_on_rows_or_threads(dtype: torch.dtype) -> None:
    x, bias = bf16(150, 768, seed=1).to(dtype), bf16(200, seed=2)
    operands = (*made(200, 768).parts, 200, bias)
    with run_on(1):
        together = OURS.grouped_linear(x, *operands)
    for rows in (*range(1, 18), 33, 70, 129):
        with run_on(1 + rows % 2):
            assert torch.equal(OURS.grouped_linear(x[-rows:], *operands), together[-rows:])


def test_an_embedding_is_read_by_row() -> None:
    one, ids = made(100, 1296), torch.tensor([[0, 99, 31, 32], [63, 64, 7, 0]])
    for namespace in (OURS, REFERENCE):
        found = namespace.grouped_embedding(ids, *one.parts, 1296)
        assert torch.equal(found, one.values.bfloat16()[ids])


def test_experts() -> None:
    """As those on the same weight widened, and a row does not depend on others."""
    both = [made(n, 256, seed=n) for n in (512, 256)]
    mix = mixture(21, (1, 256, 256), torch.float32)
    operands = [part if part is None else part[None] for one in both for part in one.parts]
    arguments = (mix.x, *operands, torch.zeros(21, 1).long(), torch.ones(21, 1))
    found = OURS.grouped_experts(*arguments)
    expected = REFERENCE.grouped_experts(*arguments)
    assert float((found - expected).norm()) <= 2e-3 * float(expected.norm()) > 0
    for row in range(0, 21, 5):
        one = [part[row : row + 1] for part in (mix.x, *arguments[-2:])]
        assert torch.equal(OURS.grouped_experts(one[0], *operands, *one[1:]), found[row : row + 1])


def test_a_weight_takes_four_and_a_half_bits() -> None:
    """And the float64 of each row."""
    codes, scales, _ = made(64, 768).parts
    assert codes.nbytes + scales.nbytes == 64 * 768 * 4.5 / 8 + 64 * 8
    assert SPEC.nbytes(64 * 768) == 64 * 768 * 4.5 / 8 + 8


@pytest.mark.parametrize("runs", [[(0, 256), (512, 1024)], [(16, 64)], [(8, 24), (512, 520)]])
def test_parts_of_inputs_stay_at_four_bits(runs: list[tuple[int, int]]) -> None:
    """Of a matrix, and of each of a stack; a group that is cut becomes smaller ones."""
    one, spec = made(40, 1024), SPEC.cut(runs)
    assert spec.form.kind == "e2m1"
    assert spec.form.two_level
    wanted = torch.cat([one.values[:, start:stop] for start, stop in runs], 1)
    two = stack([rows_of(one.weight)] * 2)
    for rows, right in ((rows_of(one.weight), wanted), (two, torch.stack([wanted, wanted]))):
        part = take_rows(rows, runs, -1)
        assert torch.equal(part.whole().dequantise(), right)
    packed = pack_rows(take_rows(rows_of(one.weight), runs, -1), spec)
    found = OURS.grouped_linear(
        torch.eye(wanted.shape[1]), packed["codes"], packed["scales"], None, 40
    )
    torch.testing.assert_close(found.t(), wanted, rtol=2.0**-22, atol=0)


def test_misfits_are_refused() -> None:
    codes, scales, _ = made(64, 512).parts
    x = bf16(3, 512)
    for rows, parts in (
        (x[:, :256], (codes, scales, None)),
        (x, (codes, scales[:, :8].contiguous(), None)),
        (x, (codes, scales[:, :9].contiguous(), None)),
        (x, (codes, scales, scales)),
        (x, (codes.view(torch.int8), scales[:, :15].contiguous(), None)),
        (x, (codes[:, :32].contiguous(), scales, None)),
    ):
        with pytest.raises(RuntimeError, match="do not fit"):
            OURS.grouped_linear(rows, *parts, 64)

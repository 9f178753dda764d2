"""Kernels on GGUF's blocks as they are stored: the gguf package's values, rows, and memory."""

from __future__ import annotations

import pytest
import torch
from helpers.batches import bf16, mixture
from helpers.blocks import KEPT, BlockWeight, random_blocks
from helpers.compiled import run_on
from helpers.grouped import bound

from mtpc.backends.cpu_kernels import fill_blocks, load_kernels
from mtpc.backends.cpu_kernels.levels import chosen_level
from mtpc.store.machine import cpu_flags
from mtpc.weights.block_rows import BlockRows
from mtpc.weights.gguf.blocks import BLOCKS
from mtpc.weights.grouped_recipes import (
    GroupedRows,
    GroupSpec,
    PackedWeight,
    Packer,
    join,
    pack_rows,
    rows_of,
    take_rows,
)

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


@types
def test_an_embedding_is_read_by_row(number: int) -> None:
    """Values of the gguf package, rounded once; ids of any shape, and some that are not in use."""
    made = BlockWeight(number, random_blocks(number, 100, 1280))
    wanted = made.values().bfloat16()
    ids = torch.tensor([[0, 99, 31, 32], [63, 64, 7, 0]])
    for namespace in (OURS, REFERENCE):
        found = namespace.grouped_embedding(ids, *made.parts, 1280)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, wanted[ids])
        some = namespace.grouped_embedding(ids, *made.parts, 1280, rows=torch.tensor([3]))
        assert torch.equal(some.flatten(0, 1)[:3], wanted[ids.flatten()[:3]])
    with pytest.raises(RuntimeError, match="id 128 of 128"):
        OURS.grouped_embedding(ids + 29, *made.parts, 1280)


@types
def test_weights_take_the_bits_of_the_file(number: int) -> None:
    made = BlockWeight(number, random_blocks(number, 64, 768))
    held = sum(part.nbytes for part in made.parts if part is not None)
    assert held == made.raw.nbytes == made.spec.nbytes(64 * 768)


@types
@pytest.mark.parametrize("stack", [(), (2,)], ids=["", "stack"])
def test_rows_are_packed_as_they_are(number: int, stack: tuple[int, ...]) -> None:
    """To the bytes of what is decoded first, in a last tile, in stacks, and where parts join."""
    block, spec = BLOCKS[number], GroupSpec(BLOCKS[number].form, BLOCKS[number].scales)
    raw = torch.randint(0, 256, (*stack, 70, 768 // block.inputs * block.nbytes)).byte()
    shape, dim = (*stack, 70, 768), len(stack)
    rows = GroupedRows(shape, lambda start, stop: BlockRows(block, raw[start:stop]))
    both = join([take_rows(rows, [(0, 9), (33, 70)], dim), rows], dim)
    taken = torch.cat((raw[..., :9, :], raw[..., 33:, :], raw), -2)
    wanted = pack_rows(rows_of(BlockRows(block, taken).decoded()), spec)
    seen = []

    def fill(part: BlockRows, packed: PackedWeight) -> None:
        seen.append(part)
        fill_blocks(part, packed)
        again = {piece: torch.empty_like(tensor) for piece, tensor in packed.items()}
        codes = again["codes"].view(torch.uint8)
        REFERENCE.pack_blocks(part.raw, block.name, codes, again["scales"], again.get("zeros"))
        assert all(same_bytes(again[piece], tensor) for piece, tensor in packed.items())

    found = pack_rows(both, spec, Packer(fill_blocks=fill))
    assert seen
    assert found.keys() == wanted.keys()
    assert all(same_bytes(found[piece], tensor) for piece, tensor in wanted.items())
    with pytest.raises(RuntimeError, match="do not fit"):
        fill_blocks(BlockRows(block, raw[..., :40, :]), wanted)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@types
def test_experts(number: int) -> None:
    """As those on the same weight widened, and a row does not depend on others."""
    stack = [BlockWeight(number, random_blocks(number, n, 256, seed=n)) for n in (512, 256)]
    mix = mixture(21, (1, 256, 256), torch.float32)
    both = [[part if part is None else part[None] for part in one.parts] for one in stack]
    arguments = (mix.x, *both[0], *both[1], torch.zeros(21, 1).long(), torch.ones(21, 1))
    found = OURS.grouped_experts(*arguments)
    expected = REFERENCE.grouped_experts(*arguments)
    assert float((found - expected).norm()) <= 2e-3 * float(expected.norm()) > 0
    for row in range(0, 21, 5):
        one = [part[row : row + 1] for part in (mix.x, *arguments[-2:])]
        alone = OURS.grouped_experts(one[0], *both[0], *both[1], *one[1:])
        assert torch.equal(alone, found[row : row + 1])


@types
def test_parts_of_inputs(number: int) -> None:
    """Cut between super-blocks the blocks stay; elsewhere they are widened."""
    made = BlockWeight(number, random_blocks(number, 40, 1024))
    wanted = made.values()
    for runs in ([(0, 256), (512, 1024)], [(128, 640)], [(8, 24), (512, 520)]):
        spec = made.spec.cut(runs)
        packed = pack_rows(take_rows(rows_of(made.weight), runs, -1), spec)
        count = sum(stop - start for start, stop in runs)
        parts = packed["codes"], packed["scales"], packed.get("zeros")
        found = REFERENCE.grouped_linear(torch.eye(count), *parts, 40).t()
        right = torch.cat([wanted[:, start:stop] for start, stop in runs], 1)
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)
        whole = all(edge % 256 == 0 for run in runs for edge in run)
        assert (spec == made.spec) >= whole


def test_steps_that_are_no_numbers_are_found() -> None:
    """Binding checks `numbers`: a super-block's float16 are among its words."""
    for number, word in ((12, 0), (12, 1), (14, 0), (23, 0)):
        made = BlockWeight(number, random_blocks(number, 4, 512)).weight
        assert all(bool(part.isfinite().all()) for part in made.numbers)
        made.scales.view(torch.float16)[2, made.form.words + word] = torch.nan
        assert not all(bool(part.isfinite().all()) for part in made.numbers)


def test_misfits_are_refused() -> None:
    made = BlockWeight(12, random_blocks(12, 64, 512))
    codes, scales, _ = made.parts
    x = bf16(3, 512)
    for rows, parts in (
        (x[:, :256], (codes, scales, None)),
        (x, (codes, scales[:, :7].contiguous(), None)),
        (x, (codes, scales, scales)),
        (x, (codes[:, :32].contiguous(), scales, None)),
        (x, (codes.view(torch.int8), scales.view(torch.uint16), None)),
    ):
        with pytest.raises(RuntimeError, match="do not fit"):
            OURS.grouped_linear(rows, *parts, 64)

"""Packed weights: the layout, kernels against references, and the pass."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import WITHIN, Mixture, bf16, make_mixture
from helpers.compiled import run_on
from helpers.families import TINY
from helpers.small_graphs import operations, run, small_graph
from helpers.whole_steps import compiler_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from mtpc.backends.cpu.passes.pack_weights import PackWeights
from mtpc.backends.cpu_kernels import load_kernels
from mtpc.backends.eager import EagerBackend
from mtpc.capture.graph import operators
from mtpc.layout import StepKey
from mtpc.program.compiler import StepCompiler
from mtpc.weights import recipes
from mtpc.weights.packing import (
    TILE,
    Fill,
    SharedPages,
    allocate,
    can_pack,
    fill_packed,
    pack,
    unpack,
)
from mtpc.weights.recipes import Blocks, Join, Packed, Recipe

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_cpu.packed_linear, torch.ops.mtpc.packed_linear
SIZES = [(64, 64), (32, 2), (1, 64), (31, 66), (33, 130), (1024, 1024)]
"""Output features, inputs."""


@pytest.fixture
def compiler(checkpoint: Callable[..., Path]) -> Callable[..., StepCompiler]:
    """compiler(family, **options): a StepCompiler on the eager backend."""

    def get(family: str, **options: Any) -> StepCompiler:
        given = {"spec_tokens": 3, "batch_buckets": (2,), **TINY, **options}
        return compiler_of(checkpoint(family), given.pop("dtype"), EagerBackend(), **given)

    return get


@pytest.mark.parametrize("size", SIZES)
def test_unpack_is_the_inverse_of_pack(size: tuple[int, int]) -> None:
    weight = bf16(*size)
    packed = pack(weight)
    assert torch.equal(unpack(pack(torch.stack([weight, -weight])), size[0])[1], -weight)
    assert packed.shape == (-(-size[0] // TILE), size[1] // 2, TILE, 2)
    assert packed.is_contiguous()
    assert torch.equal(unpack(packed, size[0]), weight)


@pytest.mark.parametrize("stack", [(), (3,)])
@pytest.mark.parametrize("size", [*SIZES, (70, 34), (640, 896)])
def test_the_kernel_packs_as_the_reference(size: tuple[int, int], stack: tuple[int, ...]) -> None:
    """From any address, into memory that held something else, and on any number of threads."""
    weight = bf16(*stack, *size)
    elsewhere = torch.cat([bf16(1), weight.flatten()])[1:].view_as(weight)
    into = torch.full_like(pack(weight), torch.nan)
    for source in (weight, elsewhere):
        for threads in (1, 2, 5):
            with run_on(threads):
                torch.ops.mtpc_cpu.pack(source, into.fill_(torch.nan))
            assert torch.equal(into, pack(weight))


@pytest.mark.parametrize("fill", [fill_packed, torch.ops.mtpc_cpu.pack])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("size", [(64, 64), (33, 130), (31, 66), (1, 2), (3, 40, 70), (640, 896)])
def test_packing_finds_each_value_that_is_not_finite(
    size: tuple[int, ...], bad: float, fill: Fill
) -> None:
    """First, middle and last ones, in rows beyond whole tiles and inputs beyond whole lines."""
    weight, finite = bf16(*size).flatten(), torch.ones(1, dtype=torch.bool)
    weight[::7] = torch.finfo(torch.bfloat16).max
    weight[3::7] = torch.finfo(torch.bfloat16).min
    last, inputs = weight.numel() - 1, size[-1]
    packed = pack(weight.view(size))
    fill(weight.view(size), packed, finite)
    assert finite
    for at in {0, 1, inputs - 1, last // 2, last - inputs, last - inputs + 1, last - 1, last}:
        if at < 0:
            continue
        kept = weight[at].clone()
        weight[at] = bad
        for threads in (1, 2, 5):
            with run_on(threads):
                fill(weight.view(size), packed, finite.fill_(True))
            assert not finite, at
        weight[at] = kept
        fill(weight.view(size), packed, finite)
        assert not finite, "what is False stays so"
    fill(weight.view(size), packed, finite.fill_(True))
    assert finite


def test_codes_are_never_nan() -> None:
    """Bytes that would be NaN as bfloat16."""
    codes, finite = torch.full((32, 64), 255, dtype=torch.uint8), torch.ones(1, dtype=torch.bool)
    torch.ops.mtpc_cpu.pack(codes, pack(codes), finite)
    assert finite


@pytest.mark.parametrize("fill", [fill_packed, torch.ops.mtpc_cpu.pack])
@pytest.mark.parametrize(
    "recipe",
    [
        "a",
        Join("cat", ("a", "b")),
        Join("cat", ("b", "c")),
        Join("cat", ("c", "a")),  # 33 features first: the second's do not begin a tile.
        Join("stack", ("a", "d")),
        Join("stack", (Join("cat", ("a", "b")), Join("cat", ("d", "b")))),
        Join("stack", (Join("cat", ("c", "a")), Join("cat", ("c", "d")))),
        Join("cat", ("stacks", "stacks")),
    ],
)
def test_joined_weights_are_packed_part_by_part(recipe: Recipe, fill: Fill) -> None:
    """The same as packing the joined weight, which is made only where tiles demand it."""
    sizes = {"a": (64, 6), "b": (32, 6), "c": (33, 6), "d": (64, 6), "stacks": (2, 40, 6)}
    tensors = {name: bf16(*size, seed=i) for i, (name, size) in enumerate(sizes.items())}
    packed = recipes.make(Packed(recipe), tensors.__getitem__, fill)
    assert torch.equal(packed, pack(recipes.make(recipe, tensors.__getitem__)))


@pytest.mark.parametrize(
    ("weight", "packed", "named"),
    [
        (torch.zeros(32, 4), torch.zeros(1, 2, 32, 2).bfloat16(), "bfloat16"),
        (bf16(32, 3), bf16(1, 1, 32, 2), "even K"),
        (bf16(32, 4).T, bf16(1, 16, 32, 2), "contiguous"),
        (bf16(33, 4), bf16(1, 2, 32, 2), "ceil"),
        (bf16(32, 4), bf16(1, 2, 32, 2).float(), "packed"),
        (bf16(2, 32, 4), bf16(3, 1, 2, 32, 2), "stacks"),
    ],
)
def test_the_packing_kernel_refuses(weight: Tensor, packed: Tensor, named: str) -> None:
    with pytest.raises(RuntimeError, match=named):
        torch.ops.mtpc_cpu.pack(weight, packed)


def test_packed_padding_is_zero() -> None:
    """Features beyond the last: they are multiplied, so they must not be NaN."""
    assert not pack(bf16(33, 4))[1, :, 1:].any()


def test_large_weights_are_in_private_memory() -> None:
    """Shared memory, mmap's default, gets no huge pages."""
    weight = pack(bf16(1024, 1024))
    address = weight.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *_ = line.split()
        begin, end = (int(bound, 16) for bound in span.split("-"))
        if begin <= address < end:
            assert mode == "rw-p"
            return
    raise AssertionError(f"{address:x} is not mapped")


def test_what_cannot_be_packed() -> None:
    assert can_pack(bf16(1, 2))
    assert not can_pack(bf16(4, 3))
    assert not can_pack(torch.zeros(4, 4))
    assert not can_pack(bf16(4))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4, 11, 12, 13, 16, 17, 25, 32, 33, 64])
@pytest.mark.parametrize("size", SIZES)
def test_kernel_against_float64(size: tuple[int, int], rows: int, with_bias: bool) -> None:
    """Sums in float32, one rounding: within a unit of the exact result's bfloat16."""
    features, inputs = size
    x, weight = bf16(rows, inputs, seed=1), bf16(features, inputs)
    bias = bf16(features, seed=2) if with_bias else None
    found = OURS(x, pack(weight), features, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    magnitude = F.linear(x.double().abs(), weight.double().abs())
    assert found.dtype == torch.bfloat16
    assert found.shape == (rows, features)
    # Rounding to bfloat16, and float32 sums whose error grows with what was added up.
    bound = exact.abs() * WITHIN + magnitude * inputs * 2**-24
    assert bool(((found.double() - exact).abs() <= bound).all())


def test_kernel_against_the_reference() -> None:
    x, packed, bias = bf16(3, 5, 128, seed=1), pack(bf16(80, 128)), bf16(80, seed=2)
    for arguments in ((x, packed, 80), (x, packed, 80, bias)):
        torch.testing.assert_close(OURS(*arguments), REFERENCE(*arguments), rtol=8e-3, atol=8e-3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 70),
    at=st.integers(0, 69),
    features=st.integers(1, 100),
    threads=st.integers(1, 4),
)
def test_rows_do_not_depend_on_rows(rows: int, at: int, features: int, threads: int) -> None:
    """Bit for bit, whatever the number of rows and of threads."""
    at %= rows
    x, packed = bf16(rows, 106, seed=rows), pack(bf16(features, 106, seed=features))
    with run_on(threads):
        together = OURS(x, packed, features)
    assert torch.equal(together[at : at + 1], OURS(x[at : at + 1], packed, features))


@pytest.mark.parametrize(
    ("rows", "inputs"), [(127, 1030), (128, 1024), (145, 70), (300, 1030), (300, 2048), (300, 4130)]
)
@pytest.mark.parametrize("features", [64, 70])
def test_many_rows(rows: int, inputs: int, features: int) -> None:
    """By rows, by blocks of weights, in phases of inputs: exact, and bit for bit what each row is
    alone."""
    x, weight, bias = bf16(rows, inputs, seed=1), bf16(features, inputs), bf16(features, seed=2)
    packed = pack(weight)
    together = OURS(x, packed, features, bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    magnitude = F.linear(x.double().abs(), weight.double().abs())
    bound = exact.abs() * WITHIN + magnitude * inputs * 2**-24
    assert bool(((together.double() - exact).abs() <= bound).all())
    bare = OURS(x, packed, features)
    for row in {0, 31, 32, 95, 96, 126, min(rows, 257) - 1, min(rows, 258) - 1, rows - 1}:
        one = x[row : row + 1]
        assert torch.equal(together[row : row + 1], OURS(one, packed, features, bias))
        assert torch.equal(bare[row : row + 1], OURS(one, packed, features))


def test_kernel_takes_any_strides() -> None:
    x, packed, bias = bf16(64, 7, seed=1).t(), pack(bf16(40, 64)), bf16(80, seed=2)[::2]
    assert torch.equal(OURS(x, packed, 40, bias), OURS(x.contiguous(), packed, 40, bias.clone()))
    assert OURS(x[:0], packed, 40).shape == (0, 40)


def test_kernel_schema_and_fake() -> None:
    for op in (OURS.default, REFERENCE.default):
        arguments = (bf16(2, 3, 64), pack(bf16(40, 64)), 40, bf16(40))
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((bf16(2, 64).float(), pack(bf16(40, 64)), 40), "must be bfloat16"),
        ((bf16(2, 62), pack(bf16(40, 64)), 40), "packed to"),
        ((bf16(2, 64), pack(bf16(40, 64)), 65), "weight of 65 features"),
        ((bf16(2, 64), pack(bf16(40, 64)), 40, bf16(39)), r"expected bias \[40\]"),
    ],
)
def test_misfits_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        OURS(*arguments)


EXPERTS = [(6, 64, 32), (4, 66, 64), (1, 2, 32)]
"""Experts, hidden size, intermediate size."""


def mixture(tokens: int, experts: int, hidden: int, intermediate: int) -> Mixture:
    """Arguments in bfloat16; every row chooses up to two experts."""
    return make_mixture(
        tokens,
        dtype=torch.bfloat16,
        experts=experts,
        chosen=min(2, experts),
        hidden=hidden,
        intermediate=intermediate,
    )


def packed(mix: Mixture) -> tuple[Tensor, ...]:
    """Arguments of `packed_experts`."""
    return mix.x, pack(mix.gate_up), pack(mix.down), mix.ids, mix.weights


@pytest.mark.parametrize("options", [{}, {"limit": 0.4, "limit_input": True}, {"gelu": True}])
@pytest.mark.parametrize("tokens", [1, 3, 13, 40])
@pytest.mark.parametrize("sizes", EXPERTS)
def test_experts_against_float64(
    tokens: int, sizes: tuple[int, int, int], options: dict[str, Any]
) -> None:
    """As close to exact as the kernel on plain weights, whose meaning it has."""
    mix = mixture(tokens, *sizes)
    wide = [t.double() for t in (mix.x, mix.gate_up, mix.down)]
    exact = torch.ops.mtpc.experts(*wide, mix.ids, mix.weights.bfloat16().double(), **options)
    found = torch.ops.mtpc_cpu.packed_experts(*packed(mix), **options)
    # Activations and results are rounded to bfloat16.
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-2)
    reference = torch.ops.mtpc.packed_experts(*packed(mix), **options)
    plain = torch.ops.mtpc.experts(mix.x, mix.gate_up, mix.down, mix.ids, mix.weights, **options)
    assert torch.equal(reference, plain)


def test_rows_of_experts_do_not_depend_on_rows() -> None:
    mix = mixture(29, 6, 64, 32)
    x, gate_up, down, ids, weights = packed(mix)
    together = torch.ops.mtpc_cpu.packed_experts(x, gate_up, down, ids, weights)
    for row in range(29):
        one = slice(row, row + 1)
        alone = torch.ops.mtpc_cpu.packed_experts(x[one], gate_up, down, ids[one], weights[one])
        assert torch.equal(together[one], alone)


def test_experts_schema_and_fake() -> None:
    for namespace in (torch.ops.mtpc_cpu, torch.ops.mtpc):
        torch.library.opcheck(
            namespace.packed_experts.default,
            packed(mixture(3, 4, 64, 32)),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_experts_misfits_are_refused() -> None:
    mix = mixture(3, 4, 64, 32)
    x, gate_up, down, ids, weights = packed(mix)
    with pytest.raises(RuntimeError, match="do not fit"):
        torch.ops.mtpc_cpu.packed_experts(x, gate_up[:, :1], down, ids, weights)
    with pytest.raises(RuntimeError, match=r"must be \[T, k\]"):
        torch.ops.mtpc_cpu.packed_experts(x, gate_up, down, ids[:2], weights)


def test_pack_recipes() -> None:
    """As data and back, of what other recipes make."""
    recipe = Packed(Join("cat", ("a", "b")))
    assert recipes.from_json(json.loads(json.dumps(recipes.to_json(recipe)))) == recipe
    assert list(recipes.names(recipe)) == ["a", "b"]
    assert recipes.substitute(recipe, str.upper) == Packed(Join("cat", ("A", "B")))
    held = {"a": bf16(3, 4), "b": bf16(5, 4, seed=1)}
    made = recipes.make(recipe, held.__getitem__)
    assert torch.equal(unpack(made, 8), torch.cat([held["a"], held["b"]]))


@pytest.mark.parametrize("transposed", [False, True])
def test_block_recipes(transposed: bool) -> None:
    """Each head's part of a weight, as a packed stack."""
    recipe = Packed(Blocks(3, 2, 6, transposed, "kv"))
    assert recipes.from_json(json.loads(json.dumps(recipes.to_json(recipe)))) == recipe
    assert list(recipes.names(recipe)) == ["kv"]
    assert recipes.substitute(recipe, str.upper).part.part == "KV"
    weight = bf16(3 * 8, 10)
    heads = weight.view(3, 8, 10)[:, 2:6]
    expected = heads.transpose(1, 2) if transposed else heads
    assert torch.equal(
        unpack(recipes.make(recipe, {"kv": weight}.__getitem__), expected.shape[1]), expected
    )


def test_derived_weights_of_derived_weights(compiler: Callable[..., StepCompiler]) -> None:
    """merge-projections makes what pack-weights packs: the recipe is over the model's weights."""
    built = compiler("mimo", dtype="bfloat16", enabled_passes=("merge-projections", "pack-weights"))
    built.rewrite(built.trace(StepKey.decode(2, 3)))
    packed = {n: r for n, r in built.weights.recipes.items() if n.startswith("packed.merged_")}
    assert packed
    loaded = built.loaded.weights()
    assert all(name in loaded for recipe in packed.values() for name in recipes.names(recipe))


def test_every_linear_of_a_dense_model_is_packed(compiler: Callable[..., StepCompiler]) -> None:
    """One weight, one packed form, whatever the number of its uses and of buckets."""
    built = compiler("mimo", dtype="bfloat16", batch_buckets=(1, 2))
    seen = {}
    for num_reqs in (1, 2):
        graph = built.rewrite(built.trace(StepKey.decode(num_reqs, 3)))
        before = [n for n, op in operators(graph.graph) if op is torch.ops.aten.linear.default]
        # Those of one input are one.
        inputs = {node.args[0] for node in before}
        assert PackWeights().apply(graph) == len(inputs) < len(before)
        names = {str(op) for _, op in operators(graph.graph)}
        assert "mtpc.packed_linear.default" in names
        assert "aten.linear.default" not in names
        seen[num_reqs] = {n: t for n, t in built.weights.items() if n.startswith("packed.")}
    assert seen[1].keys() == seen[2].keys()
    assert all(seen[1][name] is seen[2][name] for name in seen[1])


FLOAT32_ROUTERS = {"glm4_moe", "deepseek_v3", "deepseek_v32", "mimo_v2"}
"""The others' compute in the model's dtype."""


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in ("glm4_moe", "deepseek_v32", "qwen3_next", "mimo_v2", "step3p7")
        ),
    ],
)
def test_experts_are_packed(family: str, compiler: Callable[..., StepCompiler]) -> None:
    """Beside the dense linears, and no product is left whose sums have no order of their own."""
    enabled = ("pack-weights",)
    built = compiler(family, dtype="bfloat16", verify_passes=True, enabled_passes=enabled)
    graph = built.rewrite(built.trace(StepKey.decode(2, 3)))
    used = {str(op).removesuffix(".default") for _, op in operators(graph.graph)}
    assert {"mtpc.packed_linear", "mtpc.packed_experts"} <= used
    assert ("mtpc.float32_linear" in used) == (family in FLOAT32_ROUTERS)
    assert ("mtpc.packed_head_linear" in used) == family.startswith("deepseek")
    left = {"linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "einsum"}
    assert used.isdisjoint({"mtpc.experts", *(f"aten.{name}" for name in left)})


def test_a_product_over_groups_is_packed() -> None:
    """DeepSeek-V4's: a batched product by a view of one weight."""

    def body(x: Tensor, weight: Tensor, out: Tensor) -> None:
        stack = weight.view(3, -1, 32).transpose(1, 2)
        out.copy_(torch.bmm(x.transpose(0, 1), stack).transpose(0, 1))

    out = torch.zeros(5, 3, 40, dtype=torch.bfloat16)
    graph = small_graph(body, batch_x=bf16(5, 3, 32), weight=bf16(120, 32), batch_out=out)
    wanted = run(graph)
    assert PackWeights().apply(graph) == 1
    graph.module.recompile()
    assert operations(graph) == ["packed_head_linear[5,3,40]", "copy_[5,3,40]"]
    bound = 2**-7 * float(wanted.abs().max())
    torch.testing.assert_close(run(graph), wanted, rtol=2**-7, atol=bound)


def test_float32_is_left_alone(compiler: Callable[..., StepCompiler]) -> None:
    graph = (built := compiler("mimo", dtype="float32")).rewrite(built.trace(StepKey.decode(1, 3)))
    assert PackWeights().apply(graph) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux")
@pytest.mark.parametrize("shape", [(1024, 1024), (1536, 1024), (3, 999, 1000)])
def test_weights_begin_with_a_huge_page(shape: tuple[int, ...]) -> None:
    """Each of them, in a row of allocations: else both ends of each are in small pages."""
    held = [allocate(shape, torch.bfloat16) for _ in range(3)]
    for tensor in held:
        assert tensor.shape == shape
        assert tensor.data_ptr() % 2**21 == 0
        tensor.fill_(1)


def test_small_weights_share_huge_pages() -> None:
    """Copies, one behind another, and a new chunk where one is full; large ones stay."""
    pages = SharedPages()
    small = [
        torch.randn(300, 500).to(torch.bfloat16),
        torch.arange(7000),
        torch.rand(2000, 250) < 1,
    ]
    held = [pages.take(tensor) for tensor in small * 40]
    for tensor, source in zip(held, small * 40, strict=True):
        assert torch.equal(tensor, source)
        assert tensor.dtype == source.dtype
        assert tensor.data_ptr() % 64 == 0
    assert held[0].data_ptr() % 2**21 == 0
    starts = sorted(tensor.data_ptr() for tensor in held)
    near = [after - before < 2**20 for before, after in pairwise(starts)]
    assert near.count(False) < 4, "tensors of a chunk lie side by side"
    large = torch.empty(2**20, dtype=torch.int16)
    strided = small[0].t()
    for tensor in (large, strided, torch.tensor(1.0), torch.empty(9, 99, device="meta")):
        assert pages.take(tensor) is tensor

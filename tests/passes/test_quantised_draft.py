"""int8 drafts: the form, kernel against reference, the pass, and what must not change."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.batches import bf16, mixture
from helpers.compiled import run_on
from helpers.families import EACH_FAMILY_OF_FEW, TINY
from helpers.places import TESTS
from helpers.theorem import PROMPTS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import mtpc
from mtpc.backends import make_backend
from mtpc.backends.cpu_kernels import load_kernels
from mtpc.capture.graph import operators
from mtpc.config import CompileOptions
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler
from mtpc.weights import recipes
from mtpc.weights.packing import LARGEST, ZERO, can_quantise, pack, quantise, row_scales, unpack
from mtpc.weights.recipes import Convert, Join

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_cpu.quantised_linear, torch.ops.mtpc.quantised_linear
SIZES = [(64, 64), (32, 4), (1, 64), (31, 68), (33, 132), (1024, 1024)]
"""Output features, inputs."""
QUANTISED = {"enabled_passes": ("quantise-draft",)}


def test_the_form_is_within_half_a_step() -> None:
    weight = torch.cat([bf16(40, 64), torch.zeros(1, 64).bfloat16()])
    scales, integers = row_scales(weight), quantise(weight)
    assert integers.dtype == torch.uint8
    assert scales.shape == (41,)
    restored = (integers.float() - ZERO) * scales[:, None]
    assert bool(((restored - weight.float()).abs() <= 0.5001 * scales[:, None]).all())
    assert int(integers.max()) <= ZERO + LARGEST
    assert int(integers.min()) >= ZERO - LARGEST
    assert not restored[40].any()


def test_what_can_be_quantised() -> None:
    assert can_quantise(torch.zeros(3, 4))
    assert not can_quantise(torch.zeros(3, 6))
    assert can_quantise(torch.zeros(2, 3, 4))
    assert not can_quantise(torch.zeros(4))
    assert not can_quantise(torch.zeros(3, 4, dtype=torch.int8))


def test_uint8_is_packed_by_fours() -> None:
    weight = quantise(bf16(70, 36))
    packed = pack(weight)
    assert packed.shape == (3, 9, 32, 4)
    assert torch.equal(unpack(packed, 70), weight)
    ours = torch.empty_like(packed)
    torch.ops.mtpc_cpu.pack(weight, ours)
    assert torch.equal(ours, packed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_kernel_against_reference(
    size: tuple[int, int], with_bias: bool, dtype: torch.dtype
) -> None:
    """The integers are the same, so that only the last rounding can differ."""
    features, inputs = size
    weight, x = bf16(features, inputs), bf16(3, 5, inputs, seed=1).to(dtype)
    bias = bf16(features, seed=2).to(dtype) if with_bias else None
    packed, scales = pack(quantise(weight)), row_scales(weight)
    found, expected = OURS(x, packed, scales, bias), REFERENCE(x, packed, scales, bias)
    assert found.dtype == dtype
    assert found.shape == (3, 5, features)
    bound = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    torch.testing.assert_close(found, expected, rtol=2 * bound, atol=1e-5)


@pytest.mark.parametrize("size", [(64, 64), (128, 1024)])
def test_products_are_near_the_exact_ones(size: tuple[int, int]) -> None:
    """Half a step of each factor, as errors that are independent: a per cent of the norm."""
    weight, x = bf16(*size).double(), bf16(16, size[1], seed=1).double()
    exact = F.linear(x, weight)
    found = REFERENCE(x, pack(quantise(weight)), row_scales(weight))
    assert float((found - exact).norm() / exact.norm()) < 0.02


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=st.integers(1, 70), at=st.integers(0, 69), threads=st.integers(1, 4))
def test_rows_do_not_depend_on_rows(rows: int, at: int, threads: int) -> None:
    weight, x = bf16(70, 100, seed=3), bf16(rows, 100, seed=rows)
    packed, scales = pack(quantise(weight)), row_scales(weight)
    at %= rows
    with run_on(threads):
        together = OURS(x, packed, scales)
    assert torch.equal(together[at : at + 1], OURS(x[at : at + 1], packed, scales))


def test_rows_of_zeros() -> None:
    weight = bf16(32, 8)
    out = OURS(torch.zeros(2, 8).bfloat16(), pack(quantise(weight)), row_scales(weight))
    assert not out.any()
    assert OURS(torch.zeros(0, 8), pack(quantise(weight)), row_scales(weight)).shape == (0, 32)


def test_schema_and_fake() -> None:
    weight = bf16(40, 64)
    arguments = (bf16(2, 3, 64), pack(quantise(weight)), row_scales(weight), bf16(40))
    for op in (OURS.default, REFERENCE.default):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, s: (x, w.int(), s), "uint8"),
        (lambda x, w, s: (x, w, s.double()), "float32"),
        (lambda x, w, s: (x[:, :32], w, s), "expected x"),
        (lambda x, w, s: (x, w[:1], s), "40 features"),
        (lambda x, w, s: (x, w, s, torch.zeros(3)), "bias"),
    ],
)
def test_bad_operands(change: Callable[..., tuple[Tensor, ...]], message: str) -> None:
    weight = bf16(40, 64)
    with pytest.raises(RuntimeError, match=message):
        OURS(*change(bf16(2, 64), pack(quantise(weight)), row_scales(weight)))


EXPERTS = [(6, 64, 32), (4, 68, 64), (1, 4, 32)]
"""Experts, hidden size, intermediate size."""


@pytest.mark.parametrize("limit", [(0.0, False), (0.4, True), (0.4, False)])
@pytest.mark.parametrize("tokens", [1, 13, 40])
@pytest.mark.parametrize("sizes", EXPERTS)
def test_experts_against_the_reference(
    sizes: tuple[int, int, int], tokens: int, limit: tuple[float, bool]
) -> None:
    """An activation on the edge between two integers may be rounded to either: one step of it."""
    arguments = mixture(tokens, sizes, torch.float32).int8()
    found = torch.ops.mtpc_cpu.quantised_experts(*arguments, *limit)
    expected = torch.ops.mtpc.quantised_experts(*arguments, *limit)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0.01 * float(expected.std() + 1))
    assert float((found - expected).norm()) <= 2e-3 * float(expected.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(6, 64, 32), (8, 256, 128)])
def test_experts_are_near_the_exact_ones(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Two rounded products in a row: three per cent of the norm at most."""
    mix = mixture(24, sizes, torch.float64)
    exact = mix.run(torch.ops.mtpc)
    found = torch.ops.mtpc_cpu.quantised_experts(mix.x.to(dtype), *mix.int8()[1:])
    assert found.dtype == dtype
    assert float((found.double() - exact).norm() / exact.norm()) < 0.03


def test_rows_of_experts_do_not_depend_on_rows() -> None:
    x, *weights, ids, shares = mixture(29, (6, 64, 32), torch.bfloat16).int8()
    kernel = torch.ops.mtpc_cpu.quantised_experts
    together = kernel(x, *weights, ids, shares)
    with run_on(2):
        assert torch.equal(kernel(x, *weights, ids, shares), together)
    for row in range(29):
        one = slice(row, row + 1)
        assert torch.equal(kernel(x[one], *weights, ids[one], shares[one]), together[one])


def test_experts_that_nobody_chose_are_not_read() -> None:
    """Their weights lie in memory that may not be read: a process that does dies."""
    done = subprocess.run([sys.executable, "-c", _GUARDED], cwd=TESTS, check=False)
    assert done.returncode == 0


_GUARDED = """
import ctypes, mmap, torch
from helpers.batches import mixture
from mtpc.backends.cpu_kernels import load_kernels
load_kernels()
mix = mixture(9, (4, 256, 64), torch.bfloat16)
mix.ids.fill_(1)
mix.ids[:, 1] = 3
x, gate_up, wide, down, narrow, *choice = mix.int8()
run = torch.ops.mtpc_cpu.quantised_experts
libc = ctypes.CDLL(None, use_errno=True)

def guarded(weight):
    memory = mmap.mmap(-1, weight.nbytes)
    copy = torch.frombuffer(memory, dtype=torch.uint8).view(weight.shape).copy_(weight)
    for expert in (0, 2):
        place, size = copy[expert].data_ptr(), copy[expert].nbytes
        assert place % mmap.PAGESIZE == 0 == size % mmap.PAGESIZE
        assert libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(size), 0) == 0
    return copy

expected = run(x, gate_up, wide, down, narrow, *choice)
assert torch.equal(run(x, guarded(gate_up), wide, guarded(down), narrow, *choice), expected)
"""


def test_experts_schema_and_fake() -> None:
    arguments = mixture(3, (4, 64, 32), torch.bfloat16).int8()
    for namespace in (torch.ops.mtpc_cpu, torch.ops.mtpc):
        op = namespace.quantised_experts.default
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_experts_misfits_are_refused() -> None:
    x, gate_up, wide, down, narrow, ids, shares = mixture(3, (4, 64, 32), torch.bfloat16).int8()
    kernel = torch.ops.mtpc_cpu.quantised_experts
    for arguments, message in (
        ((x[:, :32], gate_up, wide, down, narrow, ids, shares), "do not fit"),
        ((x, gate_up.int(), wide, down, narrow, ids, shares), "gate_up uint8"),
        ((x, gate_up, wide, down, narrow[:, :3], ids, shares), "down uint8"),
        ((x, gate_up, wide, down, narrow, ids[:2], shares), r"must be \[T, k\]"),
    ):
        with pytest.raises(RuntimeError, match=message):
            kernel(*arguments)


def test_recipes_of_stacks() -> None:
    """Of a whole stack, and of experts one by one."""
    stack = torch.stack([bf16(64, 8, seed=seed) for seed in range(3)])
    tensors = {"stack": stack, **{f"e{i}": stack[i] for i in range(3)}}
    for part in ("stack", Join("stack", ("e0", "e1", "e2"))):
        made = recipes.make(Convert("quantise", part), tensors.__getitem__)
        assert torch.equal(made, pack(quantise(stack)))
        scales = recipes.make(Convert("scales", part), tensors.__getitem__)
        assert torch.equal(scales, row_scales(stack))


def test_recipes_are_carried_out_part_by_part() -> None:
    tensors = {"a": bf16(64, 8), "b": bf16(40, 8, seed=1), "c": bf16(32, 8, seed=2)}
    for names in (("a", "b"), ("b", "c")):
        joined = torch.cat([tensors[name] for name in names])
        for form, of_whole in (("quantise", lambda w: pack(quantise(w))), ("scales", row_scales)):
            recipe = Convert(form, Join("cat", names))
            assert torch.equal(recipes.make(recipe, tensors.__getitem__), of_whole(joined))
            assert recipes.from_json(recipes.to_json(recipe)) == recipe


@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_the_pass_takes_drafts_and_leaves_the_target(
    checkpoint: Callable[..., Path], family: str
) -> None:
    options = CompileOptions(spec_tokens=3, batch_buckets=(2,), **TINY, **QUANTISED)
    loaded = load(checkpoint(family), options.dtype, needs_mtp=True)
    compiler = StepCompiler(loaded, options, make_backend("eager"))
    graph = compiler.rewrite(compiler.trace(StepKey.decode(2, 3)))
    calls = list(operators(graph.graph))
    quantised = [node for node, op in calls if op is REFERENCE.default]
    plain = [node for node, op in calls if op is torch.ops.aten.linear.default]
    kinds = {op for node, op in calls if node.meta["piece"].startswith("drafts.")}
    assert torch.ops.mtpc.experts.default not in kinds
    has_experts = any("experts" in name for name in loaded.weights() if "mtp" in name)
    assert (torch.ops.mtpc.quantised_experts.default in kinds) == has_experts
    heads = [node for node in quantised if "head" in str(node.args[1])]
    assert len(heads) == 3  # One a draft; the target's is as it was.
    places = range(len(compiler.loaded.mtp_layers))
    # Some MTP layers have a head of their own, or a norm before the target's, or none before it.
    apart = family in ("mimo", "deepseek_v4", "step3p7")
    pieces = {f"draft_heads.{index}" for index in places} if apart else {"target_head"}
    layers = {f"drafts.{index}" for index in places}
    assert {node.meta["piece"] for node in quantised} == layers | pieces
    assert [node for node in plain if "lm_head" in str(node.args[1])]


@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_what_is_emitted_stays(checkpoint: Callable[..., Path], family: str) -> None:
    """Tokens equal plain decoding's, whatever the drafts; on the eager backend, in float64."""
    common = dict(batch_buckets=(4,), backend="eager", dtype="float64", **TINY)
    plain = mtpc.compile(checkpoint(family), spec_tokens=0, **common)
    draft = mtpc.compile(checkpoint(family), spec_tokens=3, **QUANTISED, **common)
    expected = plain.generate(PROMPTS[:4], 20, ignore_eos=True)
    assert draft.generate(PROMPTS[:4], 20, ignore_eos=True) == expected

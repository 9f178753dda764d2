"""int8 drafts: the form, kernel against reference, the pass, and what must not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import EACH_FAMILY, TINY, run_on
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packed_weights import bf16
from test_theorem import PROMPTS
from torch import Tensor
from torch.nn import functional as F

import mtpc
from mtpc import recipes
from mtpc.backends import make_backend
from mtpc.backends.cpu_kernels import load_kernels
from mtpc.capture.graph import operators
from mtpc.compiler import StepCompiler
from mtpc.config import CompileOptions
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.packing import LARGEST, ZERO, can_quantise, pack, quantise, row_scales, unpack
from mtpc.recipes import Convert, Join

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
    assert not can_quantise(torch.zeros(2, 3, 4))
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
@given(rows=st.integers(1, 40), at=st.integers(0, 39), threads=st.integers(1, 4))
def test_rows_do_not_depend_on_rows(rows: int, at: int, threads: int) -> None:
    weight, x = bf16(70, 96, seed=3), bf16(rows, 96, seed=rows)
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


def test_recipes_are_carried_out_part_by_part() -> None:
    tensors = {"a": bf16(64, 8), "b": bf16(40, 8, seed=1), "c": bf16(32, 8, seed=2)}
    for names in (("a", "b"), ("b", "c")):
        joined = torch.cat([tensors[name] for name in names])
        for form, of_whole in (("quantise", lambda w: pack(quantise(w))), ("scales", row_scales)):
            recipe = Convert(form, Join("cat", names))
            assert torch.equal(recipes.make(recipe, tensors.__getitem__), of_whole(joined))
            assert recipes.from_json(recipes.to_json(recipe)) == recipe


@pytest.mark.parametrize("family", EACH_FAMILY)
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
    heads = [node for node in quantised if "lm_head" in str(node.args[1])]
    assert len(heads) == 3  # One a draft; the target's is as it was.
    head = "draft_heads.0" if family == "deepseek_v4" else "target_head"
    layers = {f"drafts.{index}" for index in range(len(compiler.loaded.mtp_layers))}
    assert {node.meta["piece"] for node in quantised} == {*layers, head}
    assert [node for node in plain if "lm_head" in str(node.args[1])]


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_what_is_emitted_stays(checkpoint: Callable[..., Path], family: str) -> None:
    """Tokens equal plain decoding's, whatever the drafts; on the eager backend, in float64."""
    common = dict(batch_buckets=(4,), backend="eager", dtype="float64", **TINY)
    plain = mtpc.compile(checkpoint(family), spec_tokens=0, **common)
    draft = mtpc.compile(checkpoint(family), spec_tokens=3, **QUANTISED, **common)
    expected = plain.generate(PROMPTS[:4], 20, ignore_eos=True)
    assert draft.generate(PROMPTS[:4], 20, ignore_eos=True) == expected

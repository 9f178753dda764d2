"""int8 drafts: what they cost in precision, the pass, and what must not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import bf16, mixture
from helpers.families import EACH_FAMILY_OF_FEW, TINY
from helpers.grouped import Packed
from helpers.plans import plan_of
from helpers.theorem import PROMPTS
from helpers.whole_steps import compiler_of, model_of
from torch import Tensor, fx
from torch.nn import functional as F

import mtpc
from mtpc.backends.cpu_kernels import load_kernels
from mtpc.backends.eager import EagerBackend
from mtpc.capture.graph import operators
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.passes.quantise_draft import draft_spec
from mtpc.program.compiler import StepCompiler
from mtpc.weights.quantise import quantise
from mtpc.weights.write_quantised import quantise_checkpoint

load_kernels()
OPS = torch.ops.mtpc
QUANTISED = {"enabled_passes": ("quantise-draft",)}


def int8(weight: Tensor) -> Packed:
    """A weight as the pass rounds it."""
    spec = draft_spec(weight)
    assert spec is not None
    return Packed(quantise(weight, spec), weight.shape[-2])


def test_the_form_is_within_half_a_step() -> None:
    weight = torch.cat([bf16(40, 64), torch.zeros(1, 64).bfloat16()])
    found = int8(weight).weight
    assert torch.equal(found.scales[:, 0], weight.abs().amax(-1).float() / 127)
    restored = found.dequantise()
    assert bool(((restored - weight.float()).abs() <= 0.5001 * found.scales).all())
    assert not restored[40].any()


@pytest.mark.parametrize("size", [(64, 64), (128, 1024)])
def test_products_are_near_the_exact_ones(size: tuple[int, int]) -> None:
    """Half a step of each factor, as errors that are independent: a per cent of the norm."""
    weight, x = bf16(*size).double(), bf16(16, size[1], seed=1).double()
    exact = F.linear(x, weight)
    found = OPS.grouped_linear(x, *int8(weight).operands)
    assert float((found - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(6, 64, 32), (8, 256, 128)])
def test_experts_are_near_the_exact_ones(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Two rounded products in a row: three per cent of the norm at most."""
    mix = mixture(24, sizes, torch.float64)
    exact = mix.run(OPS)
    parts = (*int8(mix.gate_up).parts, *int8(mix.down).parts)
    found = torch.ops.mtpc_cpu.grouped_experts(mix.x.to(dtype), *parts, mix.ids, mix.weights)
    assert found.dtype == dtype
    assert float((found.double() - exact).norm() / exact.norm()) < 0.03


@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_the_pass_takes_drafts_and_leaves_the_target(
    checkpoint: Callable[..., Path], family: str
) -> None:
    options = dict(spec_tokens=3, batch_buckets=(2,), **TINY, **QUANTISED)
    compiler = compiler_of(checkpoint(family), "bfloat16", EagerBackend(), **options)
    graph = compiler.rewrite(compiler.trace(StepKey.decode(2, 3)))
    calls = list(operators(graph.graph))
    quantised = [node for node, op in calls if op is OPS.grouped_linear.default]
    plain = [node for node, op in calls if op is torch.ops.aten.linear.default]
    kinds = {op for node, op in calls if node.meta["piece"].startswith("drafts.")}
    assert OPS.experts.default not in kinds
    has_experts = any("experts" in name for name in compiler.loaded.weights() if "mtp" in name)
    assert (OPS.grouped_experts.default in kinds) == has_experts
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
def test_what_is_emitted_stays(
    checkpoint: Callable[..., Path], oracle: Callable[..., Any], family: str
) -> None:
    """Tokens equal plain decoding's, whatever the drafts; on the eager backend, in float64."""
    options = dict(spec_tokens=3, batch_buckets=(4,), **TINY, **QUANTISED)
    draft = model_of(compiler_of(checkpoint(family), "float64", EagerBackend(), **options))
    expected = [oracle(family).generate(prompt, 20, stop=False) for prompt in PROMPTS[:4]]
    assert draft.generate(PROMPTS[:4], 20, ignore_eos=True) == expected


SIZES: dict[str, Any] = dict(spec_tokens=1, batch_buckets=(2,), dtype="bfloat16", **TINY)
SCHEMES = ["int4-g32", pytest.param("fp8", marks=pytest.mark.slow)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_head_of_codes_is_read_in_two_forms(
    checkpoint: Callable[..., Path], tmp_path: Path, scheme: str
) -> None:
    """Drafts of a checkpoint of codes are int8, too."""
    quantise_checkpoint(checkpoint("mimo"), tmp_path / "out", scheme, head=True)
    both = ("quantise-draft", "pack-groups")
    loaded = load(tmp_path / "out", "bfloat16", needs_mtp=True)
    compiler = StepCompiler(loaded, plan_of(**SIZES, enabled_passes=both), EagerBackend())
    graph = compiler.rewrite(compiler.trace(StepKey.decode(2, 1)))
    codes = [n.args[1] for n, op in operators(graph.graph) if op is OPS.grouped_linear.default]
    heads = {str(n.target) for n in codes if isinstance(n, fx.Node) and "head" in str(n.target)}
    assert heads == {f"{stem}.lm_head_weight.codes" for stem in ("grouped", "quantised")}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4-g32", "fp8"])
def test_text_stays_where_drafts_of_codes_are_int8(
    checkpoint: Callable[..., Path], cpu_cache: Path, tmp_path: Path, scheme: str
) -> None:
    """From the cache as well."""
    quantise_checkpoint(checkpoint("mimo"), tmp_path / "out", scheme, head=True)
    common = dict(SIZES, backend="cpu", cache_dir=cpu_cache)
    plain = mtpc.compile(tmp_path / "out", **{**common, "spec_tokens": 0})
    expected = plain.generate(PROMPTS[2:4], 12, ignore_eos=True)
    for _ in range(2):
        draft = mtpc.compile(tmp_path / "out", **QUANTISED, **common)
        assert draft.generate(PROMPTS[2:4], 12, ignore_eos=True) == expected

"""Linears of a few rows: the kernel against float64, and what the pass makes of steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import bf16
from helpers.plans import plan_of
from helpers.triton_here import INTERPRETS, NO_INTERPRETER
from torch import Tensor, fx
from torch.nn import functional as F

from benchmarks.gpu.machine import Machine
from mtpc.backends.gpu.ops.skinny import MOST_ROWS
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler

WIDTHS = (8, 104, 1024, 1376)
interpreted = pytest.mark.skipif(not INTERPRETS, reason=NO_INTERPRETER)


@pytest.fixture(scope="module")
def ours() -> Any:
    from mtpc.backends.triton_kernels import load_kernels

    load_kernels()
    return torch.ops.mtpc_triton


def near(found: Tensor, reference: Tensor, truth: Tensor) -> bool:
    """Whether rows err by no more than the reference's, but for one rounding of the result."""
    return bool(error(found, truth) <= error(reference, truth) + 2**-8)


def error(rows: Tensor, truth: Tensor) -> float:
    return float((rows.double() - truth).norm() / truth.norm())


@pytest.mark.triton
@interpreted
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear(ours: Any, rows: int, width: int, has_bias: bool) -> None:
    """Of rows at some distance from each other; features beyond the last whole block."""
    x = bf16(rows, width + 3, seed=1)[:, :width]
    weight, bias = bf16(37, width, seed=2), bf16(37, seed=3) if has_bias else None
    truth = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = ours.skinny_linear(x, weight, bias)
    assert near(found, F.linear(x, weight, bias), truth)


@pytest.mark.triton
@interpreted
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("form", ["plain", "bias", "plus one", "gated"])
def test_a_norm_and_the_linear_behind_it(ours: Any, rows: int, width: int, form: str) -> None:
    x, added = bf16(2, rows, width, seed=1) * 3
    norm, weight = bf16(width, seed=2), bf16(38, width, seed=4)
    bias = bf16(38, seed=5) if form == "bias" else None
    call = (x, added, norm, 1e-5, form == "plus one", weight, bias, form == "gated")
    total, found = ours.norm_linear(*call)
    expected_total, reference = torch.ops.mtpc.norm_linear(*call)
    # Triton's interpreter rounds towards zero.
    torch.testing.assert_close(total, expected_total, rtol=2**-7, atol=0)
    wide = total.double()
    scale = norm.double() + (form == "plus one")
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * scale
    truth = F.linear(normed, weight.double(), None if bias is None else bias.double())
    if form == "gated":
        truth = F.silu(truth[:, :19]) * truth[:, 19:]
    assert near(found, reference, truth)


@pytest.mark.triton
@interpreted
def test_other_rows_change_nothing(ours: Any) -> None:
    """A row's bits do not depend on the other rows of its call, nor does NaN of one reach them."""
    x, weight = bf16(4, 1376, seed=1), bf16(37, 1376, seed=2)
    first = ours.skinny_linear(x, weight, None)
    x[1:] = float("nan")
    assert torch.equal(ours.skinny_linear(x, weight, None)[0], first[0])


def test_schemas_and_fakes() -> None:
    ops, x = torch.ops.mtpc, bf16(3, 16, seed=1)
    weight, norm = bf16(6, 16, seed=2), bf16(16, seed=3)
    for op, args in (
        (ops.skinny_linear.default, (x, weight, bf16(6, seed=4))),
        (ops.norm_linear.default, (x, x, norm, 1e-6, False, weight, None, True)),
    ):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


# ---- The pass --------------------------------------------------------------------------------


def rewritten(directory: Path, key: StepKey) -> list[fx.Node]:
    """Calls of a step."""
    sizes = {"batch_buckets": (key.bucket.num_reqs,), "max_len": 64}
    options = plan_of(spec_tokens=key.spec_tokens, **sizes)  # type: ignore[arg-type]
    compiler = StepCompiler(load(directory, "bfloat16", True), options, Machine().backend())
    graph = compiler.rewritten(key).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def names(nodes: list[fx.Node]) -> Counter[str]:
    return Counter(str(node.target).removesuffix(".default") for node in nodes)


def test_each_linear_of_one_or_two_rows_is_one(checkpoint: Callable[..., Path]) -> None:
    found = names(rewritten(checkpoint("mimo", "random"), StepKey.decode(1, 1)))
    assert not found["aten.linear"] + found["mtpc.silu_and_mul"]
    assert found["mtpc.norm_linear"]
    assert found["mtpc.skinny_linear"]


def test_of_four_rows_those_with_many_features_stay(checkpoint: Callable[..., Path]) -> None:
    """The target's; a draft has one row."""
    nodes = rewritten(checkpoint("mimo", "random"), StepKey.decode(1, 3))
    left = [node for node in nodes if node.target is torch.ops.aten.linear.default]
    assert left
    for node in left:
        features, width = node.args[1].meta["val"].shape  # type: ignore[union-attr]
        assert features > width
        assert len(node.meta["val"].flatten(0, -2)) == 4
    found = names(nodes)
    assert found["mtpc.skinny_linear"]
    assert found["mtpc.norm_linear"]


def test_linears_of_more_rows_stay(checkpoint: Callable[..., Path]) -> None:
    found = names(rewritten(checkpoint("mimo", "random"), StepKey.decode(MOST_ROWS + 1, 0)))
    assert found["aten.linear"]
    assert not found["mtpc.skinny_linear"] + found["mtpc.norm_linear"]

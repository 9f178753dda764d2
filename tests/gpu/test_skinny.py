"""Linears of a few rows: the kernel against float64, and what the pass makes of steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import bf16
from torch import Tensor, fx
from torch.nn import functional as F

from benchmarks.gpu.machine import NullMachine
from mtpc.config import CompileOptions
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.ops.skinny import MOST_NORM_ROWS, MOST_ROWS, MOST_WIDE_ROWS
from mtpc.program.compiler import StepCompiler

WIDTHS = (8, 104, 1024, 1376)
FORMS = ("plain", "bias", "plus one", "gated")


@pytest.fixture(scope="module")
def ours() -> Any:
    pytest.importorskip("triton")
    from mtpc.backends.triton_kernels import load_kernels

    load_kernels()
    return torch.ops.mtpc_triton


def near(found: Tensor, reference: Tensor, truth: Tensor) -> bool:
    """Whether rows err by no more than the reference's, but for one rounding of the result."""
    return bool(error(found, truth) <= error(reference, truth) + 2**-8)


def error(rows: Tensor, truth: Tensor) -> float:
    return float((rows.double() - truth).norm() / truth.norm())


@pytest.mark.triton
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
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 15, MOST_NORM_ROWS])
@pytest.mark.parametrize("form", FORMS)
def test_a_norm_and_the_linear_behind_it(ours: Any, rows: int, width: int, form: str) -> None:
    """Of rows at some distance from each other, or not."""
    x, added = bf16(2, rows, width + 8, seed=1)[..., :width] * 3
    if rows % 2:
        x, added = x.contiguous(), bf16(rows, width + 3, seed=6)[:, :width]
    _compare(ours, x, added, bf16(width, seed=2), bf16(38, width, seed=4), form)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("rows", "features", "form", "count"),
    [
        (3, 38, "bias", 4),
        (16, 38, "gated", 4),
        # Programs have more features, if there are more than eight rows.
        pytest.param(16, 4115, "plus one", 3, marks=pytest.mark.slow),
        (9, 2 * 4115, "gated", 3),
    ],
)
def test_every_configuration_of_products(
    ours: Any, rows: int, features: int, form: str, count: int
) -> None:
    from mtpc.backends.triton_kernels.configs import configs_of
    from mtpc.backends.triton_kernels.plans import plan

    width = 1160 if features < 4096 else 16
    x, added = bf16(2, rows, width, seed=1)
    call = _call(x, added, bf16(width, seed=2), bf16(features, width, seed=4), form)
    (launch,), _ = plan("norm_linear", *call)
    assert launch.name == "skinny_product_kernel"
    configs = configs_of(launch)
    assert len(configs) == count
    for config in configs:
        _check(ours, call, configs=f"{launch.name}:{config}")


@pytest.mark.triton
@pytest.mark.parametrize("form", FORMS)
def test_a_norm_of_large_rows_by_large_weights(ours: Any, form: str) -> None:
    """What is multiplied before the inverse is known stays within bfloat16."""
    x, added = bf16(2, 5, 104, seed=1) * 2.0**40
    _compare(ours, x, added, bf16(104, seed=2) * 2.0**40, bf16(38, 104, seed=4), form)


def _compare(ours: Any, x: Tensor, added: Tensor, norm: Tensor, weight: Tensor, form: str) -> None:
    _check(ours, _call(x, added, norm, weight, form))


def _call(
    x: Tensor, added: Tensor, norm: Tensor, weight: Tensor, form: str
) -> tuple[Tensor, Tensor, Tensor, float, bool, Tensor, Tensor | None, bool]:
    bias = bf16(len(weight), seed=5) if form == "bias" else None
    return x, added, norm, 1e-5, form == "plus one", weight, bias, form == "gated"


def _check(ours: Any, call: tuple[Any, ...], configs: str = "") -> None:
    """Against what float64 makes of the kernel's own sum and, in products, of rounded operands.
    Some results are at the edge between two."""
    x, added, norm, epsilon, plus_one, weight, bias, gated = call
    total, found = ours.norm_linear(*call, configs=configs)
    expected_total, _ = torch.ops.mtpc.norm_linear(*call)
    torch.testing.assert_close(total, expected_total, rtol=2**-7, atol=0)
    scaled = total.float() * (norm.float() + plus_one)
    if len(x) > MOST_WIDE_ROWS:
        scaled = _cut(scaled)
    truth = _linear(scaled, total, epsilon, weight, bias, gated)
    assert error(found, _cut(truth.float()).double()) <= 2**-10


def _cut(values: Tensor) -> Tensor:
    """float32 as Triton's interpreter rounds it to bfloat16: towards zero."""
    return (values.view(torch.int32) & -(1 << 16)).view(torch.float32)


def _linear(
    scaled: Tensor, total: Tensor, epsilon: float, weight: Tensor, bias: Tensor | None, gated: bool
) -> Tensor:
    """In float64, of rows that lack the norm's inverse."""
    inverse = torch.rsqrt(total.double().pow(2).mean(-1, keepdim=True) + epsilon)
    out = F.linear(scaled.double(), weight.double()) * inverse
    if bias is not None:
        out += bias.double()
    gate, up = out.chunk(2, -1)
    return F.silu(gate) * up if gated else out


@pytest.mark.parametrize("form", FORMS)
def test_products_round_less_than_the_reference(form: str) -> None:
    """Operands once, before the inverse. As on a device: to the nearest, which the interpreter
    does not do."""
    x, added = bf16(2, 16, 1024, seed=1)
    call = _call(x, added, bf16(1024, seed=2), bf16(38, 1024, seed=4), form)
    *_, norm, epsilon, plus_one, weight, bias, gated = call
    total, reference = torch.ops.mtpc.norm_linear(*call)
    scaled = total.float() * (norm.float() + plus_one)
    truth, products = (
        _linear(operand, total, epsilon, weight, bias, gated)
        for operand in (scaled, scaled.bfloat16())
    )
    assert error(products.bfloat16(), truth) < error(reference, truth)


@pytest.mark.triton
def test_other_rows_change_nothing(ours: Any) -> None:
    """A row's bits do not depend on the other rows of its call, nor does NaN of one reach them."""
    x, weight = bf16(4, 1376, seed=1), bf16(37, 1376, seed=2)
    first = ours.skinny_linear(x, weight, None)
    x[1:] = float("nan")
    assert torch.equal(ours.skinny_linear(x, weight, None)[0], first[0])


@pytest.mark.triton
@pytest.mark.parametrize("rows", [4, 16])
def test_other_rows_change_nothing_of_products(ours: Any, rows: int) -> None:
    """The same of those with a norm before and SwiGLU behind."""
    x, added = bf16(2, rows, 1376, seed=1)
    rest = (added, bf16(1376, seed=2), 1e-5, False, bf16(38, 1376, seed=4), None, True)
    first = ours.norm_linear(x, *rest)
    x[1:] = float("nan")
    for before, after in zip(first, ours.norm_linear(x, *rest), strict=True):
        assert torch.equal(after[0], before[0])
        assert after[1:].isnan().all()


@pytest.mark.triton
def test_what_the_kernels_refuse(ours: Any) -> None:
    """Products with a norm may leave float16's range."""
    from mtpc.backends.triton_kernels.skinny import skinny_limit

    def limit(rows: int, dtype: torch.dtype, **more: Tensor) -> str | None:
        weight = torch.empty(9, 16, dtype=dtype)
        return skinny_limit({"x": torch.empty(rows, 16, dtype=dtype), "weight": weight, **more})

    norm = {"norm_weight": torch.empty(16)}
    assert limit(MOST_NORM_ROWS, torch.bfloat16, **norm) is None
    assert limit(MOST_ROWS, torch.float16, **norm) is None
    assert limit(MOST_ROWS, torch.bfloat16) is None
    assert "17 rows" in str(limit(MOST_NORM_ROWS + 1, torch.bfloat16, **norm))
    assert "5 rows" in str(limit(MOST_ROWS + 1, torch.float16, **norm))
    assert "5 rows" in str(limit(MOST_ROWS + 1, torch.bfloat16))


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
    options = CompileOptions(spec_tokens=key.spec_tokens, **sizes)  # type: ignore[arg-type]
    compiler = StepCompiler(load(directory, "bfloat16", True), options, NullMachine().backend())
    graph = compiler.rewritten(key).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def names(nodes: list[fx.Node]) -> Counter[str]:
    return Counter(str(node.target).removesuffix(".default") for node in nodes)


def test_each_linear_of_one_or_two_rows_is_one(checkpoint: Callable[..., Path]) -> None:
    found = names(rewritten(checkpoint("mimo", "random"), StepKey.decode(1, 1)))
    assert not found["aten.linear"] + found["mtpc.silu_and_mul"]
    assert found["mtpc.norm_linear"]
    assert found["mtpc.skinny_linear"]


def test_of_four_rows_those_with_many_features_need_a_norm(checkpoint: Callable[..., Path]) -> None:
    """The target's; a draft has one row."""
    nodes = rewritten(checkpoint("mimo", "random"), StepKey.decode(1, 3))
    left = [node for node in nodes if node.target is torch.ops.aten.linear.default]
    assert left
    for node in left:
        features, width = node.args[1].meta["val"].shape  # type: ignore[union-attr]
        assert features > width
        assert len(node.meta["val"].flatten(0, -2)) == 4
        norm = node.args[0].args[0]  # type: ignore[union-attr]
        assert norm.target is not torch.ops.mtpc.add_rms_norm.default  # type: ignore[union-attr]
    found = names(nodes)
    assert found["mtpc.skinny_linear"]
    assert found["mtpc.norm_linear"]
    assert not found["mtpc.silu_and_mul"]


@pytest.mark.parametrize("rows", [MOST_ROWS + 1, MOST_NORM_ROWS])
def test_linears_of_more_rows_need_a_norm(rows: int, checkpoint: Callable[..., Path]) -> None:
    found = names(rewritten(checkpoint("mimo", "random"), StepKey.decode(rows, 0)))
    assert found["aten.linear"]
    assert found["mtpc.norm_linear"]
    assert not found["mtpc.skinny_linear"] + found["mtpc.silu_and_mul"]


def test_linears_of_many_rows_stay(checkpoint: Callable[..., Path]) -> None:
    found = names(rewritten(checkpoint("mimo", "random"), StepKey.decode(MOST_NORM_ROWS + 1, 0)))
    assert found["aten.linear"]
    assert found["mtpc.add_rms_norm"]
    assert found["mtpc.silu_and_mul"]
    assert not found["mtpc.skinny_linear"] + found["mtpc.norm_linear"]

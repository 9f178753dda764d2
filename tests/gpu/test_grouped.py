"""The Triton kernels on weights with scales of groups, in Triton's interpreter, against the
reference ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.batches import WILD, bf16, close
from helpers.grouped import FORMS, Zeros, experts_call, random_weight, rows_of
from helpers.small_graphs import small_graph
from helpers.triton_here import INTERPRETS, NO_INTERPRETER
from torch import Tensor

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from mtpc.backends.bindings import BindKernels
from mtpc.backends.triton_kernels import ELEMENTS, load_kernels, triton_bindings
from mtpc.weights.grouped import Kind

pytestmark = pytest.mark.triton

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_triton, torch.ops.mtpc
DTYPES = list(ELEMENTS)
ODD_FORMS: list[tuple[Kind, int, Zeros]] = [("int4", 40, "zeros"), ("int8", 12, ""),
                                            ("int8", 132, ""), ("float8", 40, "")]  # fmt: skip
"""Groups that are no multiple of a product's inputs."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "group", "points"), [*FORMS, *ODD_FORMS])
@pytest.mark.parametrize(("tokens", "features"), [(1, 1), (4, 33), (70, 32)])
def test_linear_equals_the_reference(
    tokens: int, features: int, kind: Kind, group: int, points: Zeros, dtype: torch.dtype
) -> None:
    """Integers are the reference's, so only roundings of floats can differ."""
    made = random_weight(kind, (features, 2 * group), group, zeros=points, seed=features)
    x = rows_of(tokens, 2 * group, dtype)
    bias = torch.linspace(-1, 1, features).to(dtype) if tokens == 4 else None
    expected = REFERENCE.grouped_linear(x, *made.operands, bias)
    found = OURS.grouped_linear(x, *made.operands, bias)
    close(found, expected)
    if dtype == torch.float32 and kind != "float8":
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("kind", "group", "points"), FORMS)
def test_steps_bind_it(kind: Kind, group: int, points: Zeros) -> None:
    """Codes of float8, too, are no numbers that a kernel cannot take."""
    weight = random_weight(kind, (64, 2 * group), group, zeros=points).operands
    x = rows_of(4, 2 * group, torch.bfloat16)
    calls = {
        "grouped_linear": [x, *weight],
        "grouped_gated_linear": [x, *weight],
        "grouped_experts": experts_call(4, (kind, group, points), torch.bfloat16),
    }
    for name, given in calls.items():
        tensors = {f"batch_{i}": t for i, t in enumerate(given) if isinstance(t, Tensor)}
        assert notes_of(getattr(REFERENCE, name), given, tensors) == []


def notes_of(call: Any, given: Sequence[Any], tensors: dict[str, Tensor]) -> list[str]:
    """Bind a step of one call; the notes on it."""

    def body(out: Tensor, *held: Tensor) -> Tensor:
        left = iter(held)
        return out.copy_(call(*(next(left) if isinstance(x, Tensor) else x for x in given)))

    notes: list[str] = []
    graph = small_graph(body, batch_out=call(*given), **tensors)
    assert BindKernels(triton_bindings(), notes.append).apply(graph) == 1 - len(notes)
    return notes


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float32])
def test_dtypes_of_scales(scales: torch.dtype) -> None:
    made = random_weight("int4", (40, 128), 32, zeros="mins", scales=scales)
    x = rows_of(3, 128, torch.float32)
    close(OURS.grouped_linear(x, *made.operands), REFERENCE.grouped_linear(x, *made.operands))


def test_every_float8_is_read() -> None:
    """NaN of both signs, zeros of both signs, subnormal numbers."""
    made = random_weight("float8", (32, 256), 64)
    made.weight.codes[:] = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    made.weight.scales[:] = 1
    x = torch.eye(256)
    expected = made.weight.codes.float().t()
    no_numbers = expected.isnan()
    # One that is no number makes all sums of its feature so, and each feature has all codes here.
    assert bool(OURS.grouped_linear(x, *made.operands).isnan().all())
    made.weight.codes.view(torch.uint8)[no_numbers.t()] = 0
    expected[no_numbers] = 0
    assert torch.equal(OURS.grouped_linear(x, *made.operands), expected)


def test_halves_are_rounded_to_even_as_the_reference_does() -> None:
    """127 is the largest, so a step is 1: 0.5 -> 0, 1.5 -> 2, -2.5 -> -2."""
    made = random_weight("int8", (32, 8), 8)
    x = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.4999]])
    expected = REFERENCE.grouped_linear(x, *made.operands)
    torch.testing.assert_close(
        OURS.grouped_linear(x, *made.operands), expected, rtol=3e-7, atol=3e-7
    )


@pytest.mark.parametrize(("kind", "group", "points"), FORMS)
def test_inputs_that_are_no_numbers_tiny_ones_and_strides(
    kind: Kind, group: int, points: Zeros
) -> None:
    made = random_weight(kind, (40, 512), group, zeros=points)
    x = rows_of(15, 512, torch.float32).view(3, 5, 512)
    x[0, 1], x[1, 2, 7], x[2, 0, 3], x[2, 4] = 0, torch.nan, torch.inf, 1e-37
    expected = REFERENCE.grouped_linear(x, *made.operands)
    found = OURS.grouped_linear(x, *made.operands)
    assert not bool(found[1, 2].isfinite().any())
    assert not bool(found[2, 0].isfinite().any())
    rest = expected.isfinite()
    assert torch.equal(found.isfinite(), rest)
    close(found[rest], expected[rest])
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    again = OURS.grouped_linear(turned, *made.operands)
    torch.testing.assert_close(again, found, rtol=0, atol=0, equal_nan=True)
    assert OURS.grouped_linear(x[:0], *made.operands).shape == (0, 5, 40)


@pytest.mark.parametrize(("kind", "group", "points"), [FORMS[0], FORMS[-1]])
def test_gated_linear_equals_the_reference(kind: Kind, group: int, points: Zeros) -> None:
    """The interpreter cuts bfloat16 off where the reference rounds, three times here."""
    made = random_weight(kind, (128, 256), group, zeros=points)
    x = bf16(5, 256)
    found = OURS.grouped_gated_linear(x, *made.operands)
    close(found, REFERENCE.grouped_gated_linear(x, *made.operands), scale=2)


# ---- grouped_experts -------------------------------------------------------------------------


def _close_but_for_steps(found: Tensor, expected: Tensor) -> None:
    """An activation on the edge between two integers may be rounded to either: one step of it."""
    ratio = (found - expected).float().norm() / expected.float().norm()
    assert float(ratio) <= (4e-3 if found.dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 192)])
def test_experts_equal_the_reference(
    tokens: int, hidden: int, form: tuple[Kind, int, Zeros], dtype: torch.dtype
) -> None:
    form = (form[0], 64 if form[1] > 64 else form[1], form[2])
    arguments = experts_call(tokens, form, dtype, hidden)
    _close_but_for_steps(OURS.grouped_experts(*arguments), REFERENCE.grouped_experts(*arguments))


@pytest.mark.parametrize("limit_input", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_experts_with_a_limit_and_more_rows_than_a_tile(limit_input: bool) -> None:
    arguments = experts_call(70, FORMS[0], torch.float32)
    expected = REFERENCE.grouped_experts(*arguments, 0.5, limit_input)
    assert not torch.allclose(expected, REFERENCE.grouped_experts(*arguments), atol=0.05)
    _close_but_for_steps(OURS.grouped_experts(*arguments, 0.5, limit_input), expected)


def test_experts_of_gelu() -> None:
    arguments = experts_call(3, FORMS[0], torch.float32)
    expected = REFERENCE.grouped_experts(*arguments, gelu=True)
    assert not torch.allclose(expected, REFERENCE.grouped_experts(*arguments), atol=0.02)
    _close_but_for_steps(OURS.grouped_experts(*arguments, gelu=True), expected)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[-1]])
def test_experts_beyond_the_table_and_rows_that_are_no_numbers(
    form: tuple[Kind, int, Zeros],
) -> None:
    x, *weights, ids, shares = experts_call(5, (form[0], 32, ""), torch.float32)
    assert x is not None
    assert ids is not None
    ids[:, 1] = torch.tensor([99, -1, WILD, 6, -WILD])
    together = OURS.grouped_experts(x, *weights, ids, shares)
    _close_but_for_steps(together, REFERENCE.grouped_experts(x, *weights, ids, shares))
    x[4] = torch.nan
    found = OURS.grouped_experts(x, *weights, ids.int(), shares)
    assert bool(found[4].isnan().all())
    assert torch.equal(found[:4], together[:4])


# ---- grouped_biased_experts ------------------------------------------------------------------


def _biased(form: tuple[Kind, int, Zeros], tokens: int, dtype: torch.dtype) -> list[Any]:
    """Gate and up in turns; biases of all experts and features differ; limit and alpha."""
    x, wide, wide_scales, _, narrow, narrow_scales, _, ids, shares = experts_call(
        tokens, (form[0], form[1], ""), dtype, hidden=192
    )
    gen = torch.Generator().manual_seed(tokens)
    biases = [torch.randn(5, n, generator=gen).to(dtype) for n in (128, 192)]
    assert x is not None
    weights = (wide, wide_scales, biases[0], narrow, narrow_scales, biases[1])
    return [2 * x, *weights, ids, shares, 1.5, 1.7]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [("int8", 32, ""), ("int4", 64, ""), ("float8", 64, "")])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_biased_experts_equal_the_reference(
    tokens: int, form: tuple[Kind, int, Zeros], dtype: torch.dtype
) -> None:
    """Both bounds and every bias decide."""
    given = _biased(form, tokens, dtype)
    expected = REFERENCE.grouped_biased_experts(*given)
    _close_but_for_steps(OURS.grouped_biased_experts(*given), expected)
    for place, other in ((3, given[3].flip(1)), (6, given[6].flip(0)), (9, 99.0), (10, 1.0)):
        changed = [*given[:place], other, *given[place + 1 :]]
        wrong = REFERENCE.grouped_biased_experts(*changed) - expected
        assert float(wrong.float().norm()) > 2e-2 * float(expected.float().norm())


def test_biased_experts_of_some_rows() -> None:
    """Choices beyond the table add no bias either; NaN stays in its row; no row depends on others
    where `batch_invariant` asks for that."""
    given = _biased(("int8", 32, ""), 5, torch.float32)
    given[7][:, 1] = torch.tensor([99, -1, WILD, 6, -WILD])
    given[7][2, 0] = -1
    together = OURS.grouped_biased_experts(*given)
    _close_but_for_steps(together, REFERENCE.grouped_biased_experts(*given))
    assert together[2].eq(0).all()
    given[0][4] = torch.nan
    found = OURS.grouped_biased_experts(*given)
    assert bool(found[4].isnan().all())
    assert torch.equal(found[:4], together[:4])
    apart = {"configs": "batch_invariant"}
    whole = OURS.grouped_biased_experts(*given, **apart)
    first = [each[:1] if index in (0, 7, 8) else each for index, each in enumerate(given)]
    assert torch.equal(OURS.grouped_biased_experts(*first, **apart), whole[:1])
    empty = [each[:0] if index in (0, 7, 8) else each for index, each in enumerate(given)]
    assert OURS.grouped_biased_experts(*empty).shape == (0, 192)


def test_steps_bind_biased_experts() -> None:
    given = _biased(("int8", 32, ""), 4, torch.bfloat16)
    tensors = {f"batch_{i}": t for i, t in enumerate(given) if isinstance(t, Tensor)}
    assert notes_of(REFERENCE.grouped_biased_experts, given, tensors) == []

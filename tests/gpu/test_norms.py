"""The Triton kernels of norms and SwiGLU's activation, in Triton's interpreter.

Against the reference ops. Needs Triton: `tests/run_triton.sh`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.triton_here import INTERPRETS, NO_INTERPRETER
from torch import Tensor

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from mtpc.backends.triton_kernels import ELEMENTS, load_kernels
from mtpc.backends.triton_kernels.plans import plan

pytestmark = pytest.mark.triton

load_kernels()
OURS = torch.ops.mtpc_triton
REFERENCE = torch.ops.mtpc
EPSILON = 1e-5
TOLERANCE = {
    torch.float32: 2e-6,  # The order of a sum.
    torch.float16: 2**-10,  # A sum in another order may round a result to its neighbour.
    torch.bfloat16: 2**-5,  # The interpreter's casts to bfloat16 truncate: a step of 2^-7 each.
}
WIDTHS = [1, 64, 80, 1024, 7168]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(namespace: Any, x: Tensor) -> Tensor:
    return namespace.rms_norm(x, _weight(x), EPSILON)


def norm_plus_one(namespace: Any, x: Tensor) -> Tensor:
    return namespace.rms_norm(x, _weight(x), EPSILON, True)


def added_norm(namespace: Any, x: Tensor) -> Tensor:
    """The sum and its norm. Summands are small multiples of a half, so that the sum is exact: a
    truncated one would have another norm."""
    x = (2 * x).round() / 2
    return torch.cat(namespace.add_rms_norm(x, x.flip(-1), _weight(x), EPSILON), -1)


def added_norm_plus_one(namespace: Any, x: Tensor) -> Tensor:
    x = (2 * x).round() / 2
    return torch.cat(namespace.add_rms_norm(x, x.flip(-1), _weight(x), EPSILON, True), -1)


def entry(namespace: Any, x: Tensor) -> Tensor:
    return namespace.draft_entry(x, _weight(x), x.flip(-1), _weight(x, 8), EPSILON)


def entry_plus_one(namespace: Any, x: Tensor) -> Tensor:
    return namespace.draft_entry(x, _weight(x), x.flip(-1), _weight(x, 8), EPSILON, True)


def activation(namespace: Any, x: Tensor) -> Tensor:
    return namespace.silu_and_mul(torch.cat([x, x.flip(-1)], -1))


def _weight(x: Tensor, seed: int = 7) -> Tensor:
    return random(x.shape[-1], dtype=x.dtype, seed=seed)


NORMS = [norm, norm_plus_one, added_norm, added_norm_plus_one, entry, entry_plus_one]
CALLS = [*NORMS, activation]


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("call", CALLS)
def test_kernels_are_their_references(
    call: Callable[..., Tensor], width: int, dtype: torch.dtype
) -> None:
    for rows in (1, 19):
        x = random(rows, width, dtype=dtype, seed=width)
        found, expected = call(OURS, x), call(REFERENCE, x)
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("call", CALLS)
def test_results_are_rounded_where_the_reference_rounds(call: Callable[..., Tensor]) -> None:
    """In float16, which the interpreter rounds as devices do: nearly all bits."""
    x = random(40, 256, dtype=torch.float16)
    assert (call(OURS, x) != call(REFERENCE, x)).float().mean() < 0.01


def test_roundings_in_between_would_be_missed() -> None:
    """The sum is rounded before its norm, and the norm before its weight: without either, a good
    part of the results would differ from the reference's."""
    x, added = (random(40, 256, dtype=torch.float16, seed=seed) for seed in (1, 2))
    weight = _weight(x)
    total, normed = OURS.add_rms_norm(x, added, weight, EPSILON)
    assert torch.equal(total, x + added)
    expected = REFERENCE.add_rms_norm(x, added, weight, EPSILON)[1]
    assert (normed != expected).float().mean() < 0.01
    for wide, dtype in ((x.float() + added.float(), torch.float16), (total.float(), torch.float32)):
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        loose = ((wide * inverse).to(dtype) * weight).half()
        assert (loose != expected).float().mean() > 0.05


@pytest.mark.parametrize("call", NORMS)
def test_bfloat16_with_numbers_that_no_cast_changes(call: Callable[..., Tensor]) -> None:
    """Where the interpreter's truncation does not matter, results are equal: a mean square of 16,
    whose root is exact, or 64 for sums."""
    x = torch.zeros(7, 64, dtype=torch.bfloat16)
    x[:, :8] = x[:, -8:] = 8.0
    signs = torch.where(random(7, 64, seed=3) > 0, 1.0, -1.0)
    x = (x * signs).to(torch.bfloat16)
    x[:, 32:] = x[:, :32].flip(-1)  # So that the sum with the flipped row is twice the row.
    weight, other = (torch.randint(-8, 9, (64,)).to(torch.bfloat16) / 4 for _ in range(2))

    def run(namespace: Any) -> Tensor:
        plus_one = call in (norm_plus_one, added_norm_plus_one, entry_plus_one)
        if call in (norm, norm_plus_one):
            return namespace.rms_norm(x, weight, 0.0, plus_one)
        if call in (added_norm, added_norm_plus_one):
            return torch.cat(namespace.add_rms_norm(x, x, weight, 0.0, plus_one), -1)
        return namespace.draft_entry(x, weight, x.flip(0), other, 0.0, plus_one)

    assert torch.equal(run(OURS), run(REFERENCE))


@pytest.mark.parametrize("width", [64, 80, 2048])
@pytest.mark.parametrize("call", CALLS)
def test_rows_do_not_depend_on_rows(call: Callable[..., Tensor], width: int) -> None:
    """Padded rows hold anything. A row that is not finite is seen as such, in its own place."""
    x = random(21, width, dtype=torch.float16)
    expected = call(OURS, x)
    for value in (torch.nan, torch.inf):
        poisoned = x.clone()
        poisoned[5], poisoned[17:] = value, torch.nan
        found = call(OURS, poisoned)
        others = [row for row in range(17) if row != 5]
        assert torch.equal(found[others], expected[others])
        if value != value or call is not activation:  # silu(inf) inf is as it should be.
            assert found[5].isnan().any()
    assert torch.equal(call(OURS, x[20:]), expected[20:])


@pytest.mark.parametrize("call", CALLS)
def test_heads_strides_and_no_rows(call: Callable[..., Tensor]) -> None:
    """Heads of a joint projection, latents beside others, columns that are not adjacent."""
    joint = random(2, 7, 192, dtype=torch.float16)
    for x in (
        joint[..., 64:160].unflatten(-1, (6, 16)),
        joint[..., :96],
        joint.transpose(1, 2),
        joint[0, :, ::3],
    ):
        assert not x.is_contiguous()
        assert torch.equal(call(OURS, x), call(OURS, x.contiguous()))
    assert call(OURS, joint[:0]).shape == call(REFERENCE, joint[:0]).shape


def test_summands_and_halves_with_strides_of_their_own() -> None:
    joint = random(5, 144, dtype=torch.float16)
    x, other, weight = joint[:, :48], joint[:, 96:].flip(0), random(48, dtype=torch.float16)
    for found, expected in zip(
        OURS.add_rms_norm(x, other, weight, EPSILON),
        OURS.add_rms_norm(x.contiguous(), other, weight, EPSILON),
        strict=True,
    ):
        assert torch.equal(found, expected)
    found = OURS.draft_entry(x, weight, other, 2 * weight, EPSILON)
    assert torch.equal(found[:, :48], OURS.rms_norm(x, weight, EPSILON))
    assert torch.equal(found[:, 48:], OURS.rms_norm(other, 2 * weight, EPSILON))


@pytest.mark.parametrize(("width", "rows", "grid", "threads"), [
    (7168, 4, (4, 1, 1), 512), (128, 96, (12, 1, 1), 64), (1, 5, (1, 1, 1), 64),
])  # fmt: skip
def test_one_launch_whose_grid_is_of_the_sizes(
    width: int, rows: int, grid: tuple[int, int, int], threads: int
) -> None:
    x, weight = random(rows, width), random(width)
    (alone,), _ = plan("rms_norm", x, weight, EPSILON)
    (added,), _ = plan("add_rms_norm", x, x, weight, EPSILON)
    (both,), _ = plan("draft_entry", x, weight, x, weight, EPSILON)
    assert alone.grid == added.grid == grid
    assert both.grid == (grid[0], 2, 1)
    assert {launch.threads for launch in (alone, added, both)} == {threads}


def test_schemas_and_fakes() -> None:
    """Of both namespaces: what Inductor sees into, and what it does not."""
    x, weight = random(3, 2, 64), random(64)
    for namespace in (OURS, torch.ops.mtpc_loaded):
        for op, arguments in (
            (namespace.rms_norm, (x, weight, EPSILON, True)),
            (namespace.add_rms_norm, (x, x, weight, EPSILON)),
            (namespace.draft_entry, (x, weight, x, weight, EPSILON)),
            (namespace.silu_and_mul, (x,)),
            (namespace.rotate, (x, random(3, 32), random(3, 32))),
        ):
            tests = ("test_schema", "test_faketensor")
            torch.library.opcheck(op.default, arguments, test_utils=tests)

"""The Triton kernels that choose the largest numbers of rows, in Triton's interpreter.

Against the reference ops, whose order among equals is defined. Needs Triton: `tests/run_triton.sh`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from helpers.triton_here import INTERPRETS, NO_INTERPRETER
from torch import Tensor, fx

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from mtpc.backends.triton_kernels import ELEMENTS, load_kernels, refuses
from mtpc.backends.triton_kernels.plans import plan

pytestmark = pytest.mark.triton

load_kernels()
OURS = torch.ops.mtpc_triton
REFERENCE = torch.ops.mtpc
ODD = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-40, -1e-40, 3.0, 3.0, -3.0, 6e4]
"""Numbers whose bits are not in their order. 1e-40 is denormal in bfloat16, and the interpreter's
cast of those is wrong."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _odd_rows(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    gen = torch.Generator().manual_seed(width)
    odd = torch.tensor([x for x in ODD if dtype != torch.bfloat16 or abs(x) != 1e-40])
    return odd[torch.randint(len(odd), (rows, width), generator=gen)].to(dtype)


def _equal(found: Any, expected: Any) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize(
    ("width", "count"), [(1, 1), (8, 8), (32, 2), (160, 6), (256, 8), (1024, 16)]
)
def test_topk_is_its_reference(width: int, count: int, dtype: torch.dtype) -> None:
    """Of numbers that differ, of a few that are equal, and of all kinds of them."""
    for x in (
        random(5, width, dtype=dtype),
        (2 * random(5, width)).round().to(dtype),
        _odd_rows(9, width, dtype),
        torch.full((2, width), torch.nan, dtype=dtype),
        torch.full((2, width), -torch.inf, dtype=dtype),
    ):
        values, places = found = OURS.topk(x, count)
        _equal(found, REFERENCE.topk(x, count))
        _equal([values], [x.gather(-1, places)])
        assert all(len(set(row)) == count for row in places.tolist())


def test_topk_of_groups_and_of_rows_that_are_not_adjacent() -> None:
    x = random(2, 7, 96)
    for rows in (x, x[..., 32:64], x.unflatten(-1, (4, 24)), x.transpose(1, 2), x[0, :, ::3]):
        _equal(OURS.topk(rows, 3), REFERENCE.topk(rows, 3))
    _equal(OURS.topk(x[:, :0], 3), REFERENCE.topk(x[:, :0], 3))


@pytest.mark.parametrize(
    ("width", "groups", "kept", "count"),
    [(256, 8, 4, 8), (160, 8, 3, 6), (4, 2, 1, 2), (30, 5, 2, 6), (36, 3, 3, 8), (16, 8, 1, 5),
     (1024, 16, 4, 16)],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:invalid value encountered in add:RuntimeWarning")
def test_group_topk_is_its_reference(width: int, groups: int, kept: int, count: int) -> None:
    """The last but one has fewer numbers in its group than it chooses: others follow, at -inf."""
    for x in (
        random(5, width),
        (2 * random(5, width)).round(),
        _odd_rows(9, width, torch.float32),
        torch.full((2, width), torch.nan),
        torch.full((2, width), -torch.inf),
        random(5, 2 * width)[:, :width],
    ):
        _, places = found = OURS.group_topk(x, count, groups, kept)
        _equal(found, REFERENCE.group_topk(x, count, groups, kept))
        assert all(len(set(row)) == count for row in places.tolist())
    _equal(OURS.group_topk(x[:0], 2, 2, 1), REFERENCE.group_topk(x[:0], 2, 2, 1))


def test_topk_is_one_launch_of_a_warp_a_row() -> None:
    (launch,), _ = plan("topk", random(4, 8, 32), 2)
    assert (launch.grid, launch.threads) == ((32, 1, 1), 32)
    (launch,), _ = plan("group_topk", random(4, 256), 8, 8, 4)
    assert (launch.grid, launch.threads) == ((4, 1, 1), 32)


@pytest.mark.parametrize(
    ("width", "dtype"), [*product([1, 1000, 1024, 1025, 9001], ELEMENTS), (70_000, ELEMENTS[0])]
)
def test_row_max_is_its_reference(width: int, dtype: torch.dtype) -> None:
    """The first of equals, within a block and of several blocks; NaN above all."""
    far = torch.zeros(3, width, dtype=dtype)
    far[0, -1] = far[1, width // 2 :] = 1
    far[2, width // 2] = torch.nan
    for x in (
        random(4, width, dtype=dtype),
        (2 * random(4, width)).round().to(dtype),
        _odd_rows(6, width, dtype),
        far,
        torch.full((2, width), torch.nan, dtype=dtype),
        torch.full((2, width), -torch.inf, dtype=dtype),
    ):
        values, places = found = OURS.row_max(x)
        _equal(found, REFERENCE.row_max(x))
        _equal([values], [x.gather(-1, places[:, None])[:, 0]])


def test_row_max_of_rows_that_are_not_adjacent_and_of_one() -> None:
    x = random(2, 3, 5000)
    for rows in (x, x[..., 900:3000], x.transpose(0, 1), x[0, :, ::3], x[0, 0], x[:, :0]):
        _equal(OURS.row_max(rows), REFERENCE.row_max(rows))


def test_row_max_has_a_program_for_each_block_and_one_for_each_row() -> None:
    launches, _ = plan("row_max", random(2, 2, 102_400))
    assert [launch.grid for launch in launches] == [(4, 100, 1), (4, 1, 1)]


@pytest.mark.parametrize(
    ("width", "count", "reason"),
    [(1024, 16, None), (1025, 16, "16 of 1025; it takes up to 16 of 1024"),
     (1024, 17, "17 of 1024; it takes up to 16 of 1024")],
)  # fmt: skip
def test_what_does_not_fit_stays_with_the_reference(
    width: int, count: int, reason: str | None
) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = random(2, width)
    call = graph.call_function(torch.ops.mtpc.topk.default, (x, count))
    assert refuses(call, None) == reason  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "groups", "reason"),
    [(random(2, 1024), 8, None), (random(2, 32).half(), 8, "float16; it takes float32"),
     (random(2, 1020), 34,
      "34 groups of 30; rounded to powers of two, it takes up to 1024")],
)  # fmt: skip
def test_groups_that_do_not_fit_stay_with_the_reference(
    x: Tensor, groups: int, reason: str | None
) -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = x
    call = graph.call_function(torch.ops.mtpc.group_topk.default, (node, 8, groups, 4))
    assert refuses(call, None) == reason  # type: ignore[arg-type]


def test_schemas_and_fakes() -> None:
    """Of both namespaces: what Inductor sees into, and what it does not."""
    for namespace in (OURS, torch.ops.mtpc_loaded):
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(namespace.topk.default, (random(3, 2, 64), 4), test_utils=tests)
        groups = (random(3, 64), 4, 8, 2)
        torch.library.opcheck(namespace.group_topk.default, groups, test_utils=tests)
        torch.library.opcheck(namespace.row_max.default, (random(3, 2, 64),), test_utils=tests)

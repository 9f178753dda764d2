"""The Triton kernel of rotary embedding and cache writes, in Triton's interpreter.

Against the four operators that it stands for; and that of rotary embedding alone. Needs Triton:
`tests/run_triton.sh`.
"""

from __future__ import annotations

import pytest
import torch
from helpers.triton_here import INTERPRETS, NO_INTERPRETER
from torch import Tensor

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from mtpc.backends.triton_kernels import ELEMENTS, load_kernels
from mtpc.errors import BackendError

pytestmark = pytest.mark.triton

load_kernels()
OURS = torch.ops.mtpc_triton
REFERENCE = torch.ops.mtpc


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small multiples of a half, whose products and sums every dtype holds: the interpreter's cast
    to bfloat16 truncates, a device's rounds."""
    return (torch.randint(-8, 9, shape) / 2).to(dtype)


def make_rows(
    tokens: int, heads: tuple[int, int], dims: tuple[int, int, int], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """q, k, v that are slices of a joint projection; cos, sin; caches of 8 pages of 4 slots."""
    (count, kv_count), (width, turned, v_width) = heads, dims
    sizes = [count * width, kv_count * width, kv_count * v_width]
    joint = random(tokens, sum(sizes), dtype=dtype).split(sizes, 1)
    of_heads = zip(joint, (count, kv_count, kv_count), strict=True)
    rows = [part.unflatten(1, (number, -1)) for part, number in of_heads]
    angles = [random(tokens, turned, dtype=dtype) for _ in range(2)]
    caches = [random(8, 4, kv_count, dim, dtype=dtype) for dim in (width, v_width)]
    return rows, angles, caches


def expect(rows: list[Tensor], angles: list[Tensor], caches: list[Tensor], slots: Tensor) -> Tensor:
    """The rotated queries; writes the caches."""
    q, k, v = rows
    REFERENCE.write_cache(caches[0], REFERENCE.rotate(k, *angles), slots, None)
    REFERENCE.write_cache(caches[1], v, slots, None)
    return REFERENCE.rotate(q, *angles)


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("tokens", range(1, 6))
@pytest.mark.parametrize(
    ("heads", "dims"),
    [
        ((4, 4), (16, 16, 16)),
        ((6, 2), (24, 8, 10)),
        ((5, 1), (6, 2, 40)),
        ((20, 10), (12, 12, 5)),
    ],
)
def test_it_is_the_four_operators(
    heads: tuple[int, int], dims: tuple[int, int, int], tokens: int, dtype: torch.dtype
) -> None:
    rows, angles, caches = make_rows(tokens, heads, dims, dtype)
    slots = torch.tensor([17, -1, 4, -7, 31])[:tokens]
    ours = [cache.clone() for cache in caches]
    found = OURS.rotate_and_write(*rows, *angles, *ours, slots, None, None)
    assert torch.equal(found, expect(rows, angles, caches, slots))
    for cache, expected in zip(ours, caches, strict=True):
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("heads", [1, 5, 20])
@pytest.mark.parametrize("dims", [(16, 16), (24, 8), (6, 2)])
def test_heads_that_no_cache_write_follows(
    dims: tuple[int, int], heads: int, dtype: torch.dtype
) -> None:
    width, turned = dims
    x = random(5, 3, heads * width, dtype=dtype)[:, 1].unflatten(1, (heads, width))
    angles = [random(5, 2 * turned, dtype=dtype)[:, :turned] for _ in range(2)]
    assert torch.equal(OURS.rotate(x, *angles), REFERENCE.rotate(x, *angles))
    for tokens in range(5):
        first = (x[:tokens], *(part[:tokens] for part in angles))
        assert torch.equal(OURS.rotate(*first), REFERENCE.rotate(*first))
    poisoned = x.clone()
    poisoned[3] = torch.nan
    others = [0, 1, 2, 4]
    found = OURS.rotate(poisoned, *angles)[others]
    assert torch.equal(found, OURS.rotate(x, *angles)[others])


def test_roundings_are_those_of_the_operators() -> None:
    """In float16, which the interpreter rounds as devices do: each product, then the sum."""
    rows, angles, caches = make_rows(9, (4, 2), (32, 32, 32), torch.float16)
    rows, angles = ([torch.randn(x.shape).half() for x in some] for some in (rows, angles))
    found = OURS.rotate_and_write(*rows, *angles, *caches, torch.full((9,), -1), None, None)
    assert torch.equal(found, REFERENCE.rotate(rows[0], *angles))
    assert torch.equal(OURS.rotate(rows[0], *angles), found)


def test_rows_without_a_slot_may_hold_anything() -> None:
    rows, angles, caches = make_rows(4, (4, 2), (16, 16, 16), torch.float32)
    for part in (*rows, *angles):
        part[2:] = torch.nan
    slots = torch.tensor([3, 9, -1, -1])
    found = OURS.rotate_and_write(*rows, *angles, *caches, slots, None, None)
    assert found[:2].isfinite().all()
    assert all(cache.isfinite().all() for cache in caches)


def test_it_writes_no_other_memory() -> None:
    rows, angles, _ = make_rows(3, (4, 2), (16, 16, 16), torch.float32)
    memory = [torch.zeros(20, 4, 2, 16) for _ in range(2)]
    slots = torch.tensor([32, 2**40, 3])
    OURS.rotate_and_write(*rows, *angles, *(m[:8] for m in memory), slots, None, None)
    for cache in memory:
        flat = cache.flatten(0, 1)
        assert flat[3].any()
        flat[3] = 0
        assert not flat.any()


def test_no_rows_and_strided_caches() -> None:
    rows, angles, caches = make_rows(3, (4, 2), (16, 16, 16), torch.float32)
    none = [x[:0] for x in (*rows, *angles)]
    assert OURS.rotate_and_write(*none, *caches, torch.zeros(0).long(), None, None).shape == (
        0,
        4,
        16,
    )
    turned = caches[0].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(BackendError, match="expected contiguous"):
        OURS.rotate_and_write(*rows, *angles, turned, caches[1], torch.arange(3), None, None)

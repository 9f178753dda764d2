"""Kernels on weights with scales of groups: float64, the reference's bits, rows, and memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers.batches import bf16, mixture
from helpers.compiled import run_on
from helpers.grouped import FORMS, Packed, Zeros, bound, exact, pack_codes, random_weight
from helpers.places import TESTS
from helpers.small_graphs import small_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtpc.backends.cpu_kernels import load_kernels
from mtpc.backends.cpu_kernels.levels import chosen_level
from mtpc.backends.lower_tape import lower_to_tape
from mtpc.backends.tape import open_tape, write_tape
from mtpc.capture.graph import get_tensor
from mtpc.store.machine import cpu_flags
from mtpc.weights.grouped import Kind

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_cpu, torch.ops.mtpc
ROUNDS_ONCE = chosen_level(cpu_flags()).name != "portable"
"""Whether a product and its addition are rounded as one, as in the reference."""
KINDS: list[Kind] = ["int4", "int8", "float8"]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS),
    group=st.sampled_from([4, 16, 20, 32, 64, 68, 80, 160]),
    groups=st.integers(1, 4),
    features=st.integers(1, 100),
    points=st.sampled_from(["", "zeros", "mins"]),
    scales=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    rows=st.integers(1, 17),
    outlier=st.sampled_from([1.0, 1e4]),
)
def test_kernel_against_float64_and_the_reference(
    kind: Kind, group: int, groups: int, features: int, points: Zeros, scales: torch.dtype,
    rows: int, outlier: float,
) -> None:  # fmt: skip
    """Integer codes give the reference's bits; float8 adds up in another order than torch."""
    group *= 2 if kind == "int4" else 1
    made = random_weight(
        kind, (features, group * groups), group, zeros=points, scales=scales, seed=features
    )
    x = bf16(rows, group * groups, seed=rows).float()
    x[0, -1] *= outlier
    x[-1, :group] = 0
    found = OURS.grouped_linear(x, *made.operands)
    right = exact(x, made.weight)
    assert bool(((found.double() - right).abs() <= bound(x, made.weight)).all())
    reference = REFERENCE.grouped_linear(x, *made.operands)
    if ROUNDS_ONCE and kind != "float8":
        assert torch.equal(found, reference)
    else:
        both = 2 * bound(x, made.weight)
        assert bool(((found - reference).abs() <= both).all())


@pytest.mark.parametrize(("kind", "group", "points"), FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_do_not_depend_on_rows_or_threads(
    kind: Kind, group: int, points: Zeros, dtype: torch.dtype
) -> None:
    made = random_weight(kind, (200, 512), group, zeros=points)
    x, bias = bf16(70, 512, seed=1).to(dtype), bf16(200, seed=2)
    operands = (*made.operands, bias)
    with run_on(1):
        together = OURS.grouped_linear(x, *operands)
    for rows in (*range(1, 18), 70):
        with run_on(1 + rows % 2):
            assert torch.equal(OURS.grouped_linear(x[-rows:], *operands), together[-rows:])
    assert together.dtype == dtype
    assert OURS.grouped_linear(x[:0], *operands).shape == (0, 200)
    turned = x.t().contiguous().t()
    assert torch.equal(
        OURS.grouped_linear(turned.view(7, 10, 512), *operands).view(70, 200), together
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_of_rows(dtype: torch.dtype) -> None:
    made, bias = random_weight("int8", (70, 132), 132), bf16(70).to(dtype)
    x = bf16(3, 5, 132, seed=1).to(dtype)
    found = OURS.grouped_linear(x, *made.operands, bias)
    expected = REFERENCE.grouped_linear(x, *made.operands, bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_codes_are_packed_by_fours() -> None:
    codes = torch.randint(0, 256, (70, 36), dtype=torch.uint8)
    packed = pack_codes(codes, "int8")
    ours = torch.empty_like(packed)
    OURS.pack(codes, ours)
    assert torch.equal(ours, packed)


@pytest.mark.parametrize(("kind", "group", "points"), FORMS)
def test_scales_that_are_zero_subnormal_or_not_a_number(
    kind: Kind, group: int, points: Zeros
) -> None:
    made = random_weight(kind, (40, 512), group, zeros=points, scales=torch.float16)
    x = bf16(3, 512, seed=1).float()
    before = OURS.grouped_linear(x, *made.operands)
    for scales in (made.weight.scales, made.weight.zeros):
        if scales is not None and scales.dtype == torch.float16:
            scales[3] = 0
            scales[5] = 2.0**-24
            scales[39, -1] = torch.nan
    for namespace in (OURS, REFERENCE):
        found = namespace.grouped_linear(x, *made.operands)
        assert not found[:, 3].any()
        assert bool(found[:, 39].isnan().all())
        right, most = (f(x, made.weight)[:, 5] for f in (exact, bound))
        assert bool(((found[:, 5].double() - right).abs() <= most).all())
        assert bool(found[:, 5].abs().max() > 0)
    others = [feature for feature in range(40) if feature not in (3, 5, 39)]
    found = OURS.grouped_linear(x, *made.operands)
    assert torch.equal(found[:, others], before[:, others])


@pytest.mark.parametrize(("kind", "group", "points"), FORMS)
def test_inputs_that_are_no_numbers_or_tiny(kind: Kind, group: int, points: Zeros) -> None:
    """They concern their own rows. A group of integers for tiny inputs is zero."""
    made = random_weight(kind, (33, 512), group, zeros=points)
    x = bf16(5, 512, seed=1).float()
    before = OURS.grouped_linear(x, *made.operands)
    x[1, 7], x[2, 300], x[3] = torch.nan, torch.inf, 1e-37
    for namespace in (OURS, REFERENCE):
        found = namespace.grouped_linear(x, *made.operands)
        assert bool((~found[1].isfinite()).all())
        assert bool((~found[2].isfinite()).all())
        assert bool((found[3].abs() < 1e-34).all())
    assert torch.equal(OURS.grouped_linear(x, *made.operands)[[0, 4]], before[[0, 4]])


def test_a_float8_that_is_no_number_is_kept() -> None:
    made = random_weight("float8", (40, 128), 64)
    made.weight.codes[9, 3] = torch.nan
    x = bf16(4, 128)
    x[:, 3] = 0
    found = OURS.grouped_linear(x, *made.operands)
    assert found.isnan().any(0).nonzero().flatten().tolist() == [9]
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    made.weight.codes[:32] = every.view(2, 128).repeat(16, 1)
    made.weight.codes[32:] = 1
    found = OURS.grouped_linear(torch.eye(128), *made.operands)
    expected = exact(torch.eye(128), made.weight).float()
    numbers = ~found.isnan()
    assert bool(found.isnan().any(0)[:32].all())  # Both 0x7f and 0xff.
    assert torch.equal(found[numbers], expected[numbers])


@pytest.mark.parametrize(("kind", "group", "points"), FORMS)
def test_rows_that_are_not_used_stay_away(kind: Kind, group: int, points: Zeros) -> None:
    made = random_weight(kind, (128, 256), group, zeros=points)
    x = bf16(9, 256)
    whole = OURS.grouped_linear(x, *made.operands)
    x[6:] = torch.nan
    rows = torch.tensor([6], dtype=torch.int32)
    for namespace in (OURS, REFERENCE):
        found = namespace.grouped_linear(x, *made.operands, None, rows)
        assert bool(found[:6].isfinite().all())
    assert torch.equal(OURS.grouped_linear(x, *made.operands, None, rows)[:6], whole[:6])
    gated = OURS.grouped_gated_linear(x, *made.operands, rows)[:6]
    assert torch.equal(gated, OURS.silu_and_mul(whole[:6]))


@pytest.mark.parametrize(("kind", "group", "points"), FORMS)
@pytest.mark.parametrize("features", [1, 97, 4000])
def test_the_largest_is_that_of_the_layer(
    kind: Kind, group: int, points: Zeros, features: int
) -> None:
    made = random_weight(kind, (features, 256), group, zeros=points)
    x, bias = bf16(5, 256), bf16(features, seed=1)
    for namespace in (OURS, REFERENCE):
        values, indices = namespace.grouped_linear_max(x, *made.operands, bias)
        expected = namespace.grouped_linear(x, *made.operands, bias).max(-1)
        assert torch.equal(values, expected.values)
        assert torch.equal(indices, expected.indices)


@pytest.mark.parametrize(("kind", "group", "points"), FORMS)
def test_a_tape_calls_them(kind: Kind, group: int, points: Zeros) -> None:
    """With codes of each dtype as weights, and with zero points or without."""
    codes, scales, zeros = random_weight(kind, (64, 256), group, zeros=points).parts
    tensors = {"x": bf16(3, 256), "codes": codes, "scales": scales}
    if zeros is not None:
        tensors["zeros"] = zeros

    def layer(out: Tensor, x: Tensor, *parts: Tensor) -> None:
        out.copy_(OURS.grouped_linear(x, *parts[:2], parts[2] if parts[2:] else None, 64))

    graph = small_graph(layer, batch_out=torch.zeros(3, 64).bfloat16(), **tensors)
    text = write_tape(*lower_to_tape(graph))
    open_tape(text, lambda name: get_tensor(graph.module, name))()
    assert torch.equal(
        graph.buffer("batch.out"), OURS.grouped_linear(tensors["x"], codes, scales, zeros, 64)
    )


# ---- Experts ---------------------------------------------------------------------------------


def experts_of(
    tokens: int, kind: Kind, groups: tuple[int, int], dtype: torch.dtype, points: Zeros = ""
) -> tuple[Tensor | None, ...]:
    """Arguments of grouped_experts: six experts, 256 hidden and 64 intermediate features."""
    mix = mixture(tokens, (6, 256, 64), dtype)
    wide, narrow = (
        random_weight(kind, shape, group, zeros=points, seed=group)
        for shape, group in zip(((6, 128, 256), (6, 256, 64)), groups, strict=True)
    )
    return mix.x, *wide.parts, *narrow.parts, mix.ids, mix.weights


CASES: list[tuple[Kind, tuple[int, int], Zeros]] = [
    ("int4", (32, 32), ""),
    ("int4", (128, 64), "zeros"),
    ("int4", (32, 32), "mins"),
    ("int8", (256, 64), ""),
    ("float8", (128, 64), ""),
]


@pytest.mark.parametrize(("kind", "groups", "points"), CASES)
@pytest.mark.parametrize("options", [{}, {"limit": 0.4, "limit_input": True}, {"gelu": True}])
def test_experts_against_the_reference(
    kind: Kind, groups: tuple[int, int], points: Zeros, options: dict[str, Any]
) -> None:
    """An activation on the edge between two integers may be rounded to either: one step of it."""
    arguments = experts_of(13, kind, groups, torch.float32, points)
    found = OURS.grouped_experts(*arguments, **options)
    expected = REFERENCE.grouped_experts(*arguments, **options)
    assert float((found - expected).norm()) <= 2e-3 * float(expected.norm()) > 0


@pytest.mark.parametrize(("kind", "groups", "points"), CASES)
def test_rows_of_experts_do_not_depend_on_rows(
    kind: Kind, groups: tuple[int, int], points: Zeros
) -> None:
    x, *weights, ids, shares = experts_of(21, kind, groups, torch.bfloat16, points)
    together = OURS.grouped_experts(x, *weights, ids, shares)
    with run_on(2):
        assert torch.equal(OURS.grouped_experts(x, *weights, ids, shares), together)
    for row in range(21):
        one = slice(row, row + 1)
        alone = OURS.grouped_experts(x[one], *weights, ids[one], shares[one])
        assert torch.equal(alone, together[one])
    dirty = x.clone()
    dirty[17:] = torch.nan
    rows = torch.tensor([17])
    found = OURS.grouped_experts(dirty, *weights, ids, shares, rows=rows)
    assert torch.equal(found[:17], together[:17])


def test_nothing_is_read_outside_the_weights() -> None:
    """Nor are experts that nobody chose: that memory may not be read. A process that does dies."""
    done = subprocess.run([sys.executable, "-c", _GUARDED], cwd=TESTS, check=False)
    assert done.returncode == 0


_GUARDED = """
import ctypes, mmap, torch
from helpers.batches import bf16, mixture
from helpers.grouped import random_weight
from mtpc.backends.cpu_kernels import load_kernels
load_kernels()
OURS = torch.ops.mtpc_cpu
libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
kept = []

def forbid(place, size):
    assert place % page == 0 == size % page
    assert libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(size), 0) == 0

def guarded(t):
    # Ends where a page begins that may not be read, and begins where one ends if it fills pages.
    if t is None:
        return None
    whole = -(-t.nbytes // page) * page
    memory = mmap.mmap(-1, whole + 2 * page)
    start = page + whole - t.nbytes
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    kept.append(memory)
    copy = raw[start : start + t.nbytes].view(t.dtype).view(t.shape).copy_(t)
    forbid(raw.data_ptr(), page)
    forbid(raw.data_ptr() + page + whole, page)
    return copy

for kind, group, points in (("int4", 32, "zeros"), ("int4", 40, ""), ("int8", 160, "zeros"),
                            ("int4", 32, "mins"), ("float8", 32, "")):
    made = random_weight(kind, (70, 160), group, zeros=points)
    for rows in (1, 3, 5, 9):
        x = bf16(rows, 160)
        expected = OURS.grouped_linear(x, *made.operands)
        parts = [guarded(t) for t in made.parts]
        assert torch.equal(OURS.grouped_linear(guarded(x), *parts, 70), expected)

mix = mixture(9, (4, 256, 128), torch.bfloat16)
mix.ids.fill_(1)
mix.ids[:, 1] = 3
wide, narrow = (random_weight("int4", s, 32) for s in ((4, 256, 256), (4, 256, 128)))
wide, narrow = list(wide.parts), list(narrow.parts)
expected = OURS.grouped_experts(mix.x, *wide, *narrow, mix.ids, mix.weights)
for codes in (wide, narrow):
    codes[0] = guarded(codes[0])
    for expert in (0, 2):
        forbid(codes[0][expert].data_ptr(), codes[0][expert].nbytes)
found = OURS.grouped_experts(mix.x, *wide, *narrow, mix.ids, mix.weights)
assert torch.equal(found, expected)
"""


def test_schemas_and_fakes() -> None:
    made, x = random_weight("int4", (64, 64), 32, zeros="zeros"), bf16(3, 64)
    tests = ("test_schema", "test_faketensor")
    for namespace in (OURS, REFERENCE):
        for name in ("grouped_linear", "grouped_linear_max", "grouped_gated_linear"):
            op = getattr(namespace, name).default
            torch.library.opcheck(op, (x, *made.operands), test_utils=tests)
        arguments = experts_of(3, "int8", (32, 32), torch.bfloat16)
        torch.library.opcheck(namespace.grouped_experts.default, arguments, test_utils=tests)


def replaced(made: Packed, index: int, value: Tensor | None) -> list[Tensor | int | None]:
    operands: list[Tensor | int | None] = list(made.operands)
    operands[index] = value
    return operands


def test_misfits_are_refused() -> None:
    made, x = random_weight("int4", (64, 64), 32, zeros="zeros"), bf16(3, 64)
    codes, scales, zeros = made.parts
    assert zeros is not None
    for rows, operands, message in (
        (x[:, :48], made.operands, "do not fit 48 inputs"),
        (x, replaced(made, 0, codes.int()), "do not fit 64 inputs"),
        (x, replaced(made, 0, codes[:1]), "of 64 features do not fit"),
        (x, replaced(made, 0, codes.transpose(1, 2)), "do not fit"),
        (x, replaced(made, 1, scales.double()), "do not fit"),
        (x, replaced(made, 1, scales[:, :1].contiguous()), "do not fit"),
        (x, replaced(made, 2, zeros.int()), "do not fit"),
        (x, replaced(made, 2, zeros.float()), "do not fit"),  # Minima are of the scales' dtype.
        (x, (*made.operands, bf16(63)), r"bias \[64\]"),
    ):
        with pytest.raises(RuntimeError, match=message):
            OURS.grouped_linear(rows, *operands)
    with pytest.raises(RuntimeError, match="expected bfloat16 x"):
        OURS.grouped_linear_max(x.float(), *made.operands)
    with pytest.raises(RuntimeError, match="expected bfloat16 x"):
        OURS.grouped_gated_linear(x.float(), *made.operands)
    arguments = list(experts_of(3, "int4", (32, 32), torch.bfloat16))
    for index, value, message in (
        (0, bf16(3, 192), "do not fit 192 inputs"),
        (4, bf16(3), "packed stacks"),
        (5, None, "scales"),
    ):
        wrong = [*arguments]
        wrong[index] = value if value is not None else arguments[5][:, :1]  # type: ignore[index]
        with pytest.raises(RuntimeError, match=message):
            OURS.grouped_experts(*wrong)

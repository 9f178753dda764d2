"""Caches of codes on the Triton kernels, in Triton's interpreter, against the reference operators.

Needs Triton: `tests/run_triton.sh`. Other tests of these operators have plain caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.batches import EACH_WIDTH, Batch, close, make_batch
from helpers.coded import CODES, bits, coded, paged, rows_of_all_kinds
from helpers.triton_here import INTERPRETS, NO_INTERPRETER
from torch import Tensor

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from mtpc.backends.triton_kernels import ELEMENTS, load_kernels
from mtpc.backends.triton_kernels.configs import BATCH_INVARIANT
from mtpc.backends.triton_kernels.plans import plan
from mtpc.errors import BackendError

pytestmark = pytest.mark.triton

load_kernels()
OURS = torch.ops.mtpc_triton
REFERENCE = torch.ops.mtpc
DTYPES = list(ELEMENTS)
EACH_CODE = pytest.mark.parametrize("codes", CODES)
ONE_CODE = pytest.mark.parametrize(
    "codes", [CODES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in CODES[1:])]
)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Codes of the same bits; scales likewise, and NaN where there should be NaN."""
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    else:
        assert torch.equal(bits(found), bits(wanted))


# ---- write_cache, rotate_and_write -----------------------------------------------------------


@EACH_CODE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(3, 64), (1, 5), (11, 40)])
def test_codes_and_scales_have_the_bits_of_the_reference(
    heads: int, width: int, dtype: torch.dtype, codes: torch.dtype
) -> None:
    """Zeros, subnormal numbers, NaN, infinities, ties, and rows without a slot."""
    rows = rows_of_all_kinds(dtype, width, heads)
    slots = torch.tensor([4, 9, 6, 11, 5, 7, 8, -1, 10])
    results = []
    for ops in (OURS, REFERENCE):
        cache, scales = (
            torch.zeros(3, 4, heads, width, dtype=codes),
            torch.full((3, 4, heads), -1.0),
        )
        ops.write_cache(cache, rows, slots, scales)
        results.append((cache, scales))
    for found, wanted in zip(*results, strict=True):
        assert_same(found, wanted)
    scales = results[0][1]
    assert scales.isnan().sum() == scales.isinf().sum() == 1
    assert (scales[0] == -1).all(), "a row without a slot writes no scale"
    assert (scales[1:] != -1).all()


@ONE_CODE
def test_every_number_between_two_codes_is_rounded_as_the_reference_does(
    codes: torch.dtype,
) -> None:
    """All float16 up to the largest code, either sign, beside that code: so the scale is 1.

    Rows of int8 are spread in blocks of one feature, which leaves them as they are."""
    largest = 127.0 if codes == torch.int8 else 448.0
    numbers = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16)
    numbers = numbers[numbers <= largest]
    rows = torch.cat([numbers, -numbers])
    rows = torch.nn.functional.pad(rows, (0, -len(rows) % 126)).view(-1, 1, 126)
    rows = torch.cat([torch.full_like(rows[..., :1], largest), rows], -1)
    found, wanted = (
        (torch.zeros(1, len(rows), 1, 127, dtype=codes), torch.zeros(1, len(rows), 1))
        for _ in range(2)
    )
    for ops, (cache, scales) in ((OURS, found), (REFERENCE, wanted)):
        ops.write_cache(cache, rows, torch.arange(len(rows)), scales)
    assert (wanted[1] == 1).all()
    assert_same(found[0], wanted[0])


@EACH_CODE
def test_writes_of_strided_rows_to_slots_that_are_not_there(codes: torch.dtype) -> None:
    rows = torch.randn(4, 8, 2).transpose(1, 2)
    memory, scale_memory = torch.zeros(9, 4, 2, 8, dtype=codes), torch.zeros(9, 4, 2)
    expected = memory[:4].clone(), scale_memory[:4].clone()
    slots = torch.tensor([5, 16, 2**40, 3])
    OURS.write_cache(memory[:4], rows, slots, scale_memory[:4])
    REFERENCE.write_cache(expected[0], rows[[0, 3]], slots[[0, 3]], expected[1])
    assert_same(memory[:4], expected[0])
    assert_same(scale_memory[:4], expected[1])
    assert not bits(memory[4:]).any()
    assert not scale_memory[4:].any()


@EACH_CODE
@pytest.mark.parametrize("tokens", [0, 1, 6])
@pytest.mark.parametrize("dims", [(40, 24, 40), (16, 16, 10), (6, 2, 33)])
@pytest.mark.parametrize("heads", [(4, 2), (5, 1), (20, 10)])
def test_the_fused_write_has_the_bits_of_the_parts(
    heads: tuple[int, int], dims: tuple[int, int, int], tokens: int, codes: torch.dtype
) -> None:
    """In float16, which the interpreter rounds as devices do."""
    (count, kv_count), (width, turned, v_width) = heads, dims
    generator = torch.Generator().manual_seed(3)
    q, k, v, cos, sin = (
        torch.randn(tokens, *shape, generator=generator).half()
        for shape in ((count, width), (kv_count, width), (kv_count, v_width), (turned,), (turned,))
    )
    k[3:4, 0, -1], v[4:5, 0, 0], k[5:6] = torch.inf, torch.nan, 0
    slots = torch.tensor([4, 5, -1, 7, 8, 11])[:tokens]
    results = []
    for ops in (OURS, REFERENCE):
        caches = [torch.zeros(3, 4, kv_count, dim, dtype=codes) for dim in (width, v_width)]
        scales = [torch.full((3, 4, kv_count), -1.0) for _ in range(2)]
        out = ops.rotate_and_write(q, k, v, cos, sin, *caches, slots, *scales)
        results.append((out.float().nan_to_num(), *caches, *scales))
    for found, wanted in zip(*results, strict=True):
        assert_same(found, wanted)
    assert all((scale != -1).sum() == kv_count * (slots >= 0).sum() for scale in results[0][3:])


@EACH_CODE
def test_the_fused_write_to_slots_that_are_not_there(codes: torch.dtype) -> None:
    q, k, v = (torch.randn(3, n, 16) for n in (4, 2, 2))
    angles = [torch.randn(3, 16) for _ in range(2)]
    memory = [torch.zeros(20, 4, 2, 16, dtype=codes) for _ in range(2)]
    scales = [torch.zeros(20, 4, 2) for _ in range(2)]
    slots = torch.tensor([32, 2**40, 3])
    parts = [m[:8] for m in (*memory, *scales)]
    OURS.rotate_and_write(q, k, v, *angles, *parts[:2], slots, *parts[2:])
    for each in (*map(bits, memory), *scales):
        flat = each.flatten(0, 1)
        assert flat[3].any()
        flat[3] = 0
        assert not flat.any()


# ---- paged_attention -------------------------------------------------------------------------


def check(batch: Batch, codes: torch.dtype) -> None:
    batch, scales = coded(batch, codes)
    close(paged(OURS, batch, scales), paged(REFERENCE, batch, scales))


@EACH_CODE
@pytest.mark.parametrize(("rows", "dtype"), EACH_WIDTH)
def test_attention_at_each_number_of_drafts(
    rows: int, dtype: torch.dtype, codes: torch.dtype
) -> None:
    """K = 0 to 4; NaN in queries that nobody asked, in codes and scales that nobody may read."""
    lengths = [(18, rows), (0, rows), (9, rows)]
    batch = make_batch(lengths, dtype=dtype, heads=(6, 2), page_size=4, spare_rows=2)
    check(batch.poisoned(), codes)


@EACH_CODE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 64), (24, 40), (5, 3), (192, 128)])
def test_ragged_rows_and_head_dims(
    dims: tuple[int, int], dtype: torch.dtype, codes: torch.dtype
) -> None:
    lengths = [(37, 4), (1, 1), (0, 3), (16, 2), (130, 3)]
    check(make_batch(lengths, dtype=dtype, heads=(6, 2), dims=dims), codes)


@EACH_CODE
@pytest.mark.parametrize("page_size", [1, 7, 100])
@pytest.mark.parametrize("seq", [1, 16, 17, 64, 65, 129])
def test_edges_of_pages_and_blocks(seq: int, page_size: int, codes: torch.dtype) -> None:
    check(make_batch([(seq, min(seq, 4)), (seq, 1)], page_size=page_size), codes)


@EACH_CODE
@pytest.mark.parametrize("window", [0, 1, 16, 10_000])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_options(window: int, softcap: float, sinks: bool, codes: torch.dtype) -> None:
    batch = make_batch([(230, 5), (9, 4), (0, 1)], dtype=torch.float16)
    logits = torch.linspace(-3, 3, 4).half() if sinks else None
    check(replace(batch, window=window, softcap=softcap, sinks=logits), codes)


@EACH_CODE
@pytest.mark.parametrize(
    ("length", "heads", "configs", "splits", "programs"),
    [
        ((30, 4), (6, 2), "", 1, 1),
        ((600, 2), (6, 2), "", 16, 16),
        pytest.param((200, 193), (64, 64), BATCH_INVARIANT, 7, 1, marks=pytest.mark.slow),
    ],
)
def test_one_split_a_program_for_each_and_one_for_all(
    length: tuple[int, int],
    heads: tuple[int, int],
    configs: str,
    splits: int,
    programs: int,
    codes: torch.dtype,
) -> None:
    batch, scales = coded(
        make_batch([length], dtype=torch.float16, heads=heads, spare_pages=0), codes
    )
    given = (batch.q, batch.k, batch.v, batch.table, batch.seq_lens, batch.starts, batch.scale)
    (attend, *_), _ = plan("paged_attention", *given, 0, 0.0, None, **scales, configs=configs)
    assert (attend.constants["SPLITS"], attend.grid[2]) == (splits, programs)
    close(paged(OURS, batch, scales, configs), paged(REFERENCE, batch, scales))


@pytest.mark.parametrize(
    ("dtype", "dims"), [(torch.bfloat16, (136, 64)), (torch.float32, (64, 64))]
)
@pytest.mark.parametrize("configs", ["", BATCH_INVARIANT])
def test_codes_with_even_scales_have_the_bits_of_plain_caches(
    configs: str, dtype: torch.dtype, dims: tuple[int, int]
) -> None:
    """With powers of two as scales, codes times scales are numbers of these dtypes, and no product
    or sum rounds elsewhere than it does with these in the cache, if tiles are the same. float16
    rounds small weights elsewhere, and codes of int8 are of spread rows."""
    codes, lengths = torch.float8_e4m3fn, [(150, 1), (20, 2), (0, 1), (70, 24)]
    batch, scales = coded(make_batch(lengths, dtype=dtype, heads=(6, 2), dims=dims), codes)
    scales = {name: torch.exp2(torch.log2(scale).round()) for name, scale in scales.items()}
    plain = replace(
        batch,
        k=(batch.k.float() * scales["k_scale"][..., None]).to(dtype),
        v=(batch.v.float() * scales["v_scale"][..., None]).to(dtype),
    )
    found, wanted = paged(OURS, batch, scales, configs), paged(OURS, plain, {}, configs)
    assert torch.equal(found, wanted)


@ONE_CODE
def test_a_row_does_not_depend_on_the_rows_beside_it(codes: torch.dtype) -> None:
    """Bit for bit, with tiles of any number of rows, and a program for all splits or for each."""
    lengths = [(40, 3), (300, 5), (90, 90)]
    batch, scales = coded(make_batch(lengths, dtype=torch.float16, dims=(64, 64)), codes)
    whole = paged(OURS, batch, scales, BATCH_INVARIANT)
    for request in range(len(lengths)):
        for rows in (1, 2):
            alone = paged(OURS, batch.only(request, rows), scales, BATCH_INVARIANT)
            end = int(batch.starts[request + 1])
            assert torch.equal(alone, whole[end - rows : end])


@EACH_CODE
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_row_that_was_no_number_reads_as_nan(name: str, codes: torch.dtype) -> None:
    """Non-finite logits stop a request. Other heads, rows before it and other requests do not."""
    batch, scales = coded(make_batch([(20, 1), (50, 1)]), codes)
    slot = (int(batch.table[1, 2]), 3, 1)
    for value in (torch.nan, torch.inf):
        scales[name][slot] = value
        getattr(batch, name[0])[slot] = torch.zeros((), dtype=codes)
        out = paged(OURS, batch, scales)
        assert out[1, 2:].isnan().all()
        assert out[1, :2].isfinite().all()
        assert out[0].isfinite().all()


@EACH_CODE
@pytest.mark.parametrize("size", [1e-3, 1e4])
def test_small_and_large_values_in_float16(size: float, codes: torch.dtype) -> None:
    """Weights times scales must not leave the numbers that float16 has."""
    batch = make_batch([(600, 2)], dtype=torch.float16, dims=(64, 64))
    batch, scales = coded(replace(batch, scale=0.01, v=(batch.v.float() * size).half()), codes)
    found, wanted = (paged(ops, batch, scales).float() / size for ops in (OURS, REFERENCE))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch, scales: (batch, {}), "k_cache of torch.int8 with no scales"),
        (lambda batch, scales: (batch, {**scales, "v_scale": None}), "v_cache .* no scales"),
        (
            lambda batch, scales: (batch, {n: s.double() for n, s in scales.items()}),
            "expected contiguous float32",
        ),
        (lambda batch, scales: (replace(batch, k=batch.k.float()), scales), "float32 with scales"),
    ],
)
def test_scales_go_with_codes_and_with_nothing_else(
    change: Callable[[Batch, dict[str, Tensor]], tuple[Batch, dict[str, Any]]], message: str
) -> None:
    batch, scales = change(*coded(make_batch([(37, 4)]), torch.int8))
    with pytest.raises(BackendError, match=message):
        paged(OURS, batch, scales)

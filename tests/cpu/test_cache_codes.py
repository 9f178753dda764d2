"""Caches of codes on the cpu: what is written, and attention to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.batches import Batch, close, make_batch
from helpers.coded import CODES, bits, coded, hadamard, paged, rows_of_all_kinds
from torch import Tensor

from mtpc.backends.cpu_kernels import load_kernels
from mtpc.ops.attention import quantise_rows, spread, unspread

load_kernels()
OURS = torch.ops.mtpc_cpu
REFERENCE = torch.ops.mtpc
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}


@pytest.mark.parametrize("width", [64, 5, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("codes", CODES)
def test_codes_and_scales_have_the_bits_of_the_reference(
    codes: torch.dtype, dtype: torch.dtype, width: int
) -> None:
    rows = rows_of_all_kinds(dtype, width)
    slots = torch.tensor([4, 9, 6, 11, 5, 7, 8, -1, 10])
    found, wanted = (
        (torch.zeros(3, 4, 3, width, dtype=codes), torch.full((3, 4, 3), -1.0)) for _ in range(2)
    )
    for ops, (cache, scales) in ((OURS, found), (REFERENCE, wanted)):
        ops.write_cache(cache, rows, slots, scales)
    assert torch.equal(bits(found[0]), bits(wanted[0]))
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0, equal_nan=True)
    assert found[1].isnan().sum() == found[1].isinf().sum() == 1
    assert (found[1][0] == -1).all()  # A row without a slot writes no scale.


@pytest.mark.parametrize(("width", "block"), [(64, 64), (96, 32), (40, 8), (5, 1), (1, 1)])
def test_rows_spread_by_blocks(width: int, block: int) -> None:
    rows = torch.randn(7, 2, width, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    wanted = (rows.unflatten(-1, (-1, block)) @ hadamard(block)).flatten(-2)
    torch.testing.assert_close(spread(rows), wanted)
    torch.testing.assert_close(unspread(spread(rows)), rows)


def test_one_large_feature_costs_the_others_little() -> None:
    """Keys of Qwen2.5 have features a hundred times as large as the others."""
    rows = torch.randn(50, 2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows[..., 3] += 100
    found, scales = quantise_rows(rows, torch.int8)
    read = unspread(found.double() * scales.double()[..., None])
    assert (read - rows).pow(2).mean().sqrt() < 0.05  # One scale for the row as it is: 0.23.


@pytest.mark.parametrize("codes", CODES)
def test_a_number_is_at_most_half_a_step_from_its_code(codes: torch.dtype) -> None:
    """By arithmetic of its own, in float64."""
    rows = torch.randn(50, 2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, scales = quantise_rows(rows, codes)
    rows = rows @ hadamard(64) if codes == torch.int8 else rows
    read = found.double() * scales.double()[..., None]
    largest = rows.abs().amax(-1, keepdim=True)
    if codes == torch.int8:
        step = largest / 127
    else:  # 3 bits behind the leading one, and multiples of 2^-9 below 2^-6.
        exponent = torch.frexp(rows / largest * 448).exponent.clamp(min=-5)
        step = largest / 448 * torch.exp2(exponent - 4.0)
    assert ((read - rows).abs() <= 0.5001 * step).all()
    assert (read.abs().amax(-1, keepdim=True) / largest - 1).abs().max() < 1e-6
    assert found.double().abs().max() == LARGEST[codes]


@pytest.mark.parametrize("dims", [(64, 64), (16, 16), (24, 40), (5, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("codes", CODES)
def test_attention_to_codes_equals_the_reference(
    codes: torch.dtype, dtype: torch.dtype, dims: tuple[int, int]
) -> None:
    lengths = [(37, 4), (1, 1), (0, 3), (16, 2), (300, 70), (530, 3)]
    batch, scales = coded(make_batch(lengths, dtype=dtype, heads=(6, 2), dims=dims), codes)
    close(paged(OURS, batch, scales), paged(REFERENCE, batch, scales))


@pytest.mark.parametrize("window", [0, 16, 250])
@pytest.mark.parametrize("codes", CODES)
def test_windows_caps_and_sinks(codes: torch.dtype, window: int) -> None:
    batch, scales = coded(make_batch([(530, 5), (9, 4), (0, 1)], dtype=torch.bfloat16), codes)
    batch = replace(batch, window=window, softcap=5.0, sinks=torch.linspace(-3, 3, 4).bfloat16())
    close(paged(OURS, batch, scales), paged(REFERENCE, batch, scales))


@pytest.mark.parametrize("lengths", [[(300, 1), (40, 2)], [(700, 4)], [(150, 150)], [(3000, 1)]])
def test_codes_with_even_scales_have_the_bits_of_bfloat16(lengths: list[tuple[int, int]]) -> None:
    """With powers of two as scales, codes times scales are numbers of bfloat16, and no product or
    sum rounds elsewhere than it does with these in the cache."""
    codes = torch.float8_e4m3fn
    batch = make_batch(lengths, dtype=torch.bfloat16, heads=(6, 2), dims=(64, 64))
    batch, scales = coded(batch, codes)
    scales = {name: torch.exp2(torch.log2(scale).round()) for name, scale in scales.items()}
    plain = replace(
        batch,
        k=(batch.k.float() * scales["k_scale"][..., None]).bfloat16(),
        v=(batch.v.float() * scales["v_scale"][..., None]).bfloat16(),
    )
    assert torch.equal(paged(OURS, batch, scales), plain.paged(OURS))


@pytest.mark.parametrize("codes", CODES)
def test_a_row_does_not_depend_on_the_rows_beside_it(codes: torch.dtype) -> None:
    """Nor on how many its request has, whether threads share splits or units."""
    batch, scales = coded(
        make_batch([(40, 3), (700, 5), (9, 9)], dtype=torch.bfloat16, dims=(64, 64)), codes
    )
    whole = paged(OURS, batch, scales)
    for request in range(3):
        for rows in (1, 2):
            alone = paged(OURS, batch.only(request, rows), scales)
            end = int(batch.starts[request + 1])
            assert torch.equal(alone, whole[end - rows : end])


@pytest.mark.parametrize("codes", CODES)
def test_the_fused_write_has_the_bits_of_the_parts(codes: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(6, n, 40, generator=generator).bfloat16() for n in (4, 2, 2))
    cos, sin = (torch.randn(6, 24, generator=generator).bfloat16() for _ in range(2))
    slots = torch.tensor([4, 5, -1, 7, 8, 11])
    results = []
    for ops in (OURS, REFERENCE):
        caches = [torch.zeros(3, 4, 2, 40, dtype=codes) for _ in range(2)]
        scales = [torch.zeros(3, 4, 2) for _ in range(2)]
        out = ops.rotate_and_write(q, k, v, cos, sin, *caches, slots, *scales)
        results.append([out, *map(bits, caches), *scales])
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)
    assert results[0][1].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch, scales: (batch, {}), "k_scale"),
        (lambda batch, scales: (batch, {**scales, "v_scale": None}), "v_scale"),
        (lambda batch, scales: (batch, {n: s.double() for n, s in scales.items()}), "float32"),
        (lambda batch, scales: (replace(batch, k=batch.k.float()), scales), "k_scale"),
    ],
)
def test_scales_go_with_codes_and_with_nothing_else(
    change: Callable[[Batch, dict[str, Tensor]], tuple[Batch, dict[str, Any]]], message: str
) -> None:
    batch, scales = change(*coded(make_batch([(37, 4)]), torch.int8))
    with pytest.raises(RuntimeError, match=message):
        paged(OURS, batch, scales)

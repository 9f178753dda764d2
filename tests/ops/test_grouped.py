"""Weights with scales of groups: their packed order, and the reference operators."""

from __future__ import annotations

import pytest
import torch
from helpers.batches import bf16
from helpers.grouped import FORMS, Zeros, bound, exact, pack_codes, random_weight

import mtpc.ops  # noqa: F401  (registers the operators)
from mtpc.weights.grouped import (
    GroupedWeight,
    GroupForm,
    Kind,
    form_of,
    pack_scales,
    unpack_codes,
    unpack_scales,
)

REFERENCE = torch.ops.mtpc


def test_the_order_of_int4() -> None:
    """Byte j of eight inputs holds input j below input j + 4, and features lie side by side."""
    codes = torch.randint(0, 16, (40, 16), generator=torch.Generator().manual_seed(0)).byte()
    packed = pack_codes(codes, "int4")
    assert packed.shape == (2, 2, 32, 4)
    for feature in range(40):
        for k in range(16):
            byte = int(packed[feature // 32, k // 8, feature % 32, k % 4])
            assert (byte >> 4 * (k % 8 // 4)) & 15 == codes[feature, k]
    assert not packed[1, :, 8:].any()


@pytest.mark.parametrize(("kind", "group", "points"), FORMS)
@pytest.mark.parametrize("shape", [(70, 256), (3, 64, 256), (1, 256)])
def test_unpacking_is_the_inverse(
    kind: Kind, group: int, points: Zeros, shape: tuple[int, ...]
) -> None:
    made = random_weight(kind, shape, group, zeros=points)
    codes, scales, zeros = made.parts
    back = unpack_codes(codes, kind, made.features)
    assert torch.equal(back.view(torch.uint8), made.weight.codes.view(torch.uint8))
    assert torch.equal(unpack_scales(scales, made.features), made.weight.scales)
    assert scales.shape[-2:] == (256 // group, 32)
    assert (
        not scales.flatten(-3, -1).reshape(scales.shape)[..., -1, :, 32 - -shape[-2] % 32 :].any()
    )
    assert (zeros is None) == (made.weight.zeros is None)
    if zeros is not None and made.weight.zeros is not None:
        assert torch.equal(unpack_scales(zeros, made.features), made.weight.zeros)
    if len(shape) == 2:
        assert form_of(256, codes, scales, zeros) == made.weight.form


@pytest.mark.parametrize(("kind", "group", "points"), FORMS)
def test_the_reference_against_float64(kind: Kind, group: int, points: Zeros) -> None:
    made = random_weight(kind, (70, 256), group, zeros=points)
    x, bias = bf16(5, 256, seed=1).float(), bf16(70, seed=2).float()
    x[:, 7] *= 100  # An outlier costs its own group only.
    found = REFERENCE.grouped_linear(x, *made.operands, bias)
    right = exact(x, made.weight, bias)
    assert bool(
        ((found.double() - right).abs() <= bound(x, made.weight) + right.abs() * 2e-7).all()
    )
    dense = made.weight.dequantise()
    assert torch.equal(exact(torch.eye(256), made.weight).t().float(), dense)


def test_forms_that_do_not_fit_are_refused() -> None:
    codes, scales = torch.zeros(32, 64, dtype=torch.uint8), torch.ones(32, 2)
    for form, changed, message in (
        (GroupForm("int4", 24), scales, "groups of 24 do not divide 64 inputs"),
        (GroupForm("int4", 4), scales, "groups of 4 are not a multiple of 8 inputs"),
        (GroupForm("float8", 32, True), scales, "no zero points"),
        (GroupForm("float8", 32, has_mins=True), scales, "no minima"),
        (GroupForm("int4", 32, True, True), scales, "zero points or minima, not both"),
        (GroupForm("int4", 32), scales[:, :1], r"scales of .* \[32, 2\], found"),
        (GroupForm("int4", 32), scales.double(), "found torch.float64"),
        (GroupForm("float8", 32), scales, "codes of .* expected torch.float8_e4m3fn"),
        (GroupForm("int4", 32, True), scales, "zeros are missing"),
        (GroupForm("int4", 32, has_mins=True), scales, "zeros are missing"),
    ):
        with pytest.raises(ValueError, match=message):
            GroupedWeight(form, codes, changed)
    with pytest.raises(ValueError, match="zeros are given"):
        GroupedWeight(GroupForm("int4", 32), codes, scales, codes[:, :2])
    with pytest.raises(ValueError, match=r"zeros of .* expected torch.float32"):
        GroupedWeight(GroupForm("int4", 32, has_mins=True), codes, scales, scales.half())
    packed = pack_codes(codes, "int4"), pack_scales(scales)
    for inputs in (0, 48, 96):
        with pytest.raises(ValueError, match=f"do not fit {inputs} inputs"):
            REFERENCE.grouped_linear(torch.ones(1, inputs), *packed, None, 32)

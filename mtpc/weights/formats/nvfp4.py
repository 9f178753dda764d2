"""NVFP4 weights: floating-point codes of 4 bits (E2M1), and scales in two levels.

A weight [N, K] is three tensors: codes uint8 [N, K / 2], two inputs a byte, the first in its low
four bits; a scale for each 16 inputs, float8_e4m3fn [N, K / 16]; and a float32 for all of it. A
value is its code times the scale, multiplied by that float32 (ModelOpt) or divided by it
(compressed-tensors), where product and quotient of the scales are rounded to float32.

Kernels multiply a scale by a float64 and round once. With the float32 itself the product is exact.
With its reciprocal the result is the quotient rounded: a scale has 4 bits and a float32 24, so no
quotient is as close to a boundary of rounding as the error of the reciprocal.

Sources: compressed_tensors/compressors/nvfp4 and quantization/lifecycle/forward.py of
compressed-tensors; modelopt/torch/quantization/qtensor/nvfp4_tensor.py of ModelOpt.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from mtpc.weights.formats.stored import (
    Grid,
    QuantisedWeight,
    Tensors,
    check_groups,
    find_part,
    unpack_bytes,
)
from mtpc.weights.grouped import Decoded

GROUP = 16
"""Inputs that share a scale."""


def weight_of(
    tensors: Tensors, name: str, codes: str, scales: str, whole: str, divides: bool
) -> QuantisedWeight:
    """A weight, given the names of its tensors: codes, scales, and the float32 for the whole
    weight, which divides scales or multiplies them.

    Raises:
        CheckpointError: a tensor is missing, or of another dtype or shape; or groups do not divide.
    """
    shape = tensors[codes].shape
    rows, half = shape if len(shape) == 2 else (1, GROUP // 2)
    find_part(tensors, codes, ("U8",), [(rows, half)], "two floating-point codes a byte")
    check_groups(codes, (rows, 2 * half), GROUP)
    places = [(rows, 2 * half // GROUP)]
    find_part(tensors, scales, ("F8_E4M3",), places, f"a scale for each {GROUP} inputs")
    find_part(tensors, whole, ("F32",), [(1,), ()], "the scale of the whole weight")
    return QuantisedWeight(
        name,
        (rows, 2 * half),
        "NVFP4",
        "e2m1",
        Grid(1, GROUP),
        False,
        {"codes": codes, "scales": scales, "whole": whole},
        partial(decode, divides=divides),
        "int8",
        rows=dict.fromkeys(("codes", "scales"), (0, 1)),
    )


def decode(parts: Mapping[str, Tensor], divides: bool) -> Decoded:
    """Codes of two inputs a byte, and scales in two levels (`GroupForm.two_level`)."""
    whole, scales = parts["whole"].double().reshape(1, 1), parts["scales"].view(torch.int8)
    # Values of codes are doubled, so that they are whole.
    row = (1 / whole if divides else whole) / 2
    rows = row.expand(len(scales), 1).contiguous().view(torch.int8)
    return Decoded(unpack_bytes(parts["codes"]), torch.cat((rows, scales), -1))

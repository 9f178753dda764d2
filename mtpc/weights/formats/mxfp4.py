"""MXFP4 weights: floating-point codes of 4 bits (E2M1), and a power of two for each 32 inputs.

The layout is that of gpt-oss. A weight X [N, K], or a stack of them [E, N, K], is two tensors:
X_blocks uint8 [..., N, K / 32, 16] and X_scales uint8 [..., N, K / 32]. A byte holds two inputs,
the first in its low four bits. A scale is an exponent: 2^(e - 127), and 255 is NaN. The model's
class has a stack as [E, K, N]. Checkpoints of compressed-tensors and of DeepSeek-V4 have the same
codes and exponents under other names.

Source: OCP Microscaling Formats (MX) v1.0; transformers/integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mtpc.weights.formats.stored import (
    Config,
    Grid,
    QuantisedWeight,
    Tensors,
    find_part,
    unpack_bytes,
)
from mtpc.weights.grouped import Decoded

LEAVES: tuple[str, ...] = ()
IGNORED: tuple[str, ...] = ()
GROUP = 32
"""Inputs that share an exponent."""
_CODES, _SCALES = "_blocks", "_scales"


def find(tensors: Tensors, says: Config, config: Mapping[str, Any]) -> list[QuantisedWeight]:
    """The weights of a checkpoint in gpt-oss's layout; see `mtpc.weights.formats.Format`."""
    found = []
    for codes, stored in tensors.items():
        if not codes.endswith(_CODES):
            continue
        name, shape = codes.removesuffix(_CODES), stored.shape[:-1]
        what = f"{GROUP // 2} bytes of codes for each {GROUP} inputs"
        right = [(*shape, GROUP // 2)] if len(shape) in (2, 3) else []
        find_part(tensors, codes, ("U8",), right or [(1, 1, GROUP // 2)], what)
        scales = find_part(tensors, name + _SCALES, ("U8",), [shape], "exponents of the codes")
        parts = {"codes": codes, "scales": scales}
        weight = weight_of(name, (*shape[:-1], shape[-1] * GROUP), parts)
        found.append(replace(weight, is_transposed=len(shape) == 3))
    return found


def weight_of(name: str, shape: tuple[int, ...], parts: Mapping[str, str]) -> QuantisedWeight:
    """A weight [N, K] or [E, N, K], given the names of its tensors in the roles "codes" and
    "scales"."""
    grid, rows = Grid(1, GROUP), dict.fromkeys(("codes", "scales"), (0, 1))
    return QuantisedWeight(
        name, shape, "MXFP4", "e2m1", grid, False, parts, decode, "uint8", rows=rows
    )


def decode(parts: Mapping[str, Tensor]) -> Decoded:
    """Codes of two inputs a byte, and exponents."""
    codes = unpack_bytes(parts["codes"].view(torch.uint8))
    # Values of codes are doubled, so that they are whole; exponents of scales allow for that.
    exponents = parts["scales"].view(torch.uint8)
    return Decoded(codes.reshape(*exponents.shape[:-1], exponents.shape[-1] * GROUP), exponents)

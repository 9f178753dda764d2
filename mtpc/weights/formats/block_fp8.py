"""FP8 weights in blocks, as DeepSeek and Qwen release them.

The layout is that of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2). `X.weight` is float8_e4m3fn
[out, in]. `X.weight_scale_inv` is float32 and holds one factor for each block of 128 x 128 weights;
blocks at the edges are smaller. `weight_block_size` in config.json gives the sides of a block.

DeepSeek-V4's scales are named `X.scale`. They are powers of two, and only their exponents are
stored (float8_e8m0fnu). Its experts are MXFP4: int8 [out, in / 2], an exponent for each 32 inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.formats.mxfp4 import GROUP, weight_of
from mtpc.weights.formats.stored import (
    Config,
    Grid,
    QuantisedWeight,
    Tensors,
    check_groups,
    find_part,
)
from mtpc.weights.fused_qkv import qkv_chunks
from mtpc.weights.grouped import Decoded

_SUFFIX, _V4 = "_scale_inv", ".scale"
LEAVES = ("weight_scale_inv", "weight_scale")
IGNORED: tuple[str, ...] = ()
_BLOCK = (128, 128)
"""Sides of a block if config.json does not give them."""
_DTYPES = ("F32", "BF16", "F8_E8M0")


def find(tensors: Tensors, says: Config, config: Mapping[str, Any]) -> list[QuantisedWeight]:
    found, block = [], block_of(says)
    for name, stored in tensors.items():
        is_narrow = stored.is_narrow and stored.dtype != "F8_E8M0"
        is_fp4 = stored.dtype == "I8" and len(stored.shape) == 2
        scale = name + _SUFFIX
        if scale not in tensors and (is_narrow or is_fp4):
            scale = name.removesuffix(".weight") + _V4
        scaled = name.endswith(".weight") and scale in tensors
        if is_narrow and not scaled:
            raise CheckpointError(
                f"{name} is {stored} and has no {name}{_SUFFIX} beside it; expected block-scaled "
                "F8_E4M3 weights, or weights of at least 16 bits; dequantise the checkpoint to "
                "bfloat16 first"
            )
        if scaled and is_fp4:
            # A weight of DeepSeek-V4's experts.
            rows, half = tensors[name].shape
            check_groups(name, (rows, 2 * half), GROUP)
            what = f"an exponent for each {GROUP} of {2 * half} inputs"
            find_part(tensors, scale, ("F8_E8M0", "U8"), [(rows, 2 * half // GROUP)], what)
            found.append(weight_of(name, (rows, 2 * half), {"codes": name, "scales": scale}))
        elif scaled:
            found.append(_fp8(tensors, name, scale, block, config))
    return found


def _fp8(
    tensors: Tensors, name: str, scale: str, block: tuple[int, int], config: Mapping[str, Any]
) -> QuantisedWeight:
    stored, (rows, columns) = tensors[name], block
    if stored.dtype != "F8_E4M3" or len(stored.shape) != 2:
        raise CheckpointError(
            f"{name} is {stored} and has block scales; expected an F8_E4M3 matrix; dequantise "
            "the checkpoint to bfloat16 first"
        )
    shape = (stored.shape[0], stored.shape[1])
    chunks = qkv_chunks(config) if "qkv_proj" in name else 1
    grid, apart = Grid(rows, columns), Grid(rows, columns, chunks or 1)
    if tensors[scale].shape == apart.shape(shape):
        grid = apart
    what = f"a scale for each block of {rows} x {columns} of {stored}"
    find_part(tensors, scale, _DTYPES, [grid.shape(shape)], what)
    layout, parts = f"FP8 in blocks of {rows} x {columns}", {"codes": name, "scales": scale}
    is_exponent = tensors[scale].dtype == "F8_E8M0"
    dtype = "bfloat16" if is_exponent else tensors[parts["scales"]].dtype_name
    lie = {"codes": (0, 1), "scales": (0, grid.rows)} if grid.chunks == 1 else {}
    return QuantisedWeight(
        name, shape, layout, "float8", grid, False, parts, _decode, dtype, rows=lie
    )


def _decode(parts: Mapping[str, Tensor]) -> Decoded:
    scales = parts["scales"]
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.to(torch.bfloat16)
    return Decoded(parts["codes"], scales)


def block_of(says: Config) -> tuple[int, int]:
    """Sides of a block by the config.

    Raises:
        CheckpointError: they are impossible.
    """
    sides = says.get("weight_block_size") or _BLOCK
    is_pair = isinstance(sides, (list, tuple)) and len(sides) == 2
    if not is_pair or not all(isinstance(side, int) and side > 0 for side in sides):
        raise CheckpointError(
            f"config.json has weight_block_size {sides}; expected two positive integers"
        )
    return (sides[0], sides[1])

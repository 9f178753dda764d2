"""FP8 weights in blocks, as DeepSeek and Qwen release them.

The layout is that of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2). `X.weight` is float8_e4m3fn
[out, in]. `X.weight_scale_inv` is float32 and holds one factor for each block of 128 x 128 weights;
blocks at the edges are smaller. `weight_block_size` in config.json gives the sides of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.formats.stored import (
    Config,
    Decoded,
    Grid,
    QuantisedWeight,
    Tensors,
    find_part,
    scales_dtype,
)
from mtpc.weights.fused_qkv import qkv_chunks

_SUFFIX = "_scale_inv"
LEAVES = ("weight_scale_inv", "weight_scale")
_BLOCK = (128, 128)
"""Sides of a block if config.json does not give them."""
_DTYPES = ("F32", "BF16")


def find(tensors: Tensors, says: Config, config: Mapping[str, Any]) -> list[QuantisedWeight]:
    """The block-scaled weights of a checkpoint; see `mtpc.weights.formats.Format`."""
    rows, columns = block_of(says)
    found = []
    for name, stored in tensors.items():
        scaled = name.endswith(".weight") and name + _SUFFIX in tensors
        if stored.dtype.startswith(("F8", "F4", "F6")) and not scaled:
            raise CheckpointError(
                f"{name} is {stored} and has no {name}{_SUFFIX} beside it; expected block-scaled "
                "F8_E4M3 weights, or weights of at least 16 bits; dequantise the checkpoint to "
                "bfloat16 first"
            )
        if not scaled:
            continue
        if stored.dtype != "F8_E4M3" or len(stored.shape) != 2:
            raise CheckpointError(
                f"{name} is {stored} and has block scales; expected an F8_E4M3 matrix; dequantise "
                "the checkpoint to bfloat16 first"
            )
        shape = (stored.shape[0], stored.shape[1])
        chunks = qkv_chunks(config) if "qkv_proj" in name else 1
        grid, apart = Grid(rows, columns), Grid(rows, columns, chunks or 1)
        if tensors[name + _SUFFIX].shape == apart.shape(shape):
            grid = apart
        what = f"a scale for each block of {rows} x {columns} of {stored}"
        scale = find_part(tensors, name + _SUFFIX, _DTYPES, [grid.shape(shape)], what)
        layout = f"FP8 in blocks of {rows} x {columns}"
        parts = {"codes": name, "scales": scale}
        found.append(
            QuantisedWeight(
                name,
                shape,
                layout,
                "float8",
                grid,
                False,
                parts,
                _decode,
                scales_dtype(tensors, parts),
            )
        )
    return found


def _decode(parts: Mapping[str, Tensor]) -> Decoded:
    return Decoded(parts["codes"], parts["scales"])


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

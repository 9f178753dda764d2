"""Block-scaled FP8 weights: found by their names, read as bfloat16, refused where not understood.

The layout is DeepSeek-V3's: beside `X.weight` in float8_e4m3fn, [out, in], `X.weight_scale_inv` in
float32, one factor for each block of 128 x 128 weights, those at the edges smaller
(arXiv:2412.19437, section 3.3.2; the block's sides are `weight_block_size` in config.json).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.tensor_file import StoredTensor

_SUFFIX = "_scale_inv"
_BLOCK = (128, 128)
"""The block's sides where config.json does not say."""
_ADVICE = "dequantise the checkpoint to bfloat16 first"


@dataclass(frozen=True)
class BlockScale:
    """The scales of one weight.

    Attributes:
        stored: where they are, [ceil(out / rows), ceil(in / columns)].
        name: their tensor's name.
        block: rows and columns that share a scale.
    """

    stored: StoredTensor
    name: str
    block: tuple[int, int]


def find_block_scales(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> dict[str, BlockScale]:
    """The scales of each block-scaled weight, by the weight's name.

    Args:
        tensors: of all files, by name.
        config: config.json.

    Raises:
        CheckpointError: weights are quantised in some way that is not the one above.
    """
    block = _block_of(config)
    found = {}
    for name, stored in tensors.items():
        if "weight_scale" in name:
            weight = name.removesuffix(_SUFFIX)
            _check_scale(name, stored, tensors.get(weight), block)
            found[weight] = BlockScale(stored, name, block)
    for name, stored in tensors.items():
        if stored.dtype.startswith(("F8", "F4", "F6")) and name not in found:
            raise CheckpointError(
                f"{name} is {stored}, without a {name}{_SUFFIX} beside it; expected block-scaled "
                f"F8_E4M3 weights or none below 16 bits: {_ADVICE}"
            )
    return found


def _block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """The block's sides that a config names."""
    quantisation = config.get("quantization_config") or {}
    method = quantisation.get("quant_method", "fp8")
    if method != "fp8":
        raise CheckpointError(
            f"config.json says quant_method {method!r}; expected 'fp8' with weight_scale_inv, or "
            f"weights that are not quantised: {_ADVICE}"
        )
    sides = quantisation.get("weight_block_size") or _BLOCK
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise CheckpointError(
            f"config.json says weight_block_size {sides}; expected two positive integers"
        )
    return (sides[0], sides[1])


def _check_scale(
    name: str, scale: StoredTensor, weight: StoredTensor | None, block: tuple[int, int]
) -> None:
    """Refuse scales that are not those of an FP8 matrix in blocks of this size."""
    if not name.endswith(".weight" + _SUFFIX) or weight is None:
        raise CheckpointError(
            f"{name} scales no weight that is here; expected X.weight with X.weight{_SUFFIX}: "
            f"{_ADVICE}"
        )
    if weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
        raise CheckpointError(
            f"{name.removesuffix(_SUFFIX)} is {weight} but has block scales; expected an F8_E4M3 "
            f"matrix: {_ADVICE}"
        )
    blocks = tuple(-(-size // side) for size, side in zip(weight.shape, block, strict=True))
    if scale.shape != blocks or scale.dtype not in ("F32", "BF16"):
        raise CheckpointError(
            f"{name} is {scale}; expected F32[{blocks[0]},{blocks[1]}], a scale for each block of "
            f"{block[0]} x {block[1]} of {weight}: {_ADVICE}"
        )


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """The weight a block-scaled one stands for.

    Args:
        weight: float8_e4m3fn [out, in].
        scale: one factor a block, [ceil(out / rows), ceil(in / columns)].
        block: rows and columns.

    Returns:
        bfloat16 [out, in], rounded once, from a float32 product.
    """
    out, columns = torch.empty(weight.shape, dtype=torch.bfloat16), weight.shape[1]
    wide = scale.float().repeat_interleave(block[1], 1)[:, :columns]
    for index, factors in enumerate(wide):  # Block row by block row: no float32 copy of it all.
        rows = slice(index * block[0], (index + 1) * block[0])
        out[rows] = weight[rows].float() * factors
    return out

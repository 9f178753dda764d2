"""Block-scaled FP8 weights: reading them as bfloat16, and refusing other quantisations.

The layout is that of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2). `X.weight` is float8_e4m3fn
[out, in]. `X.weight_scale_inv` is float32 and holds one factor for each block of 128 x 128 weights;
blocks at the edges are smaller. `weight_block_size` in config.json gives the sides of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.fused_qkv import qkv_chunks
from mtpc.weights.tensor_file import StoredTensor

_SUFFIX = "_scale_inv"
_BLOCK = (128, 128)
"""Sides of a block if config.json does not give them."""
_ADVICE = "dequantise the checkpoint to bfloat16 first"


@dataclass(frozen=True)
class BlockScale:
    """The scales of one weight [out, in].

    Attributes:
        stored: description of their tensor, [ceil(out / rows), ceil(in / columns)].
        name: name of their tensor.
        block: rows and columns of a block.
        chunks: parts of the weight's rows that have blocks of their own, as fused projections do.
    """

    stored: StoredTensor
    name: str
    block: tuple[int, int]
    chunks: int = 1


def find_block_scales(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> dict[str, BlockScale]:
    """Name of each block-scaled weight -> its scales.

    Args:
        tensors: descriptions of all tensors by name.
        config: config.json.

    Raises:
        CheckpointError: weights are quantised in another way.
    """
    block = _block_of(config)
    found = {}
    for name, stored in tensors.items():
        if "weight_scale" in name:
            weight = name.removesuffix(_SUFFIX)
            fused = "qkv_proj" in name and qkv_chunks(config.get("text_config") or config)
            chunks = _check_scale(name, stored, tensors.get(weight), block, fused or 1)
            found[weight] = BlockScale(stored, name, block, chunks)
    for name, stored in tensors.items():
        if stored.dtype.startswith(("F8", "F4", "F6")) and name not in found:
            raise CheckpointError(
                f"{name} is {stored} and has no {name}{_SUFFIX} beside it; expected block-scaled "
                f"F8_E4M3 weights, or weights of at least 16 bits; {_ADVICE}"
            )
    return found


def _block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Sides of a block by the config.

    Raises:
        CheckpointError: the config names another quantisation or impossible sides.
    """
    quantisation = config.get("quantization_config") or {}
    method = quantisation.get("quant_method", "fp8")
    if method != "fp8":
        raise CheckpointError(
            f"config.json has quant_method {method!r}; expected 'fp8' with weight_scale_inv, or "
            f"weights that are not quantised; {_ADVICE}"
        )
    sides = quantisation.get("weight_block_size") or _BLOCK
    is_pair = isinstance(sides, (list, tuple)) and len(sides) == 2
    if not is_pair or not all(isinstance(side, int) and side > 0 for side in sides):
        raise CheckpointError(
            f"config.json has weight_block_size {sides}; expected two positive integers"
        )
    return (sides[0], sides[1])


def _check_scale(
    name: str,
    scale: StoredTensor,
    weight: StoredTensor | None,
    block: tuple[int, int],
    chunks: int,
) -> int:
    """Check that a tensor holds the scales of an FP8 matrix in blocks of this size.

    Returns:
        The number of parts of the matrix that have blocks of their own: `chunks`, or 1.

    Raises:
        CheckpointError: it does not.
    """
    if not name.endswith(".weight" + _SUFFIX) or weight is None:
        raise CheckpointError(
            f"{name} scales no weight of this checkpoint; expected X.weight beside "
            f"X.weight{_SUFFIX}; {_ADVICE}"
        )
    if weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
        raise CheckpointError(
            f"{name.removesuffix(_SUFFIX)} is {weight} and has block scales; expected an F8_E4M3 "
            f"matrix; {_ADVICE}"
        )
    blocks = tuple(-(-size // side) for size, side in zip(weight.shape, block, strict=True))
    apart = (chunks * -(-(weight.shape[0] // chunks) // block[0]), blocks[1])
    if scale.shape == apart and scale.dtype in ("F32", "BF16"):
        return chunks
    if scale.shape != blocks or scale.dtype not in ("F32", "BF16"):
        raise CheckpointError(
            f"{name} is {scale}; expected F32[{blocks[0]},{blocks[1]}], a scale for each block of "
            f"{block[0]} x {block[1]} of {weight}; {_ADVICE}"
        )
    return 1


def dequantise(weight: Tensor, factors: Tensor, scale: BlockScale) -> Tensor:
    """Multiply a block-scaled weight by its scales.

    Args:
        weight: float8_e4m3fn [out, in].
        factors: one per block, [ceil(out / rows), ceil(in / columns)]; with chunks, those of the
            first chunk's blocks, then those of the next.
        scale: the form of the blocks.

    Returns:
        bfloat16 [out, in]: the float32 product, rounded once.
    """
    out, columns = torch.empty(weight.shape, dtype=torch.bfloat16), weight.shape[1]
    wide = factors.float().repeat_interleave(scale.block[1], 1)[:, :columns]
    # One row of blocks at a time, so that no float32 copy of the whole weight is made.
    height, chunk = len(wide) // scale.chunks, len(weight) // scale.chunks
    for index, row in enumerate(wide):
        begin = index // height * chunk + index % height * scale.block[0]
        rows = slice(begin, min(begin + scale.block[0], (index // height + 1) * chunk))
        out[rows] = weight[rows].float() * row
    return out

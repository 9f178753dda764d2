"""ggml's types: how the bytes of a block of adjacent inputs are decoded.

A value is (code - zero) * scale, minus a minimum if the type has one. All types give codes of 4 or
8 bits with a scale for each group of inputs, so that kernels can read them as codes. Codes of 5 and
6 bits, and floating-point codes of 4 bits, are exact in 8 bits.

Source: ggml/src/ggml-common.h and ggml-quants.c. All functions take uint8 [..., B, nbytes].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpc.weights.grouped import Kind

_K = 256
"""Inputs of a block of the types that end in K."""
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values of floating-point codes of 4 bits, doubled."""


@dataclass(frozen=True)
class Parts:
    """Decoded blocks.

    Attributes:
        codes: uint8 [..., B, inputs].
        scales: float16, bfloat16 or float32 [..., B, G]; G groups of adjacent inputs in a block.
        mins: of the scales' dtype [..., B, G], subtracted from the values; the zero point of codes
            is then 0. None if there are none.
    """

    codes: Tensor
    scales: Tensor
    mins: Tensor | None = None


@dataclass(frozen=True)
class Block:
    """A type of ggml.

    Attributes:
        name: ggml's name; for plain numbers also safetensors'.
        inputs: adjacent inputs of a block.
        nbytes: bytes of a block.
        kind: of the codes; None for plain numbers.
        group: inputs that share a scale.
        scales: torch's name of the dtype of the scales.
        has_mins: whether groups have a minimum.
        decode: bytes of blocks -> their codes and scales; None for plain numbers.
    """

    name: str
    inputs: int
    nbytes: int
    kind: Kind | None = None
    group: int = 32
    scales: str = "float16"
    has_mins: bool = False
    decode: Callable[[Tensor], Parts] | None = None


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 [..., B, 1] at a byte of each block."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _nibbles(blocks: Tensor) -> Tensor:
    """Low halves of all bytes, then high halves."""
    return torch.cat((blocks & 15, blocks >> 4), -1)


def _fifth(blocks: Tensor) -> Tensor:
    """The bits of 4 bytes, low first, as 16 or 0: [..., B, 32]."""
    places = torch.arange(8, dtype=torch.uint8)
    return ((blocks[..., None] >> places & 1) << 4).flatten(-2)


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[..., 2:]), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[..., 4:]), _half(blocks, 0), -_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., 6:]) | _fifth(blocks[..., 2:6])
    return Parts(codes + (128 - 16), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., 8:]) | _fifth(blocks[..., 4:8])
    return Parts(codes, _half(blocks, 0), -_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(blocks[..., 2:] ^ 128, _half(blocks, 0))


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of 6 bits, uint8 [..., B, 8] each, of 12 bytes."""
    low, high, rest = packed.split(4, -1)
    scales = torch.cat((low & 63, (rest & 15) | (low >> 2 & 48)), -1)
    return scales, torch.cat((high & 63, (rest >> 4) | (high >> 2 & 48)), -1)


def _k_parts(blocks: Tensor, codes: Tensor) -> Parts:
    scales, mins = _k_scales(blocks[..., 4:16])
    step, least = _half(blocks, 0).float(), _half(blocks, 2).float()
    return Parts(codes, step * scales, least * mins)


def _pairs(blocks: Tensor, width: int) -> Tensor:
    """Runs of `width` bytes as low halves, then high halves, run by run."""
    return _nibbles(blocks.unflatten(-1, (-1, width))).flatten(-2)


def _q4_k(blocks: Tensor) -> Parts:
    return _k_parts(blocks, _pairs(blocks[..., 16:], 32))


def _q5_k(blocks: Tensor) -> Parts:
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((blocks[..., None, 16:48] >> places & 1) << 4).flatten(-2)
    return _k_parts(blocks, _pairs(blocks[..., 48:], 32) | fifth)


def _q6_k(blocks: Tensor) -> Parts:
    low = _pairs(blocks[..., :128], 64)
    places = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> places & 3
    codes = (low | high.flatten(-3) << 4) + (128 - 32)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return Parts(codes, _half(blocks, 208).float() * scales)


def _mxfp4(blocks: Tensor) -> Parts:
    values = torch.tensor([value + 128 for value in E2M1], dtype=torch.uint8)
    codes = values[_nibbles(blocks[..., 1:]).int()]
    return Parts(codes, power_of_two(blocks[..., :1], 128).bfloat16())


def power_of_two(exponents: Tensor, bias: int) -> Tensor:
    """2^(e - bias) of exponents uint8, in float32; 255 is NaN."""
    values = torch.exp2(exponents.double() - bias).float()
    return torch.where(exponents == 255, torch.nan, values)


BLOCKS: dict[int, Block] = {
    0: Block("F32", 1, 4),
    1: Block("F16", 1, 2),
    30: Block("BF16", 1, 2),
    2: Block("Q4_0", 32, 18, "int4", decode=_q4_0),
    3: Block("Q4_1", 32, 20, "int4", has_mins=True, decode=_q4_1),
    6: Block("Q5_0", 32, 22, "int8", decode=_q5_0),
    7: Block("Q5_1", 32, 24, "int8", has_mins=True, decode=_q5_1),
    8: Block("Q8_0", 32, 34, "int8", decode=_q8_0),
    12: Block("Q4_K", _K, 144, "int4", 32, "float32", True, _q4_k),
    13: Block("Q5_K", _K, 176, "int8", 32, "float32", True, _q5_k),
    14: Block("Q6_K", _K, 210, "int8", 16, "float32", False, _q6_k),
    39: Block("MXFP4", 32, 17, "int8", 32, "bfloat16", False, _mxfp4),
}
"""ggml's number of a type -> the type."""

"""ggml's types: how the bytes of a block of adjacent inputs are decoded.

A value is (code - zero) * scale, minus a minimum if the type has one. Types of 4 to 8 bits give the
codes and scales that the file has, so that kernels read as many bits. The gguf package reads those
of 1 to 3 bits; their values are rounded again, to codes of 8 bits.

Source: ggml/src/ggml-common.h and ggml-quants.c. All functions take uint8 [..., B, nbytes].
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.block_rows import Block, half_at
from mtpc.weights.grouped import SUPER, Decoded, GroupForm
from mtpc.weights.grouped_recipes import GroupSpec
from mtpc.weights.quantise import quantise


def _nibbles(blocks: Tensor) -> Tensor:
    """Low halves of all bytes, then high halves."""
    return torch.cat((blocks & 15, blocks >> 4), -1)


def _fifth(blocks: Tensor) -> Tensor:
    """The bits of 4 bytes, low first, as 16 or 0: [..., B, 32]."""
    places = torch.arange(8, dtype=torch.uint8)
    return ((blocks[..., None] >> places & 1) << 4).flatten(-2)


def _q4_0(blocks: Tensor) -> Decoded:
    return Decoded(_nibbles(blocks[..., 2:]), half_at(blocks, 0))


def _q4_1(blocks: Tensor) -> Decoded:
    return Decoded(_nibbles(blocks[..., 4:]), half_at(blocks, 0), -half_at(blocks, 2))


def _q5_0(blocks: Tensor) -> Decoded:
    codes = _nibbles(blocks[..., 6:]) | _fifth(blocks[..., 2:6])
    return Decoded(codes, half_at(blocks, 0))


def _q5_1(blocks: Tensor) -> Decoded:
    codes = _nibbles(blocks[..., 8:]) | _fifth(blocks[..., 4:8])
    return Decoded(codes, half_at(blocks, 0), -half_at(blocks, 2))


def _q8_0(blocks: Tensor) -> Decoded:
    return Decoded(blocks[..., 2:] ^ 128, half_at(blocks, 0))


def _words(blocks: Tensor, *runs: tuple[int, int]) -> Tensor:
    """These bytes of each block as the words of a super-block, int16 [..., B, words]."""
    return torch.cat([blocks[..., start:stop] for start, stop in runs], -1).view(torch.int16)


def _pairs(blocks: Tensor, width: int) -> Tensor:
    """Runs of `width` bytes as low halves, then high halves, run by run."""
    return _nibbles(blocks.unflatten(-1, (-1, width))).flatten(-2)


def _q4_k(blocks: Tensor) -> Decoded:
    return Decoded(_pairs(blocks[..., 16:], 32), _words(blocks, (0, 16)))


def _q5_k(blocks: Tensor) -> Decoded:
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((blocks[..., None, 16:48] >> places & 1) << 4).flatten(-2)
    return Decoded(_pairs(blocks[..., 48:], 32) | fifth, _words(blocks, (0, 16)))


def _q6_k(blocks: Tensor) -> Decoded:
    low = _pairs(blocks[..., :128], 64)
    places = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> places & 3
    return Decoded(low | high.flatten(-3) << 4, _words(blocks, (208, 210), (192, 208)))


def _iq4_xs(blocks: Tensor) -> Decoded:
    return Decoded(_pairs(blocks[..., 8:], 16), _words(blocks, (0, 8)))


def _mxfp4(blocks: Tensor) -> Decoded:
    return Decoded(_nibbles(blocks[..., 1:]), blocks[..., :1])


def _head(parts: Decoded) -> Tensor:
    """The bytes of a scale, with which these blocks begin."""
    return parts.scales.contiguous().view(torch.uint8)


def _halves(codes: Tensor) -> Tensor:
    """The inverse of `_nibbles`."""
    low, high = codes.chunk(2, -1)
    return low & 15 | high << 4


def _to_q5_0(parts: Decoded) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8)
    fifth = ((parts.codes >> 4).unflatten(-1, (4, 8)) << places).sum(-1, dtype=torch.uint8)
    return torch.cat((_head(parts), fifth, _halves(parts.codes)), -1)


def _to_q8_0(parts: Decoded) -> Tensor:
    return torch.cat((_head(parts), parts.codes ^ 128), -1)


def _to_iq4_nl(parts: Decoded) -> Tensor:
    return torch.cat((_head(parts), _halves(parts.codes)), -1)


_ROUNDED = GroupSpec(GroupForm("int8", 32), "float16", by_largest=True)


def _rounded(blocks: Tensor, name: str) -> Decoded:
    """Codes of 8 bits for what the gguf package makes of a type. Raises CheckpointError: the
    package is not installed."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise CheckpointError(
            f"weights are of type {name}, which mtpc reads by the package gguf, and it is not "
            "installed; expected it, or types of at least 4 bits: run pip install gguf"
        ) from None
    rows = blocks.flatten(-2).contiguous().numpy()
    values = torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType[name]))
    weight = quantise(values, _ROUNDED)
    count = blocks.shape[-2]
    return Decoded(*(part.unflatten(-1, (count, -1)) for part in (weight.codes, weight.scales)))


def _few_bits(name: str, nbytes: int) -> Block:
    decode = partial(_rounded, name=name)
    return Block(name, SUPER, nbytes, "int8", decode=decode, is_rounded=True)


BLOCKS: dict[int, Block] = {
    0: Block("F32", 1, 4),
    1: Block("F16", 1, 2),
    30: Block("BF16", 1, 2),
    2: Block("Q4_0", 32, 18, "int4", decode=_q4_0, halves=(0,)),
    3: Block("Q4_1", 32, 20, "int4", has_mins=True, decode=_q4_1, halves=(0, 2)),
    6: Block("Q5_0", 32, 22, "int5", decode=_q5_0, halves=(0,), encode=_to_q5_0),
    7: Block("Q5_1", 32, 24, "int5", has_mins=True, decode=_q5_1, halves=(0, 2)),
    8: Block("Q8_0", 32, 34, "int8", decode=_q8_0, halves=(0,), encode=_to_q8_0),
    12: Block("Q4_K", SUPER, 144, "int4", 32, "int16", True, _q4_k, (0, 2)),
    13: Block("Q5_K", SUPER, 176, "int5", 32, "int16", True, _q5_k, (0, 2)),
    14: Block("Q6_K", SUPER, 210, "int6", 16, "int16", False, _q6_k, (208,)),
    20: Block("IQ4_NL", 32, 18, "iq4", decode=_q4_0, halves=(0,), encode=_to_iq4_nl),
    23: Block("IQ4_XS", SUPER, 136, "iq4", 32, "int16", False, _iq4_xs, (0,)),
    39: Block("MXFP4", 32, 17, "e2m1", 32, "uint8", False, _mxfp4),
    10: _few_bits("Q2_K", 84),
    11: _few_bits("Q3_K", 110),
    16: _few_bits("IQ2_XXS", 66),
    17: _few_bits("IQ2_XS", 74),
    18: _few_bits("IQ3_XXS", 98),
    19: _few_bits("IQ1_S", 50),
    21: _few_bits("IQ3_S", 110),
    22: _few_bits("IQ2_S", 82),
    29: _few_bits("IQ1_M", 56),
    34: _few_bits("TQ1_0", 54),
    35: _few_bits("TQ2_0", 66),
}
"""ggml's number of a type -> the type."""

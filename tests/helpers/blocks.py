"""Random weights in GGUF's types, as operators take them, and the gguf package's values of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtpc.weights.block_rows import Block, BlockRows
from mtpc.weights.gguf.blocks import BLOCKS
from mtpc.weights.grouped import GroupedWeight
from mtpc.weights.grouped_recipes import GroupSpec, pack_rows, rows_of

KEPT = [number for number, block in BLOCKS.items() if block.kind and not block.is_rounded]
"""ggml's numbers of the types that are kept as they are stored."""
SCALE_BYTES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Where blocks have their float16: at the first byte, if nothing else is said."""


def random_blocks(number: int, rows: int, inputs: int, seed: int = 0) -> Tensor:
    """Bytes of rows of blocks [rows, bytes]: every pattern of codes, and scales about 0.01."""
    gen = torch.Generator().manual_seed(seed)
    block = BLOCKS[number]
    shape = (rows, inputs // block.inputs, block.nbytes)
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=gen)
    if block.name == "MXFP4":
        raw[..., 0] = 116 + raw[..., 0] % 8
    for start in SCALE_BYTES.get(block.name, (0,)):
        scales = 0.01 * torch.randn(shape[:-1], generator=gen)
        raw[..., start : start + 2] = scales.half()[..., None].view(torch.uint8)
    return raw.flatten(-2)


@dataclass(frozen=True)
class BlockWeight:
    """A weight of blocks.

    Attributes:
        number: ggml's number of the type.
        raw: the blocks of its rows, uint8 [N, bytes].
    """

    number: int
    raw: Tensor

    @property
    def block(self) -> Block:
        return BLOCKS[self.number]

    @property
    def weight(self) -> GroupedWeight:
        """The codes and scales of the blocks."""
        return BlockRows(self.block, self.raw).decoded()

    @property
    def spec(self) -> GroupSpec:
        return GroupSpec(self.block.form, self.block.scales)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes, scales, zeros, packed."""
        packed = pack_rows(rows_of(self.weight), self.spec)
        return packed["codes"], packed["scales"], packed.get("zeros")

    def values(self) -> Tensor:
        """What the gguf package makes of it, float32 [N, K]."""
        import gguf

        kind = gguf.GGMLQuantizationType(self.number)
        with np.errstate(all="ignore"):
            return torch.from_numpy(gguf.quants.dequantize(self.raw.numpy(), kind))

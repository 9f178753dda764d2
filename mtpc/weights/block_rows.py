"""Rows of a weight in blocks, as GGUF files have them: codes of adjacent inputs with their scales.

A kernel packs such rows as they are. Where there is none, and where a recipe cuts between inputs,
they are decoded first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpc.weights.grouped import Decoded, GroupedWeight, GroupForm, Kind


@dataclass(frozen=True)
class Block:
    """A type of ggml.

    Attributes:
        name: ggml's name; for plain numbers also safetensors'.
        inputs: adjacent inputs of a block.
        nbytes: bytes of a block.
        kind: of the codes; None for plain numbers.
        group: inputs that share a scale.
        scales: torch's name of the dtype of the scales; "int16" for those of super-blocks.
        has_mins: whether groups have a minimum.
        decode: bytes of blocks uint8 [..., B, nbytes] -> codes [..., B, inputs], scales and minima
            [..., B, groups or words]; None for plain numbers.
        halves: the bytes at which a float16 begins.
        is_rounded: whether codes are not those of the file, but their values rounded again.
        encode: the inverse of `decode`; None for types that mtpc does not write.
    """

    name: str
    inputs: int
    nbytes: int
    kind: Kind | None = None
    group: int = 32
    scales: str = "float16"
    has_mins: bool = False
    decode: Callable[[Tensor], Decoded] | None = None
    halves: tuple[int, ...] = ()
    is_rounded: bool = False
    encode: Callable[[Decoded], Tensor] | None = None

    @property
    def form(self) -> GroupForm:
        assert self.kind is not None
        return GroupForm.of(self.kind, self.group, self.scales, has_mins=self.has_mins)


@dataclass(frozen=True)
class BlockRows:
    """Rows [..., N, K] as a file has them: uint8 [..., N, bytes of a row], of a type of blocks, not
    of plain numbers."""

    block: Block
    raw: Tensor

    @property
    def form(self) -> GroupForm:
        return self.block.form

    @property
    def numbers(self) -> list[Tensor]:
        """Floating-point tensors that are finite if the weight is."""
        blocks = self.raw.unflatten(-1, (-1, self.block.nbytes))
        return [half_at(blocks, start) for start in self.block.halves]

    def decoded(self) -> GroupedWeight:
        assert self.block.decode is not None
        says = self.block.decode(self.raw.unflatten(-1, (-1, self.block.nbytes)))
        mins = None if says.zeros is None else says.zeros.flatten(-2)
        return GroupedWeight(self.form, says.codes.flatten(-2), says.scales.flatten(-2), mins)

    def widened(self) -> GroupedWeight:
        return self.decoded().widened()


def half_at(blocks: Tensor, start: int) -> Tensor:
    """The float16 [..., B, 1] at a byte of each block."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)

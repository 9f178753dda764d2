"""Weights of GGUF files: blocks of codes with their scales between them.

Kernels read the codes of every type of 4 bits and more. `attn_k_b` and `attn_v_b` are the two parts
that llama.cpp makes of `kv_b_proj`, which latent attention takes apart again; it is read as values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.block_rows import Block, BlockRows
from mtpc.weights.formats.stored import Config, Decode, Grid, QuantisedWeight, Tensors
from mtpc.weights.gguf.file import GgufTensor, Heads
from mtpc.weights.grouped import BITS, Decoded, GroupedWeight
from mtpc.weights.grouped_recipes import GroupSpec

LEAVES: tuple[str, ...] = ()
IGNORED: tuple[str, ...] = ()
_K_B, _V_B = ".k_b_proj.weight", ".v_b_proj.weight"
_GATES, _UPS, _DOWN = (f".experts.{part}" for part in ("gate_proj", "up_proj", "down_proj"))
"""Stacks of gpt-oss, whose class has gates and ups in turns."""


def find(tensors: Tensors, says: Config, config: Mapping[str, Any]) -> list[QuantisedWeight]:
    found = []
    for name, stored in tensors.items():
        if not isinstance(stored, GgufTensor):
            raise CheckpointError(
                f"{name} is of a safetensors file, and config.json has quant_method 'gguf'; "
                "expected a GGUF file, or the method of these files"
            )
        if name.endswith(_K_B):
            found.append(_latent(tensors, name, stored))
        elif name.endswith((_GATES, f"{_GATES}_bias")):
            found.append(_in_turns(tensors, name, stored))
        elif name.endswith(_DOWN):
            found.append(_turned(name, stored, {"codes": name}))
        elif name.endswith((_UPS, f"{_UPS}_bias")):
            continue
        elif stored.block.kind is not None and not name.endswith(_V_B):
            is_stack = len(stored.shape) == 3
            found.append(_stack(name, stored) if is_stack else _weight(name, stored))
    return found


def _weight(name: str, stored: GgufTensor) -> QuantisedWeight:
    block, columns = stored.block, stored.change.columns
    if len(stored.shape) != 2:
        raise CheckpointError(f"{name} is {stored}; expected a quantised matrix [N, K]")
    decode = partial(_decode, block=block, columns=columns)
    made = _coded(name, stored.shape, block, {"codes": name}, decode)
    if columns is None:
        return made if block.is_rounded else replace(made, block=block)
    wide = GroupSpec(block.form, block.scales).widened()
    grid = Grid(1, gcd(block.group, columns.width))  # Groups are cut into those that move as one.
    return replace(made, kind=wide.form.kind, grid=grid, scales=wide.scales)


def _coded(
    name: str, shape: tuple[int, ...], block: Block, parts: Mapping[str, str], decode: Decode
) -> QuantisedWeight:
    """A weight of the codes and scales of blocks."""
    assert block.kind is not None
    return QuantisedWeight(
        name,
        shape,
        f"{block.name}, rounded to {BITS[block.kind]} bits" if block.is_rounded else block.name,
        block.kind,
        Grid(1, block.group),
        False,
        parts,
        decode,
        block.scales,
        has_mins=block.has_mins,
        is_rounded=block.is_rounded,
        rows=dict.fromkeys(parts, (0, 1)),
    )


def _decode(
    parts: Mapping[str, Tensor], block: Block, columns: Heads | None
) -> Decoded | GroupedWeight:
    weight = BlockRows(block, parts["codes"]).decoded()
    if columns is None:
        return weight
    wide = weight.widened()
    group, order = gcd(block.group, columns.width), columns.order()
    grids = [wide.scales, *([] if wide.zeros is None else [wide.zeros])]
    flat = [grid.repeat_interleave(block.group // group, -1) for grid in grids]
    return Decoded(wide.codes[:, order], *(grid[:, order[::group] // group] for grid in flat))


def _as_values(
    name: str,
    shape: tuple[int, ...],
    layout: str,
    parts: Mapping[str, str],
    values_of_parts: Callable[[Mapping[str, Tensor]], Tensor],
) -> QuantisedWeight:
    """A weight that is read as its values, float32 of this shape."""

    def decode(tensors: Mapping[str, Tensor]) -> Decoded:
        values = values_of_parts(tensors)
        return Decoded(values, torch.ones(len(values), 1))

    grid = Grid(1, shape[-1])
    return QuantisedWeight(
        name, shape, layout, "float8", grid, False, parts, decode, "float32", as_values=True
    )


def _stack(name: str, stored: GgufTensor) -> QuantisedWeight:
    """A stack of experts that transformers stores as a stack, too."""
    layout = f"{stored.block.name}, a stack"
    return _as_values(
        name, stored.shape, layout, {"codes": name}, lambda raw: _plain(raw["codes"], stored)
    )


def _in_turns(tensors: Tensors, name: str, gates: GgufTensor) -> QuantisedWeight:
    """gate_up of a stack of gates [E, I, K] and one of ups, or of their biases [E, I]. Raises
    CheckpointError: the ups are missing, or others than the gates."""
    other, joint = name.replace(_GATES, _UPS), name.replace(_GATES, ".experts.gate_up_proj")
    ups = tensors.get(other)
    is_alike = isinstance(ups, GgufTensor) and (ups.shape, ups.block) == (gates.shape, gates.block)
    if not is_alike:
        raise CheckpointError(
            f"{other} is {ups or 'missing'} beside {name}, {gates}; expected the same form"
        )
    parts = {"codes": name, "ups": other}
    if len(gates.shape) == 3:
        return _turned(joint, gates, parts)

    def both(raw: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([_plain(raw[role], gates) for role in parts], -1).flatten(1)

    shape = (gates.shape[0], 2 * gates.shape[1])
    made = _as_values(joint, shape, gates.block.name, parts, both)
    return replace(made, is_plain=gates.block.kind is None)


def _turned(name: str, stored: GgufTensor, parts: Mapping[str, str]) -> QuantisedWeight:
    """A stack that models have with inputs first, of a stored one, or the rows of two in turns."""
    (experts, features, inputs), block = stored.shape, stored.block
    shape = (experts, len(parts) * features, inputs)

    def values(raw: Mapping[str, Tensor]) -> Tensor:
        return _rows_in_turns([_plain(raw[role], stored) for role in parts]).mT

    def blocks(raw: Mapping[str, Tensor]) -> Tensor:
        width = inputs // block.inputs * block.nbytes
        return _rows_in_turns([raw[role].view(-1, features, width) for role in parts])

    def decode(raw: Mapping[str, Tensor]) -> GroupedWeight:
        return BlockRows(block, blocks(raw)).decoded()

    if block.kind is None:
        own_shape = (experts, inputs, shape[1])
        return replace(_as_values(name, own_shape, block.name, parts, values), is_plain=True)
    kept = None if block.is_rounded else block
    made = _coded(name, shape, block, parts, decode)
    return replace(made, block=kept, raw=blocks, is_transposed=True)


def _rows_in_turns(stacks: list[Tensor]) -> Tensor:
    """[E, N, K] of each -> [E, parts * N, K], a row of each in turn."""
    return torch.stack(stacks, 2).flatten(1, 2)


def _latent(tensors: Tensors, name: str, keys: GgufTensor) -> QuantisedWeight:
    """kv_b_proj [heads * (P + V), R] of k_b [heads, R, P] and v_b [heads, V, R]. Raises
    CheckpointError: v_b is missing, or does not fit."""
    other = name.removesuffix(_K_B) + _V_B
    values = tensors.get(other)
    if (
        not isinstance(values, GgufTensor)
        or not len(keys.shape) == len(values.shape) == 3
        or (values.shape[0], values.shape[2]) != keys.shape[:2]
    ):
        raise CheckpointError(
            f"{other} is {values or 'missing'} beside {name}, {keys}; expected [heads, V, R] for "
            "[heads, R, P]"
        )
    heads, rank, width = keys.shape

    def both(raw: Mapping[str, Tensor]) -> Tensor:
        k_b = _plain(raw["codes"], keys).transpose(1, 2)
        return torch.cat((k_b, _plain(raw["values"], values)), 1).flatten(0, 1)

    return _as_values(
        name.removesuffix(_K_B) + ".kv_b_proj.weight",
        (heads * (width + values.shape[1]), rank),
        f"{keys.block.name}, keys and values apart",
        {"codes": name, "values": other},
        both,
    )


def _plain(raw: Tensor, stored: GgufTensor) -> Tensor:
    """The values of a tensor of plain numbers or of blocks, float32."""
    block = stored.block
    if block.kind is None:
        return raw.float()
    return BlockRows(block, raw).decoded().dequantise().reshape(stored.shape)

"""Weights of GPTQ (arXiv:2210.17323), as AutoGPTQ and GPTQModel write them.

A weight X.weight [N, K] is four tensors:

- X.qweight int32 [K * bits / 32, N]: codes, packed down the inputs, the low bits first;
- X.scales [K / group, N];
- X.qzeros int32 [K / group, N * bits / 32]: zero points, packed along the outputs. The format
  "gptq" stores each of them less one, "gptq_v2" (`checkpoint_format`) as it is;
- X.g_idx int32 [K]: the group of each input. With `desc_act` the inputs of a group are not
  adjacent.

`dynamic` in the config has other settings for modules that a regular expression matches: "-:"
leaves them out, "+:" (or no sign) replaces entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.formats.stored import (
    KINDS,
    Config,
    Grid,
    QuantisedWeight,
    Tensors,
    find_part,
    group_size,
    matches,
    packed_parts,
    setting,
    unpack_words,
)
from mtpc.weights.grouped import Decoded

LEAVES = ("qweight", "qzeros", "scales", "g_idx")
IGNORED: tuple[str, ...] = ()


def find(tensors: Tensors, says: Config, config: Mapping[str, Any]) -> list[QuantisedWeight]:
    stems = [name.rpartition(".")[0] for name in tensors if name.endswith(".qweight")]
    return [_weight(tensors, stem, _settings(says, stem)) for stem in stems]


def _settings(says: Config, module: str) -> Config:
    """The settings of a module. Raises CheckpointError: the config leaves the module out."""
    dynamic = says.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise CheckpointError(
            f"quantization_config has dynamic {dynamic!r}; expected an object: pattern -> settings"
        )
    for pattern, changes in dynamic.items():
        if not matches(pattern.removeprefix("+:").removeprefix("-:"), module):
            continue
        if pattern.startswith("-:"):
            raise CheckpointError(
                f"{module}.qweight is quantised, but dynamic in quantization_config leaves out "
                f"{pattern!r}; expected either, not both"
            )
        return {**says, **(changes or {})}
    return says


def _weight(tensors: Tensors, module: str, says: Config) -> QuantisedWeight:
    name, stored = f"{module}.weight", tensors[f"{module}.qweight"]
    bits = setting(says, "bits", 4, 4, 8)
    if len(stored.shape) != 2 or stored.dtype != "I32":
        raise CheckpointError(f"{module}.qweight is {stored}; expected I32 [K * {bits} / 32, N]")
    shape = (stored.shape[1], stored.shape[0] * 32 // bits)
    group = group_size(says, name, shape)
    is_symmetric = setting(says, "sym", True, True, False)
    in_order = not setting(says, "desc_act", False, False, True)
    stored_less = setting(says, "checkpoint_format", "gptq", "gptq", "gptq_v2") == "gptq"
    parts = packed_parts(tensors, module, shape, shape[1] // group, bits)
    indices = f"{module}.g_idx"
    if indices in tensors:
        groups_of = "the group of each input"
        parts["order"] = find_part(tensors, indices, ("I32",), [(shape[1],)], groups_of)
    if not in_order and "order" not in parts:
        raise CheckpointError(f"{module}.g_idx is missing; expected I32[{shape[1]}] with desc_act")
    decode = partial(
        _decode,
        name=name,
        bits=bits,
        less=int(stored_less),
        group=group if in_order else None,
        is_symmetric=is_symmetric,
    )
    layout = f"GPTQ int{bits} in groups of {group}{'' if in_order else ', desc_act'}"
    dtype, order = tensors[parts["scales"]].dtype_name, None if in_order else "order"
    grid, has_zeros = Grid(1, group), not is_symmetric
    rows = {"codes": (1, 1), "scales": (1, 1), "zeros": (1, 32 // bits)}
    return QuantisedWeight(
        name, shape, layout, KINDS[bits], grid, has_zeros, parts, decode, dtype, order, rows=rows
    )


def _decode(
    parts: Mapping[str, Tensor],
    name: str,
    bits: int,
    less: int,
    group: int | None,
    is_symmetric: bool,
) -> Decoded:
    order, scales = parts.get("order"), parts["scales"].t().contiguous()
    if group is not None and order is not None:
        wanted = torch.arange(len(order)) // group
        if not torch.equal(order.long(), wanted):
            raise CheckpointError(
                f"{name.removesuffix('weight')}g_idx does not name runs of {group} inputs; "
                "expected that with desc_act false: correct desc_act in quantization_config"
            )
    zeros = unpack_words(parts["zeros"], bits)[:, : scales.shape[0]].t() + less
    codes = unpack_words(parts["codes"].t(), bits)
    if not is_symmetric:
        return Decoded(codes, scales, zeros.contiguous())
    middle = 1 << (bits - 1)
    if bool((zeros != middle).any()):
        raise CheckpointError(
            f"{name.removesuffix('weight')}qzeros holds other zero points than {middle}; expected "
            "that with sym true: correct sym or checkpoint_format in quantization_config"
        )
    return Decoded(codes, scales)

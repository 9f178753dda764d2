"""Weights of the library compressed-tensors, which vLLM's tools write.

A weight X.weight [N, K] is stored in one of these formats:

- pack-quantized: X.weight_packed int32 [N, K * bits / 32], codes of 4 or 8 bits with 2^(bits - 1)
  added, the low bits first; X.weight_shape int64 [2]. Zero points are packed in the same way down
  the rows: X.weight_zero_point int32 [N * bits / 32, K / group].
- int-quantized: X.weight int8 [N, K]; X.weight_zero_point int8, a place for each scale.
- float-quantized: X.weight float8_e4m3fn [N, K].
- mxfp4-pack-quantized, nvfp4-pack-quantized: X.weight_packed uint8 [N, K / 2], codes of 4 bits, and
  X.weight_scale, for 32 inputs an exponent or for 16 a float8_e4m3fn. The latter are divided by
  X.weight_global_scale, float32 [1].

X.weight_scale has a place for the tensor ([1]), a channel ([N, 1]), a group ([N, K / group]) or a
block. X.weight_g_idx int32 [K] gives the group of each input where these are not adjacent. The
config lists groups of modules with common settings, and modules that are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.formats import mxfp4, nvfp4
from mtpc.weights.formats.stored import (
    KINDS,
    SCALES,
    Config,
    Grid,
    QuantisedWeight,
    Tensors,
    check_groups,
    find_part,
    matches,
    setting,
    texts,
    unpack_words,
    whole_number,
)
from mtpc.weights.grouped import Decoded

LEAVES = (
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
)
IGNORED = (
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
    "k_scale",
    "v_scale",
    "q_scale",
)
_REGEX = "re:"
_ZEROS = "its zero points"


def find(tensors: Tensors, says: Config, config: Mapping[str, Any]) -> list[QuantisedWeight]:
    groups, ignored = _groups_of(says), texts(says, "ignore")
    found = []
    for name, stored in tensors.items():
        module, _, leaf = name.rpartition(".")
        is_packed = leaf == "weight_packed"
        if not is_packed and (leaf != "weight" or stored.dtype not in ("I8", "F8_E4M3")):
            continue
        if any(_names(pattern, module) for pattern in ignored):
            raise CheckpointError(
                f"{name} is quantised, but quantization_config in config.json ignores {module}; "
                "expected either, not both: correct the list 'ignore'"
            )
        weights = _settings(groups, module, name)
        if is_packed and weights.get("type") == "float":
            found.append(_float4(tensors, module, weights))
        elif is_packed:
            found.append(_packed(tensors, module, weights))
        else:
            kind = "int" if stored.dtype == "I8" else "float"
            found.append(plain_weight(tensors, module, weights, kind))
    return found


def _groups_of(says: Config) -> list[tuple[list[str], Config]]:
    """The targets of each group of modules, and the settings of their weights. Raises
    CheckpointError: config.json has no groups of modules."""
    groups = says.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(
            f"quantization_config in config.json has config_groups {groups!r}; expected an "
            "object with the settings of at least one group of modules"
        )
    found = list[tuple[list[str], Config]]()
    for key, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise CheckpointError(
                f"config_groups.{key} in config.json has no weights; expected an object with "
                "num_bits, type and strategy"
            )
        found.append((texts(group, "targets"), weights))
    return found


def _settings(groups: list[tuple[list[str], Config]], module: str, name: str) -> Config:
    """Settings of a module's weights: of its own name before those of its class. Raises
    CheckpointError: the config names the module nowhere."""
    for names in (partial(_names, module=module), _is_class):
        for targets, weights in groups:
            if any(map(names, targets)):
                return weights
    raise CheckpointError(
        f"{name} is quantised, but no group of config_groups in config.json has {module} among "
        "its targets"
    )


def _names(pattern: str, module: str) -> bool:
    """Whether an entry of the config names a module, by its name or by a regular expression."""
    if pattern.startswith(_REGEX):
        return matches(pattern.removeprefix(_REGEX), module)
    return pattern == module


def _is_class(target: str) -> bool:
    """Whether a target is a class of modules: only linear layers have quantised weights here."""
    return not target.startswith(_REGEX) and "." not in target and target[:1].isupper()


def _grid(weights: Config, of: str, shape: tuple[int, int]) -> Grid:
    """Which weights share a scale by the strategy of the config."""
    strategy = setting(weights, "strategy", "tensor", "tensor", "channel", "group", "block")
    if strategy == "group":
        group = whole_number(weights, "group_size", 0)
        check_groups(of, shape, group)
        return Grid(1, group)
    if strategy == "block":
        sides = weights.get("block_structure")
        if not isinstance(sides, list) or [type(s) for s in sides] != [int, int] or min(sides) < 1:
            raise CheckpointError(
                f"quantization_config has block_structure {sides!r}; expected two positive integers"
            )
        return Grid(sides[0], sides[1])
    return Grid(shape[0] if strategy == "tensor" else 1, shape[1])


def _float4(tensors: Tensors, module: str, weights: Config) -> QuantisedWeight:
    """A weight of the formats mxfp4-pack-quantized and nvfp4-pack-quantized."""
    setting(weights, "num_bits", 4, 4)
    setting(weights, "strategy", "group", "group", "tensor_group")
    group = setting(weights, "group_size", mxfp4.GROUP, mxfp4.GROUP, nvfp4.GROUP)
    name, codes, scales = (f"{module}.weight{end}" for end in ("", "_packed", "_scale"))
    if group == nvfp4.GROUP:
        whole = f"{name}_global_scale"
        return nvfp4.weight_of(tensors, name, codes, scales, whole, divides=True)
    shape = tensors[codes].shape
    rows, half = shape if len(shape) == 2 else (1, group // 2)
    find_part(tensors, codes, ("U8",), [(rows, half)], "two floating-point codes a byte")
    check_groups(codes, (rows, 2 * half), group)
    places = [(rows, 2 * half // group)]
    find_part(tensors, scales, ("U8",), places, "exponents of the codes")
    return mxfp4.weight_of(name, (rows, 2 * half), {"codes": codes, "scales": scales})


def _packed(tensors: Tensors, module: str, weights: Config) -> QuantisedWeight:
    bits = setting(weights, "num_bits", 4, 4, 8)
    setting(weights, "type", "int", "int")
    name, stored = f"{module}.weight", tensors[f"{module}.weight_packed"]
    if len(stored.shape) != 2 or stored.dtype != "I32":
        raise CheckpointError(
            f"{module}.weight_packed is {stored}; expected I32 [N, K * {bits} / 32]"
        )
    shape = (stored.shape[0], stored.shape[1] * 32 // bits)
    grid = _grid(weights, name, shape)
    parts = {"codes": f"{module}.weight_packed"}
    parts["shape"] = find_part(
        tensors, f"{module}.weight_shape", ("I64", "I32"), [(2,)], "its sizes"
    )
    parts["scales"] = _scales(tensors, module, grid, shape)
    rows, columns = grid.shape(shape)
    is_symmetric = setting(weights, "symmetric", True, True, False)
    if not is_symmetric:
        sizes: list[tuple[int, ...]] = [(-(-rows * bits // 32), columns)]
        parts["zeros"] = find_part(tensors, f"{module}.weight_zero_point", ("I32",), sizes, _ZEROS)
    indices = f"{module}.weight_g_idx"
    if indices in tensors:
        parts["order"] = find_part(tensors, indices, ("I32", "I64"), [(shape[1],)], "groups")
    order = "order" if indices in tensors else None
    layout = f"int{bits} in groups of {grid.group(shape[1])}{', desc_act' if order else ''}"
    decode = partial(_decode_packed, name=name, shape=shape, bits=bits, columns=columns)
    dtype, has_zeros = tensors[parts["scales"]].dtype_name, not is_symmetric
    lie = _rows(grid, shape, 32 // bits)
    return QuantisedWeight(
        name, shape, layout, KINDS[bits], grid, has_zeros, parts, decode, dtype, order, rows=lie
    )


def _decode_packed(
    parts: Mapping[str, Tensor], name: str, shape: tuple[int, int], bits: int, columns: int
) -> Decoded:
    if tuple(parts["shape"].tolist()) != shape:
        raise CheckpointError(
            f"{name}_shape is {parts['shape'].tolist()}, and {name}_packed holds {list(shape)}; "
            f"expected the same, and inputs that are a multiple of {32 // bits}"
        )
    zeros, grid = parts.get("zeros"), parts["scales"].reshape(-1, columns)
    if zeros is not None:
        zeros = unpack_words(zeros.t(), bits)[:, : len(grid)].t().contiguous()
    return Decoded(unpack_words(parts["codes"], bits), grid, zeros)


def plain_weight(tensors: Tensors, module: str, weights: Config, kind: str) -> QuantisedWeight:
    """A weight, named by its module, whose codes are numbers of one byte: int (int8) or float
    (float8_e4m3fn), with these settings.

    Raises:
        CheckpointError: tensors and settings contradict each other.
    """
    setting(weights, "num_bits", 8, 8)
    setting(weights, "type", kind, kind)
    name = f"{module}.weight"
    stored = tensors[name]
    if len(stored.shape) != 2:
        raise CheckpointError(f"{name} is {stored}; expected a quantised matrix [N, K]")
    shape = (stored.shape[0], stored.shape[1])
    grid = _grid(weights, name, shape)
    parts = {"codes": name, "scales": _scales(tensors, module, grid, shape)}
    is_symmetric = kind == "float" or setting(weights, "symmetric", True, True, False)
    if not is_symmetric:
        sizes = _sizes(grid, shape)
        parts["zeros"] = find_part(tensors, f"{module}.weight_zero_point", ("I8",), sizes, _ZEROS)
    columns = grid.shape(shape)[1]
    strategy = f"a scale for {grid.rows} x {grid.group(shape[1])}"
    return QuantisedWeight(
        name,
        shape,
        f"{'int8' if kind == 'int' else 'FP8'}, {strategy}",
        "int8" if kind == "int" else "float8",
        grid,
        not is_symmetric,
        parts,
        partial(_decode_plain, columns=columns),
        tensors[parts["scales"]].dtype_name,
        rows=_rows(grid, shape),
    )


def _decode_plain(parts: Mapping[str, Tensor], columns: int) -> Decoded:
    zeros = parts.get("zeros")
    if zeros is not None:
        zeros = _unsigned(zeros).reshape(-1, columns)
    codes = parts["codes"]
    codes = _unsigned(codes) if codes.dtype == torch.int8 else codes
    return Decoded(codes, parts["scales"].reshape(-1, columns), zeros)


def _unsigned(values: Tensor) -> Tensor:
    return values.view(torch.uint8) ^ 128


def _rows(grid: Grid, shape: tuple[int, int], zeros: int = 1) -> dict[str, tuple[int, int]]:
    """Where rows lie: along the first dimension. A grid of one row has none. An entry has so many
    rows of zero points."""
    if grid.shape(shape)[0] == 1:
        return {"codes": (0, 1)}
    return {"codes": (0, 1), "scales": (0, grid.rows), "zeros": (0, grid.rows * zeros)}


def _scales(tensors: Tensors, module: str, grid: Grid, shape: tuple[int, int]) -> str:
    name = f"{module}.weight_scale"
    return find_part(tensors, name, SCALES, _sizes(grid, shape), f"scales of {list(shape)}")


def _sizes(grid: Grid, shape: tuple[int, int]) -> list[tuple[int, ...]]:
    """Shapes that a grid may have; exporters differ in dimensions of size 1."""
    rows, columns = grid.shape(shape)
    flat: list[tuple[int, ...]] = [(rows,)] if columns == 1 else []
    flat += [()] if rows == columns == 1 else []
    return [(rows, columns), *flat, *([(rows, 1, columns, 1)] if grid.rows > 1 else [])]

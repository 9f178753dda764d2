"""A quantised weight as a checkpoint stores it, whatever its format.

Each format gives three things for a weight: codes, a grid of scales, and possibly a grid of zero
points. Each entry of a grid applies to a rectangle of weights. Scales for a tensor, a channel, a
group of inputs or a block differ in these rectangles alone. So this module derives the rest for all
formats: the form that kernels read, and the dequantised values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import lcm, prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.block_rows import Block, BlockRows
from mtpc.weights.grouped import Decoded, GroupedWeight, GroupForm, Kind, values_of
from mtpc.weights.grouped_recipes import GroupedRows, GroupSpec, SomeRows, rows_of
from mtpc.weights.tensor_file import StoredTensor

Tensors = Mapping[str, StoredTensor]
"""Descriptions of tensors by name."""
Config = Mapping[str, Any]
"""The entry `quantization_config` of config.json."""

KINDS: Mapping[int, Kind] = {4: "int4", 8: "int8"}
"""Bits of a code that is a whole number -> its kind."""
SCALES = ("F16", "BF16", "F32")
"""safetensors' names of the dtypes that scales may have."""
_CHUNK = 1 << 22
"""Weights that are dequantised at once, so that no float32 copy of a whole weight is made."""


@dataclass(frozen=True)
class Grid:
    """Which weights [N, K] share a scale: rectangles of so many rows and columns. Each of the
    chunks of rows begins with a new one, as fused projections have them."""

    rows: int
    columns: int
    chunks: int = 1

    def shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Sizes of the grid of a weight of this shape; rectangles at the edges are smaller."""
        of_chunk = -(-(shape[0] // self.chunks) // self.rows)
        return self.chunks * of_chunk, -(-shape[1] // self.columns)

    def expand(self, grid: Tensor, num_rows: int) -> Tensor:
        """The grid with its rows repeated: one for each row of the weight."""
        if self.rows == 1:
            return grid
        chunks = grid.unflatten(0, (self.chunks, -1)).repeat_interleave(self.rows, 1)
        return chunks[:, : num_rows // self.chunks].flatten(0, 1).contiguous()

    def group(self, inputs: int) -> int:
        """Inputs of a row that share a scale."""
        return min(self.columns, inputs)


Decode = Callable[[Mapping[str, Tensor]], Decoded | GroupedWeight]
"""Tensors by role -> codes [N, K] and grids. Raises CheckpointError if they contradict the config.
"""
Raw = Callable[[Mapping[str, Tensor]], Tensor]
"""Tensors by role -> rows of blocks."""


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight as its format stores it, known from headers alone.

    Attributes:
        name: of the weight, "X.weight".
        shape: [N, K] or, where a row has its own scales, a stack [E, N, K].
        layout: what it is, for notes: "int4 in groups of 128".
        kind: of the codes.
        grid: which weights share a scale.
        has_zeros: whether there is a grid of zero points.
        parts: role -> name of the tensor. One role is "codes".
        decode: reads the tensors.
        scales: torch's name of the dtype of the scales.
        order: role of a tensor int32 [K] with the group of each input; None if groups are runs of
            adjacent inputs.
        has_mins: whether there is a grid of minima.
        is_rounded: whether the values of its own type, which no kernel reads, are rounded again.
        as_values: whether it can only be dequantised. The codes of `decode` are float32 values
            then.
        rows: role -> (dimension of that tensor along which rows of the weight lie, rows for each of
            its entries). The tensor of a role that is not listed holds for all rows. If empty, the
            weight is decoded as a whole.
        block: the type of blocks that a kernel may pack; None where rows must be decoded first.
        raw: reads the tensors as rows of such blocks, uint8 [..., N, bytes].
        is_transposed: whether models have the inputs of a stack before its features.
        is_plain: whether the tensors are plain numbers, which are put together. No note counts it.
    """

    name: str
    shape: tuple[int, ...]
    layout: str
    kind: Kind
    grid: Grid
    has_zeros: bool
    parts: Mapping[str, str]
    decode: Decode
    scales: str
    order: str | None = None
    has_mins: bool = False
    as_values: bool = False
    is_rounded: bool = False
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    block: Block | None = None
    raw: Raw = itemgetter("codes")
    is_transposed: bool = False
    is_plain: bool = False

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape that models have: that of `values`."""
        *stack, features, inputs = self.shape
        return (*stack, inputs, features) if self.is_transposed else self.shape

    @property
    def spec(self) -> GroupSpec | None:
        """What kernels read; None if the weight must be dequantised."""
        form = self.form
        return None if form is None else GroupSpec(form, self.scales, turned=self.is_transposed)

    @property
    def form(self) -> GroupForm | None:
        """The form that kernels read; None if the weight must be dequantised."""
        group = self.grid.group(self.shape[-1])
        form = GroupForm.of(self.kind, group, self.scales, self.has_zeros, self.has_mins)
        is_unknown = self.order or self.as_values
        return None if is_unknown or form.misfit(self.shape[-1]) else form

    def grouped(self, read: Callable[[str], Tensor]) -> GroupedRows:
        """The weight in the form that kernels read, of its tensors by name; only where it has
        one."""
        tensors = {role: read(name) for role, name in self.parts.items()}

        def some(start: int, stop: int) -> SomeRows:
            assert self.form is not None
            if self.block is not None:
                return BlockRows(self.block, self.raw(self._parts(tensors, start, stop)))
            decoded = self._decode(tensors, start, stop)
            return GroupedWeight(self.form, decoded.codes, decoded.scales, decoded.zeros)

        if not self.rows:
            return rows_of(some(0, self.shape[0]).decoded())
        return GroupedRows(self.shape, some)

    def values(self, read: Callable[[str], Tensor], dtype: torch.dtype) -> Tensor:
        """The weight that the codes stand for: float32 values, rounded once to `dtype`."""
        tensors = {role: read(name) for role, name in self.parts.items()}
        decoded = self._decode(tensors, 0, self.shape[0])
        if self.as_values:
            return decoded.codes.to(dtype)
        out = torch.empty(self.shape, dtype=dtype)
        column = self._columns(read)
        rows = max(1, _CHUNK // max(prod(self.shape[1:]), 1))
        for start in range(0, self.shape[0], rows):
            run = slice(start, start + rows)
            codes, scales = decoded.codes[run], decoded.scales[run]
            zeros = None if decoded.zeros is None else decoded.zeros[run]
            if column is None:
                assert self.form is not None
                out[run] = GroupedWeight(self.form, codes, scales, zeros).dequantise()
            else:
                form = GroupForm(self.kind, 1, self.has_zeros, self.has_mins)
                zeros = None if zeros is None else zeros[:, column]
                out[run] = values_of(form, codes, scales[:, column], zeros)
        return out.transpose(-2, -1).contiguous() if self.is_transposed else out

    def _columns(self, read: Callable[[str], Tensor]) -> Tensor | None:
        """The column of the grid for each input; None where kernels can read the weight."""
        if self.form is not None:
            return None
        if self.order is None:
            return torch.arange(self.shape[1]) // self.grid.columns
        name = self.parts[self.order]
        column, groups = read(name).long(), self.grid.shape(self.shape)[1]
        if bool((column < 0).any()) or bool((column >= groups).any()):
            raise CheckpointError(f"{name} names groups outside of 0..{groups - 1}")
        return column

    def _decode(self, tensors: Mapping[str, Tensor], start: int, stop: int) -> Decoded:
        """Rows [start, stop), with grids that have a row for each of them."""
        step = lcm(*(count for _, count in self.rows.values())) if self.rows else self.shape[0]
        begin, end = start // step * step, min(-(-stop // step) * step, self.shape[0])
        decoded = self.decode(self._parts(tensors, begin, end))
        run = slice(start - begin, stop - begin)

        def expand(grid: Tensor) -> Tensor:
            return self.grid.expand(grid, end - begin)[run]

        zeros = None if decoded.zeros is None else expand(decoded.zeros)
        return Decoded(decoded.codes[run], expand(decoded.scales), zeros)

    def _parts(self, tensors: Mapping[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
        """The parts of tensors for the rows [begin, end), which begin with an entry of each."""
        parts = dict(tensors)
        for role in tensors.keys() & self.rows.keys():
            dim, count = self.rows[role]
            first = begin // count
            parts[role] = tensors[role].narrow(dim, first, -(-end // count) - first)
        return parts


def find_part(
    tensors: Tensors, name: str, dtypes: Iterable[str], shapes: Iterable[tuple[int, ...]], what: str
) -> str:
    """Check that a tensor that a weight needs is there, of one of these dtypes, by safetensors'
    names, and shapes; returns its name. Messages say what it holds.

    Raises:
        CheckpointError: it is missing, or of another dtype or shape.
    """
    dtypes, shapes = list(dtypes), list(shapes)
    sizes = (f"{dtypes[0]}[{','.join(map(str, shape))}]" for shape in shapes)
    wanted = f"{' or '.join(sizes)}, {what}{''.join(f', or in {d}' for d in dtypes[1:])}"
    stored = tensors.get(name)
    if stored is None:
        raise CheckpointError(
            f"{name} is missing; expected {wanted}; download the checkpoint again, or "
            "correct quantization_config in its config.json"
        )
    if stored.dtype not in dtypes or stored.shape not in shapes:
        raise CheckpointError(
            f"{name} is {stored}; expected {wanted}; correct "
            "quantization_config in config.json, or download the checkpoint again"
        )
    return name


def packed_parts(
    tensors: Tensors, module: str, shape: tuple[int, int], groups: int, bits: int
) -> dict[str, str]:
    """The tensors of a weight [N, K] of GPTQ or AWQ by role; see `find_part`."""
    sizes, packed = [(groups, shape[0])], [(groups, -(-shape[0] * bits // 32))]
    return {
        "codes": f"{module}.qweight",
        "scales": find_part(tensors, f"{module}.scales", SCALES, sizes, "its scales"),
        "zeros": find_part(tensors, f"{module}.qzeros", ("I32",), packed, "its zero points"),
    }


def check_groups(of: str, shape: tuple[int, int], group: int) -> None:
    """Refuse groups that do not divide the inputs of a weight.

    Raises:
        CheckpointError: they do not.
    """
    if group < 1 or shape[1] % group:
        raise CheckpointError(
            f"{of} has {shape[1]} inputs, and config.json has groups of {group}; expected a size "
            "that divides them: correct group_size in quantization_config"
        )


def group_size(says: Config, of: str, shape: tuple[int, int]) -> int:
    """Inputs of a group by the entry "group_size", as GPTQ and AWQ have it: -1 is a whole row.

    Raises:
        CheckpointError: it does not divide the inputs of the weight.
    """
    group = whole_number(says, "group_size", 128)
    group = shape[1] if group == -1 else group
    check_groups(of, shape, group)
    return group


def setting(config: Config, name: str, default: Any, *wanted: Any) -> Any:
    """An entry of the config that has one of the wanted values.

    Raises:
        CheckpointError: it has another value.
    """
    value = config.get(name, default)
    if value not in wanted or isinstance(value, bool) != isinstance(wanted[0], bool):
        names = " or ".join(repr(one) for one in wanted)
        raise CheckpointError(
            f"quantization_config in config.json has {name} {value!r}; expected {names}: "
            "dequantise the checkpoint to bfloat16 first"
        )
    return value


def whole_number(config: Config, name: str, default: int) -> int:
    """An entry of the config that is a whole number.

    Raises:
        CheckpointError: it is something else.
    """
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(
            f"quantization_config in config.json has {name} {value!r}; expected a whole number"
        )
    return value


def matches(pattern: str, module: str) -> bool:
    """Whether a regular expression of the config matches the beginning of a module's name.

    Raises:
        CheckpointError: it is no regular expression.
    """
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise CheckpointError(
            f"quantization_config in config.json has the pattern {pattern!r}: {error}; expected a "
            "regular expression"
        ) from None


def texts(config: Config, name: str) -> list[str]:
    """A list of texts in the config; none if it is absent.

    Raises:
        CheckpointError: it is something else.
    """
    value = config.get(name) or []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise CheckpointError(
            f"quantization_config in config.json has {name} {value!r}; expected a list of names"
        )
    return value


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Codes of 4 or 8 bits, packed in int32 [..., W] from the low bits up, along the last
    dimension: uint8 [..., W * 32 / bits]."""
    bytes_ = words.contiguous().view(torch.uint8)
    return bytes_ if bits == 8 else unpack_bytes(bytes_)


def unpack_bytes(codes: Tensor) -> Tensor:
    """Codes of two inputs a byte, the first in its low bits: uint8 [..., B] -> [..., 2 B]."""
    pairs = codes.to(torch.int16)
    pairs |= pairs << 4
    pairs &= 0x0F0F
    return pairs.view(torch.uint8)


def pack_words(codes: Tensor) -> Tensor:
    """The inverse of `unpack_words` for 4 bits: uint8 [..., 8 W] -> int32 [..., W]."""
    pairs = codes.unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)

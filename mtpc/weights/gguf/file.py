"""GGUF files as the tensors of a checkpoint, under transformers' names.

llama.cpp's converter renames tensors, adds one to some norms, stacks experts, and puts value heads
into another order. `mtpc.weights.gguf.families` says what it did to each tensor. This module undoes
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.gguf.header import (
    MOST_TENSORS,
    TEMPLATE,
    Header,
    Skipped,
    StoredBlocks,
    read_header,
)
from mtpc.weights.tensor_file import DTYPES, TensorFile, map_file


@dataclass(frozen=True)
class Heads:
    """The order of value heads: transformers groups them by key head, files interleave key heads.

    So are the rows of a Llama head that rotate together: the two halves of a head are its `keys`.

    Attributes:
        keys: key heads.
        values: value heads of each key head.
        width: rows of a value head.
        skip: rows before the first.
        times: how many such orders follow each other.
    """

    keys: int
    values: int
    width: int = 1
    skip: int = 0
    times: int = 1

    @property
    def count(self) -> int:
        """Number of rows, those before the first included."""
        return self.skip + self.times * self.keys * self.values * self.width

    def order(self) -> Tensor:
        """For each row in transformers, its row in the file."""
        rows = (
            torch.arange(self.count - self.skip)
            .view(self.times, self.values, self.keys, self.width)
            .transpose(1, 2)
        )
        return torch.cat((torch.arange(self.skip), self.skip + rows.reshape(-1)))


@dataclass(frozen=True)
class Change:
    """What the converter did to a tensor in addition to renaming it.

    `values` is "plus_one"; "negative_exp", -exp(x); or "" for nothing. Orders of rows and columns
    (inputs) are None if they are as in transformers.
    """

    values: Literal["", "plus_one", "negative_exp"] = ""
    rows: Heads | None = None
    columns: Heads | None = None


@dataclass(frozen=True)
class GgufTensor(StoredBlocks):
    """A tensor of a GGUF file, or a matrix of a stack, under transformers' name.

    Attributes, in addition to those of `StoredBlocks`:
        change: what llama.cpp's converter did to its values.
    """

    change: Change


class GgufFile(TensorFile):
    """The tensors of one GGUF file, under transformers' names: none until `add` is called.

    Raises:
        CheckpointError: it is not a complete GGUF file.
    """

    def __init__(self, path: Path):
        self.path, self._map = path, map_file(path)
        self.header: Header = read_header(self._map, path)
        self.tensors = {}

    def add(self, name: str, source: str, change: Change, shape: tuple[int, ...] = ()) -> None:
        """Give a tensor of the file transformers' name, and its sizes there, if they differ.
        `change` is what the converter did to it."""
        stored = self.header.tensors[source]
        made = GgufTensor(**{**vars(stored), "shape": shape or stored.shape, "change": change})
        for heads, size in ((change.rows, made.shape[0]), (change.columns, made.shape[-1])):
            if heads is not None and heads.count != size:
                raise CheckpointError(
                    f"{self.path}: {source} is {made}; expected {heads.count} in place of {size}, "
                    "as the metadata announce heads"
                )
        self._add(name, made)

    def add_stack(self, name: str, source: str) -> None:
        """As `add`, for each matrix of a stack; its number takes the place of {} in the name."""
        stored = self.header.tensors[source]
        (count, *matrix), known = stored.shape, len(self.tensors)
        if len(matrix) != 2 or known + count > MOST_TENSORS:
            raise CheckpointError(
                f"{self.path}: {source} is {list(stored.shape)}; expected a stack of matrices, and "
                f"at most {MOST_TENSORS} tensors in all"
            )
        first = GgufTensor(**{**vars(stored), "shape": tuple(matrix), "change": Change()})
        for index in range(count):
            begin = stored.begin + index * first.nbytes
            self._add(name.format(index), replace(first, begin=begin))

    def _add(self, name: str, made: GgufTensor) -> None:
        if name in self.tensors:
            raise CheckpointError(f"{self.path}: two tensors are {name}; expected one")
        self.tensors[name] = made

    def tensor(self, name: str) -> Tensor:
        """One tensor as transformers has it; quantised ones as bytes, uint8 [N, bytes of a row].

        Columns of quantised ones are in the file's order.
        """
        stored = self.tensors[name]
        assert isinstance(stored, GgufTensor)
        change = stored.change
        if stored.block.kind is not None:
            raw = self._values(stored.span, torch.uint8).view(stored.shape[0], -1)
            return raw if change.rows is None else raw[change.rows.order()]
        values = super().tensor(name)
        if change.values == "plus_one":
            values = (values.float() - 1).to(values.dtype)
        elif change.values == "negative_exp":
            values = torch.log(-values.float()).to(values.dtype)
        if change.rows is not None:
            values = values[change.rows.order()]
        return values if change.columns is None else values[:, change.columns.order()]

    def text(self, key: str, index: Any) -> str | None:
        """One text of an array that the header skips; None if it has no such one."""
        array = self.header.metadata.get(key)
        if not isinstance(array, Skipped) or type(index) is not int or not 0 <= index < array.count:
            return None
        begin = end = array.begin
        for _ in range(index + 1):
            begin = end + 8
            end = begin + int.from_bytes(self._map[end:begin], "little")
        return self._map[begin:end].decode("utf-8", "replace")

    def plain(self, source: str) -> Tensor:
        """A tensor of plain numbers as the file has it, by its name there."""
        stored = self.header.tensors[source]
        return self._values(stored.span, DTYPES[stored.dtype]).view(stored.shape)

    def raw(self, begin: int, end: int) -> bytes:
        return self._map[begin:end]

    def pieces(self, name: str) -> Iterator[Tensor]:
        yield self.tensor(name)  # A change may need all rows.


def has_tokens(path: Path) -> bool:
    """Whether a GGUF file has a vocabulary."""
    return "tokenizer.ggml.tokens" in GgufFile(path).header.metadata


def chat_template(path: Path) -> tuple[Any, dict[str, str]]:
    """A GGUF file's chat template, None without one, and texts of special tokens by its names."""
    file, tokens = GgufFile(path), dict[str, str]()
    for name in ("bos", "eos"):
        index = file.header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        text = file.text("tokenizer.ggml.tokens", index)
        tokens |= {} if text is None else {f"{name}_token": text}
    return file.header.metadata.get(TEMPLATE), tokens


def open_gguf(paths: list[Path]) -> tuple[dict[str, Any], Mapping[Path, TensorFile]]:
    """Open the files of one model, the first part first. Returns transformers' config, from the
    metadata, and the files by path.

    Raises:
        CheckpointError: a file is not complete; or the model is of a family, or has a tensor, that
            mtpc does not know.
    """
    from mtpc.weights.gguf.families import describe

    files = [GgufFile(path) for path in paths]
    tensors: dict[str, StoredBlocks] = {}
    for file in files:
        for name, stored in file.header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{file.path}: {name} is in another part, too")
            tensors[name] = stored
    first = files[0].header
    config = describe(replace(first, tensors=tensors), files)
    return config, {file.path: file for file in files}

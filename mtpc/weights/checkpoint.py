"""Reading checkpoints: config.json, headers of safetensors files, and tensors by memory map.

This module does not import transformers, because a warm start reads weights with it alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.block_scales import dequantise, find_block_scales
from mtpc.weights.fused_qkv import find_fused_qkv
from mtpc.weights.tensor_file import StoredTensor, TensorFile

_OF_BOTH = ("eos_token_id", "tie_word_embeddings")
"""Entries that multimodal configs may have outside of the language model's config."""
_FIRST = 6
"""A message lists this many names; then it says how many more there are."""


class Checkpoint:
    """A directory with config.json and safetensors files; opening it checks all headers.

    Args:
        directory: the checkpoint's path.

    Attributes:
        config: config.json.
        tensors: headers of all weights by name, without the scales of block-scaled weights. A
            projection of queries, keys or values that is stored within a fused tensor is there by
            its own name (`fused_qkv`).

    Raises:
        CheckpointError: there is no such directory, no config.json or no safetensors file; a file
            is incomplete; or the weights are quantised in a way that mtpc does not read.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        if not directory.is_dir():
            raise CheckpointError(
                f"{str(directory)!r} is not a directory; expected a local checkpoint with "
                "config.json and *.safetensors (mtpc downloads nothing)"
            )
        self.config = self._read_config()
        self._files = {path: TensorFile(path) for path in self._shards()}
        self.tensors: dict[str, StoredTensor] = {}
        for file in self._files.values():
            self.tensors.update(file.tensors)
        self._fused: dict[str, StoredTensor] = {}
        self._scales = find_block_scales(self.tensors, self.config)
        for scale in self._scales.values():
            del self.tensors[scale.name]
        self._parts = find_fused_qkv(self.tensors, self.text_config)
        for name, part in self._parts.items():
            whole = self.tensors[part.fused]
            self.tensors[name] = replace(whole, shape=(part.count, *whole.shape[1:]))
        for fused in {part.fused for part in self._parts.values()}:
            self._fused[fused] = self.tensors.pop(fused)

    @property
    def is_block_scaled(self) -> bool:
        """Whether weights are stored as FP8 and read as bfloat16."""
        return bool(self._scales)

    @property
    def is_converted(self) -> bool:
        """Whether `tensors` are others than those of the files."""
        return bool(self._scales or self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all its safetensors files."""
        return sum(path.stat().st_size for path in self._files)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that tell a user how the weights are read."""
        if not self._scales:
            return ()
        return (f"{len(self._scales)} block-scaled FP8 weight(s) are dequantised to bfloat16",)

    def _read_config(self) -> dict[str, Any]:
        path = self.directory / "config.json"
        if not path.is_file():
            raise CheckpointError(
                f"{self.directory} has no config.json; expected a checkpoint's directory"
            )
        return _read_json(path)

    def _shards(self) -> list[Path]:
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(_read_json(index)["weight_map"].values()))
            shards = [self.directory / name for name in names]
        else:
            shards = sorted(self.directory.glob("*.safetensors"))
        if not shards:
            raise CheckpointError(
                f"{self.directory} holds no *.safetensors file; expected at least one"
            )
        for path in shards:
            if not path.is_file():
                raise CheckpointError(
                    f"{path} is named in the index but missing; download it again"
                )
        return shards

    @property
    def text_config(self) -> dict[str, Any]:
        """Config of the language model, even inside the config of a multimodal model."""
        nested = self.config.get("text_config")
        if nested is None:
            return self.config
        outer = {k: v for k, v in self.config.items() if k in _OF_BOTH}
        return {**outer, **nested}

    @property
    def dtype(self) -> str | None:
        """Name of the weights' dtype in config.json, or "bfloat16" if they are dequantised."""
        if self.is_block_scaled:
            return "bfloat16"
        said = [config.get(key) for config in (self.text_config, self.config)
                for key in ("dtype", "torch_dtype")]  # fmt: skip
        return next((name for name in said if name), None)

    def names(self, prefix: str = "") -> list[str]:
        """Tensor names that begin with `prefix`."""
        return [name for name in self.tensors if name.startswith(prefix)]

    def tensor(self, name: str) -> Tensor:
        """One tensor as stored, in a private memory map of its file; using it reads the file.

        A block-scaled weight is dequantised to a new tensor at each call, and a part of a fused
        one is copied.
        """
        if name in self._parts:
            part = self._parts[name]
            whole = self._read(part.fused, self._fused[part.fused])
            return torch.cat([whole[start:stop] for start, stop in part.runs])
        return self._read(name, self.tensors[name])

    def _read(self, name: str, header: StoredTensor) -> Tensor:
        stored = self._files[header.path].tensor(name)
        if name not in self._scales:
            return stored
        scale = self._scales[name]
        factors = self._files[scale.stored.path].tensor(scale.name)
        return dequantise(stored, factors, scale)

    def release(self, name: str) -> None:
        """Give back the memory of a tensor; if it is used again, it is read again."""
        stored = self._parts[name].fused if name in self._parts else name
        self._files[self.tensors[name].path].release(stored)

    def stop_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids in generation_config.json or, if it has none, in config.json."""
        path = self.directory / "generation_config.json"
        generation = _read_json(path) if path.is_file() else {}
        ids = generation.get("eos_token_id")
        return as_ids(self.text_config.get("eos_token_id") if ids is None else ids)


def stored_dtype(source: Any) -> str | None:
    """Name of the weights' dtype of a checkpoint or a model object; None if it is not known."""
    if isinstance(source, Checkpoint):
        return source.dtype
    dtype = getattr(source, "dtype", None)
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else None


def checkpoint_of(model: Any) -> Checkpoint | None:
    """The checkpoint that a model object was loaded from; None without a local directory."""
    path = Path(model.name_or_path or "")
    return Checkpoint(path) if model.name_or_path and path.is_dir() else None


def as_ids(ids: Any) -> tuple[int, ...]:
    """The `eos_token_id` of a config (None, one id or several) as a tuple."""
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None


def listing(names: list[str]) -> str:
    """The first few names as text, and how many more there are."""
    if not names:
        return "none"
    more = f" and {len(names) - _FIRST} more" if len(names) > _FIRST else ""
    return ", ".join(names[:_FIRST]) + more


def check_finite(tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Refuse weights that hold NaN or infinity; they would decode to garbage without an error.

    Args:
        tensors: with their names.
        what: what they belong to, for the message.

    Raises:
        CheckpointError: some do; the message names the first of them.
    """
    refuse_not_finite([name for name, tensor in tensors if not is_finite(tensor)], what)


def refuse_not_finite(bad: list[str], what: str) -> None:
    """Raise one error for all tensors that hold NaN or infinity, if there are any.

    Args:
        bad: their names.
        what: what they belong to, for the message.

    Raises:
        CheckpointError: `bad` is not empty.
    """
    if bad:
        raise CheckpointError(
            f"{what}: {len(bad)} tensor(s) hold NaN or infinity: {listing(bad)}; expected finite "
            "weights: the checkpoint is damaged, or its training diverged"
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether all values of a tensor are finite.

    It computes the minimum and the maximum, which are NaN if any value is. That takes one
    vectorised pass and is 40 times as fast as isfinite.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.dtype.itemsize == 1:  # torch has no aminmax for eight-bit floats.
        tensor = tensor.bfloat16()
    low, high = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(low) & torch.isfinite(high))

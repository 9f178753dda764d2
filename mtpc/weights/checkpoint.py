"""Reading checkpoints: config.json and safetensors, headers first, tensors by memory map.

Imports nothing of transformers: a program that comes from the cache is filled from here alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.block_scales import dequantise, find_block_scales
from mtpc.weights.tensor_file import StoredTensor, TensorFile

_OF_BOTH = ("eos_token_id", "tie_word_embeddings")
"""Entries that multimodal configs may have outside the language model's part of them."""
_FIRST = 6
"""Names that a message lists before it says how many more there are."""


class Checkpoint:
    """A directory with config.json and safetensors files, every header checked on opening.

    Args:
        directory: the checkpoint's path.

    Attributes:
        tensors: headers of all weights by name; scales of block-scaled weights are left out.
        notes: what a user should know of how it is read.

    Raises:
        CheckpointError: no such directory, no config.json, no safetensors file, a file whose
            header or length is not what safetensors wrote, or quantised weights that are not
            those of `mtpc.weights.block_scales`.
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
        self._scales = find_block_scales(self.tensors, self.config)
        for scale in self._scales.values():
            del self.tensors[scale.name]

    @property
    def is_block_scaled(self) -> bool:
        """Whether weights are stored as FP8 and read as bfloat16."""
        return bool(self._scales)

    @property
    def nbytes(self) -> int:
        """Bytes of all its files of weights."""
        return sum(path.stat().st_size for path in self._files)

    @property
    def notes(self) -> tuple[str, ...]:
        if not self._scales:
            return ()
        return (f"{len(self._scales)} block-scaled FP8 weight(s) are dequantised to bfloat16",)

    def _read_config(self) -> dict[str, Any]:
        path = self.directory / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{self.directory} has no config.json; is it a checkpoint?")
        return _read_json(path)

    def _shards(self) -> list[Path]:
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(_read_json(index)["weight_map"].values()))
            shards = [self.directory / name for name in names]
        else:
            shards = sorted(self.directory.glob("*.safetensors"))
        if not shards:
            raise CheckpointError(f"{self.directory} holds no *.safetensors file")
        for path in shards:
            if not path.is_file():
                raise CheckpointError(f"{path} is named in the index but missing")
        return shards

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's config: config.json, or what a multimodal one nests."""
        nested = self.config.get("text_config")
        if nested is None:
            return self.config
        outer = {k: v for k, v in self.config.items() if k in _OF_BOTH}
        return {**outer, **nested}

    @property
    def dtype(self) -> str | None:
        """Name of the dtype that config.json says weights have, "bfloat16" of dequantised ones."""
        if self.is_block_scaled:
            return "bfloat16"
        said = [config.get(key) for config in (self.text_config, self.config)
                for key in ("dtype", "torch_dtype")]  # fmt: skip
        return next((name for name in said if name), None)

    def names(self, prefix: str = "") -> list[str]:
        """Tensor names that begin with `prefix`."""
        return [name for name in self.tensors if name.startswith(prefix)]

    def tensor(self, name: str) -> Tensor:
        """One tensor, as stored: a private memory map of its file, read where it is used.

        A block-scaled weight is dequantised: a new tensor at each call.
        """
        stored = self._files[self.tensors[name].path].tensor(name)
        if name not in self._scales:
            return stored
        scale = self._scales[name]
        factors = self._files[scale.stored.path].tensor(scale.name)
        return dequantise(stored, factors, scale.block)

    def release(self, name: str) -> None:
        """Give back the memory of a tensor that is hardly needed any more; it stays readable."""
        self._files[self.tensors[name].path].release(name)

    def stop_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids: generation_config.json's, else config.json's."""
        path = self.directory / "generation_config.json"
        generation = _read_json(path) if path.is_file() else {}
        ids = generation.get("eos_token_id")
        return as_ids(self.text_config.get("eos_token_id") if ids is None else ids)


def stored_dtype(source: Any) -> str | None:
    """Name of the dtype of a checkpoint's, or a model object's, weights, where it is known."""
    if isinstance(source, Checkpoint):
        return source.dtype
    dtype = getattr(source, "dtype", None)
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else None


def checkpoint_of(model: Any) -> Checkpoint | None:
    """The local directory that a transformers model object was loaded from, if it is there."""
    path = Path(model.name_or_path or "")
    return Checkpoint(path) if model.name_or_path and path.is_dir() else None


def as_ids(ids: Any) -> tuple[int, ...]:
    """A config's `eos_token_id`: none, one, or several."""
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None


def check_repeated(checkpoint: Checkpoint, name: str, weight: Tensor) -> None:
    """An MTP layer's own copy of the embedding or head must be the target's, which is used.

    Raises:
        CheckpointError: it is not.
    """
    if not torch.equal(checkpoint.tensor(name).to(weight.dtype), weight):
        raise CheckpointError(
            f"{name} differs from the tensor of the target that it repeats; an MTP layer with an "
            "embedding or head of its own is not supported"
        )


def listing(names: list[str]) -> str:
    """The first few names, and how many more."""
    if not names:
        return "none"
    more = f" and {len(names) - _FIRST} more" if len(names) > _FIRST else ""
    return ", ".join(names[:_FIRST]) + more


def check_finite(tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Refuse weights that hold NaN or infinity: they would decode to garbage without a word.

    Raises:
        CheckpointError: names of the first tensors at fault.
    """
    refuse_not_finite([name for name, tensor in tensors if not is_finite(tensor)], what)


def refuse_not_finite(bad: list[str], what: str) -> None:
    """One error for all of them, if there are any.

    Raises:
        CheckpointError: there are.
    """
    if bad:
        raise CheckpointError(
            f"{what}: {len(bad)} tensor(s) hold NaN or infinity: {listing(bad)}; "
            "the checkpoint is damaged or was saved from a diverged run"
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity.

    By the extremes, which NaN takes over: one vectorised pass, 40 times isfinite's speed.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.dtype.itemsize == 1:  # Eight-bit floats have no such kernel.
        tensor = tensor.bfloat16()
    low, high = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(low) & torch.isfinite(high))

"""Writing a checkpoint: tensors stream into files of limited size; its directory appears whole."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpc.errors import CheckpointError, OptionError
from mtpc.weights.checkpoint_files import CheckpointFiles
from mtpc.weights.json_file import CONFIG, INDEX

_SHARD_BYTES = 1 << 30
"""A file is written when its tensors have this many bytes; it bounds the memory in use."""
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", ".h5")
"""Ends of names of files that are not copied."""


def refuse_existing(out: Path) -> None:
    """Refuse a path that is taken.

    Raises:
        OptionError: `out` exists.
    """
    if os.path.lexists(out):
        raise OptionError(f"{out} exists; expected the name of a new directory")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` that becomes `out` at the end of the block.

    If the block raises, the directory is removed, and `out` does not appear.

    Raises:
        CheckpointError: `out` cannot be written.
    """
    try:
        scratch = Path(tempfile.mkdtemp(dir=out.absolute().parent, prefix=f".{out.name}."))
        try:
            yield scratch
            scratch.chmod(0o755)
            scratch.rename(out)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error}") from error


class ShardWriter:
    """Writes tensors into safetensors files of limited size.

    Args:
        directory: where to write.

    Attributes:
        nbytes: bytes of the tensors so far.
    """

    def __init__(self, directory: Path):
        self._directory, self.nbytes = directory, 0
        self._held: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors that own their memory; a file is written when enough are held."""
        self._held |= tensors
        self.nbytes += sum(tensor.nbytes for tensor in tensors.values())
        if sum(tensor.nbytes for tensor in self._held.values()) >= _SHARD_BYTES:
            self._save()

    def finish(self) -> None:
        """Write what is left, and give the files the names by which other programs find them."""
        if self._held:
            self._save()
        count = len(self._shards)
        if count == 1:
            (self._directory / _numbered(0)).rename(self._directory / "model.safetensors")
            return
        places: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05}-of-{count:05}.safetensors"
            (self._directory / _numbered(index)).rename(self._directory / file)
            places |= dict.fromkeys(names, file)
        write_json(
            self._directory / INDEX,
            {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(places.items()))},
        )

    def _save(self) -> None:
        path = self._directory / _numbered(len(self._shards))
        save_file(self._held, path, metadata={"format": "pt"})
        path.chmod(0o644)  # The library gives it to its owner alone.
        self._shards.append(list(self._held))
        self._held = {}


def _numbered(index: int) -> str:
    return f"shard-{index:05}"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as released checkpoints have it."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def copy_others(source: Path, directory: Path) -> None:
    """Copy the tokenizer and whatever else lies beside the weights and config.json."""
    for path in source.iterdir():
        if path.is_file() and path.name != CONFIG and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, directory / path.name)


def copy_replacing(files: CheckpointFiles, tensors: Mapping[str, Tensor], out: Path) -> None:
    """Write a copy of a checkpoint in which some tensors have other values.

    All else of its files is the same, byte for byte: headers, names, dtypes, other tensors.

    Args:
        files: the checkpoint, in safetensors files.
        tensors: by name in the files, of the same shape; they are rounded to the stored dtype.
        out: the new directory; it must not exist. It appears when it is whole.

    Raises:
        CheckpointError: `out` cannot be written.
    """
    with new_directory(out) as scratch:
        for path in files.directory.iterdir():
            if path.is_file():
                shutil.copyfile(path, scratch / path.name)
        for name, tensor in tensors.items():
            stored, old = files.stored[name], files.read(name)
            assert tensor.shape == old.shape, name
            values = tensor.detach().to("cpu", old.dtype).contiguous().flatten()
            with (scratch / stored.path.name).open("r+b") as file:
                file.seek(stored.begin)
                file.write(values.view(torch.uint8).numpy().tobytes())

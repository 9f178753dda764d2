"""Writing a checkpoint: tensors stream into files of limited size; its directory appears whole."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtpc.errors import CheckpointError, OptionError
from mtpc.weights.checkpoint_files import CheckpointFiles
from mtpc.weights.hub import hub_id
from mtpc.weights.json_file import CONFIG, INDEX
from mtpc.weights.plain_file import is_held
from mtpc.weights.tensor_file import save_tensors

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

    If the block raises, the directory is removed, and `out` does not appear. What a killed process
    has left of the same `out` is removed first.

    Raises:
        CheckpointError: `out` cannot be written.
    """
    prefix, parent = f".{out.name}.mtpc-", out.absolute().parent
    try:
        # This user's directories that no process holds.
        found: list[Path] = []
        with suppress(OSError):  # The parent cannot be listed.
            found += parent.iterdir()
        for path in found:
            if not re.fullmatch(re.escape(prefix) + "[a-z0-9_]{8}", path.name):
                continue
            with suppress(OSError):  # Another process removes it, or the file system has no locks.
                if path.lstat().st_uid == os.geteuid() and not is_held(path):
                    shutil.rmtree(path, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(dir=parent, prefix=f"{prefix}new-"))
        handle = os.open(scratch, os.O_RDONLY)
        try:
            with suppress(OSError):  # A file system without locks.
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Only now it gets a name by which others find what is abandoned.
            scratch = scratch.rename(parent / f"{prefix}{scratch.name[-8:]}")
            yield scratch
            scratch.chmod(0o755)
            scratch.rename(out)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        finally:
            os.close(handle)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error}") from error


class ShardWriter:
    """Writes tensors, `nbytes` bytes so far, into safetensors files of limited size."""

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
        save_tensors(self._held, path, format="pt")
        path.chmod(0o644)  # The library gives it to its owner alone.
        self._shards.append(list(self._held))
        self._held = {}


def _numbered(index: int) -> str:
    return f"shard-{index:05}"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as released checkpoints have it."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def files_beside(source: Path, weights: Collection[Path] | None = None) -> list[Path]:
    """The tokenizer and whatever else lies beside the weights of a checkpoint. Files of a snapshot
    of the hub cache are links. Without `weights`, config.json and all names that weights have are
    left out.

    Raises:
        CheckpointError: a file is a link out of the checkpoint: what it leads to is another's.
    """
    real = source.resolve()
    home = real.parent.parent if hub_id(real) else real
    found = [path for path in source.iterdir() if path.is_file()]
    if weights is None:
        weights = [p for p in found if p.name == CONFIG or p.name.endswith(_WEIGHTS)]
    beside = [path for path in found if path not in weights]
    for path in beside:
        if not path.resolve().is_relative_to(home):
            raise CheckpointError(
                f"{path} is a link out of the checkpoint, to {path.resolve()}; expected a file to "
                "copy: put a copy in its place, or remove it"
            )
    return beside


def copy_others(source: Path, directory: Path) -> None:
    """Copy what lies beside the weights and config.json; see `files_beside`."""
    for path in files_beside(source):
        shutil.copyfile(path, directory / path.name)


def copy_replacing(files: CheckpointFiles, tensors: Mapping[str, Tensor], out: Path) -> None:
    """Write a copy of a checkpoint in safetensors files, in which some tensors have other values of
    the same shape, rounded to the stored dtype.

    All else of its files is the same, byte for byte: headers, names, dtypes, other tensors. `out`
    must not exist. It appears when it is whole.

    Raises:
        CheckpointError: `out` cannot be written.
    """
    with new_directory(out) as scratch:
        for path in (*files.paths, *files_beside(files.directory, files.paths)):
            shutil.copyfile(path, scratch / path.name)
        for name, tensor in tensors.items():
            stored, old = files.stored[name], files.read(name)
            assert tensor.shape == old.shape, name
            values = tensor.detach().to("cpu", old.dtype).contiguous().flatten()
            with (scratch / stored.path.name).open("r+b") as file:
                file.seek(stored.begin)
                file.write(values.view(torch.uint8).numpy().tobytes())

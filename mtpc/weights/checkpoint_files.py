"""The files of a checkpoint: config.json, headers of safetensors files, tensors by memory map.

A checkpoint may also be GGUF files, whose metadata take the place of config.json.

`mtpc.weights.checkpoint` reads weights from these files. Code that copies or examines tensors as
they are stored needs this module only.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.json_file import (
    CONFIG,
    INDEX,
    QUANTIZATION,
    check_config,
    check_counts,
    read_json,
    shard_names,
    wrong,
)
from mtpc.weights.tensor_file import StoredTensor, TensorFile

if TYPE_CHECKING:
    from mtpc.weights.read_ahead import ReadAhead

MTP_COUNT_NAMES = ("mtp_num_hidden_layers", "num_mtp_layers", "num_nextn_predict_layers")
"""Config entries that give the number of MTP layers; the first one present counts."""
HOW_TO_DRAFT = (
    "for drafts, copy the text's own words (draft='copy'), or train (mtpc train-draft) or give a "
    "drafter's checkpoint (draft=DIR)"
)
_MTP_TENSOR = re.compile(r"(?:.*\.)?mtp[._]|(?:model\.|language_model\.)*layers\.(?P<number>\d+)\.")
"""How names of MTP tensors begin in every family; a decoder layer of theirs has a number after the
target's."""
_OF_BOTH = ("eos_token_id", "tie_word_embeddings")
"""Entries of the language model that multimodal configs may have outside of `text_config`."""


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those that its index names, there or not; or all.

    Raises:
        CheckpointError: the index is damaged.
    """
    index = directory / INDEX
    if os.path.isfile(index):
        return [directory / name for name in shard_names(read_json(index), index)]
    found = sorted(directory.glob("*.safetensors"))
    return [path for path in found if path.name != "adapter_model.safetensors"]


def is_directory(path: Path) -> bool:
    """Whether a path leads to a directory.

    Raises:
        CheckpointError: the system refuses the path: it is too long, or may not be searched.
    """
    try:
        return path.is_dir()
    except OSError as error:
        raise CheckpointError(
            f"cannot open the checkpoint {str(path)[:200]!r}: {error.strerror}; expected the path "
            "of a directory that this user may read"
        ) from None


def place_of(source: Path) -> Path:
    """The path itself, if it leads anywhere; else, of an id of the hub, its snapshot's.

    Raises:
        CheckpointError: as `mtpc.weights.hub.find_directory`.
    """
    if is_directory(source) or source.exists():
        return source
    from mtpc.weights.hub import find_directory  # Not above: few starts have an id.

    return find_directory(source)


class ConfigFile:
    """The config.json of a directory, or of an id on the Hugging Face hub. It may hold no weights.

    Raises:
        CheckpointError: there is no such directory, or no valid config.json.
    """

    config: dict[str, Any]

    def __init__(self, directory: Path):
        self.directory = place_of(directory)
        self.config = self._read_config()

    @property
    def text_config(self) -> dict[str, Any]:
        """Config of the language model, even inside the config of a multimodal model."""
        nested = self.config.get("text_config")
        if nested is None:
            return self.config
        outer = {k: v for k, v in self.config.items() if k in _OF_BOTH}
        return {**outer, **nested}

    @property
    def announced_dtype(self) -> str | None:
        """Name of the dtype that config.json gives; None if it gives none."""
        said = [config.get(key) for config in (self.text_config, self.config)
                for key in ("dtype", "torch_dtype")]  # fmt: skip
        return next((name for name in said if name), None)

    @property
    def config_path(self) -> Path:
        return self.directory / CONFIG

    def _read_config(self) -> dict[str, Any]:
        path = self.config_path
        if not is_directory(self.directory):
            from mtpc.weights.hub import no_checkpoint

            raise no_checkpoint(self.directory)
        if not os.path.isfile(path):
            from mtpc.weights.hub import what_to_do

            raise CheckpointError(
                f"{self.directory} has no config.json; expected a checkpoint's directory: "
                f"{what_to_do(self.directory)}"
            )
        config, apart = read_json(path), self.directory / QUANTIZATION
        if config.get("quantization_config") is None and os.path.isfile(apart):
            config["quantization_config"] = _read_quantization(apart)
        check_config(config, path)
        return config


def _read_quantization(path: Path) -> dict[str, Any]:
    """The quantization_config that ModelOpt writes to a file of its own."""
    says = read_json(path).get("quantization")
    if not isinstance(says, dict):
        raise wrong(path, "quantization", says, "an object with quant_algo")
    return {**says, "quant_method": "modelopt", "ignore": says.get("exclude_modules")}


class CheckpointFiles(ConfigFile):
    """A directory with config.json and safetensors files; opening it checks all headers.

    Args:
        directory: the checkpoint's path, or its id on the Hugging Face hub. Or a GGUF file, or
            a directory with one and without config.json.

    Attributes:
        directory: where its files are; the path of a GGUF file, if that was given.
        gguf: its GGUF files; () if it has none.
        config: the entries of config.json, or those that GGUF metadata describe.
        stored: headers of all tensors by their names in the files.

    Raises:
        CheckpointError: there is no such directory, no config.json or no safetensors file; or a
            file is incomplete.
        UnsupportedModelError: a GGUF file has a family that mtpc does not know.
    """

    def __init__(self, directory: Path):
        self.directory = directory = place_of(directory)
        self.gguf: tuple[Path, ...] = ()
        if not os.path.lexists(directory / CONFIG):
            from mtpc.weights.gguf import find_gguf  # Not above: few checkpoints need it.

            self.gguf = tuple(find_gguf(directory))
        self._files: Mapping[Path, TensorFile]
        if self.gguf:
            from mtpc.weights.gguf.file import open_gguf  # Not above: few checkpoints need it.

            self.config, self._files = open_gguf(list(self.gguf))
            check_config(self.config, self.gguf[0])
        else:
            self.config = self._read_config()
            self._files = {path: TensorFile(path) for path in self._shards()}
        self.stored: dict[str, StoredTensor] = {}
        for file in self._files.values():
            for name, stored in file.tensors.items():
                if name in self.stored:
                    raise CheckpointError(
                        f"{name} is in {self.stored[name].path.name} and in {stored.path.name} of "
                        f"{self.directory}; expected it in one file: remove the other, or write an "
                        f"index ({INDEX})"
                    )
                self.stored[name] = stored
        check_counts(self.config, self.config_path, len(self.stored))

    @property
    def config_path(self) -> Path:
        """The file that describes the model: config.json, or the first GGUF file."""
        return self.gguf[0] if self.gguf else super().config_path

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self._files)

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    @property
    def files(self) -> Iterable[TensorFile]:
        return self._files.values()

    @property
    def without_drafts(self) -> str:
        """Why nothing in the checkpoint drafts, and what would; "" if it has MTP layers."""
        text = self.text_config
        count = next((text[name] for name in MTP_COUNT_NAMES if text.get(name) is not None), None)
        layers: Any = text.get("num_hidden_layers", math.inf)
        numbers = (m["number"] for m in map(_MTP_TENSOR.match, self.stored) if m)
        if count != 0 and any(n is None or int(n) >= layers for n in numbers):
            return ""
        if not count:
            return f"{self.directory} announces no MTP layers; {HOW_TO_DRAFT}"
        return (
            f"{self.directory} has lost the MTP layers that its config announces; for drafts, put "
            f"back those of its base: mtpc graft BASE {self.directory} OUT"
        )

    @contextmanager
    def reading_ahead(self, ahead: ReadAhead) -> Iterator[None]:
        """Within the block, files take tensors from `ahead` if it has them."""
        with ahead:
            for file in self.files:
                file.ahead = ahead
            try:
                yield
            finally:
                for file in self.files:
                    file.ahead = None

    def read(self, name: str) -> Tensor:
        """One tensor of the files, by its name there and as it is stored; see `TensorFile`."""
        return self._files[self.stored[name].path].tensor(name)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """A tensor of the files, some rows at a time; see `TensorFile.pieces`."""
        return self._files[self.stored[name].path].pieces(name)

    def sample(self, name: str, nbytes: int) -> bytes:
        """Some bytes from the middle of a tensor of the files."""
        return self._files[self.stored[name].path].sample(name, nbytes)

    def release_stored(self, name: str) -> None:
        """Give back the memory of a tensor of the files; if it is used again, it is read again."""
        self._files[self.stored[name].path].release(name)

    def _shards(self) -> list[Path]:
        shards = weight_files(self.directory)
        if not shards:
            from mtpc.weights.hub import what_to_do

            raise CheckpointError(
                f"{self.directory} holds no *.safetensors file of a model; expected at least one: "
                f"{what_to_do(self.directory)}"
            )
        for path in shards:
            if not os.path.isfile(path):  # False, too, where the name is too long.
                from mtpc.weights.hub import download_again

                raise CheckpointError(
                    f"{path} is named in the index but missing; {download_again(self.directory)}"
                )
        return shards

"""Shapes and dtypes of a model, from the headers of its files or from config.json alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtpc.errors import CheckpointError
from mtpc.models.family import ModelFamily
from mtpc.models.load import LoadedModel, family_of, load
from mtpc.models.mtp_layers import build_mtp_layer
from mtpc.models.read_config import read_config
from mtpc.models.refused_config import build_shapes, explaining
from mtpc.weights.checkpoint_files import MTP_COUNT_NAMES, CheckpointFiles, ConfigFile
from mtpc.weights.hub import find_directory
from mtpc.weights.json_file import check_counts


@dataclass(frozen=True)
class Shapes:
    """A model whose weights have no values.

    `scheme` is the name of that by which its checkpoint is quantised, where there are no headers
    that say so for each weight; else None.
    """

    loaded: LoadedModel
    scheme: str | None
    has_headers: bool


def load_shapes(directory: Path, dtype: str | None, needs_mtp: bool) -> Shapes:
    """A checkpoint by its headers; by its config.json, if the directory holds no weight file.
    Without a `dtype`, weights have the checkpoint's.

    Raises:
        CheckpointError: as `load` and `load_config`; or config.json says that weights are quantised
            in a way that only their headers tell.
        UnsupportedModelError: as `load`.
    """
    directory = find_directory(directory, needs="config")
    if _has_headers(directory):
        return Shapes(load(directory, dtype, needs_mtp, headers_only=True), None, True)
    loaded = load_config(directory, dtype, needs_mtp)
    return Shapes(loaded, _scheme(ConfigFile(directory)), False)


def announces_drafts(directory: Path) -> bool:
    """Whether a checkpoint has MTP layers: by its headers, else by its config.json.

    Raises:
        CheckpointError, UnsupportedModelError: as `load_shapes`.
    """
    directory = find_directory(directory, needs="config")
    if _has_headers(directory):
        return not CheckpointFiles(directory).without_drafts
    file, family = _described(directory)
    with explaining(file, family):
        config = read_config(file, family).get_text_config(decoder=True)
    return family.num_mtp_layers(config) != 0


def _described(directory: Path) -> tuple[ConfigFile, ModelFamily]:
    """The config.json of a directory that holds no weights, and the family that serves it."""
    file = ConfigFile(directory)
    check_counts(file.config, file.config_path)
    return file, family_of(file)


def _has_headers(directory: Path) -> bool:
    has_files = not directory.is_dir() or any(directory.glob("*.safetensors*"))
    return has_files or next(directory.glob("*.gguf"), None) is not None


def _scheme(file: ConfigFile) -> str | None:
    """The scheme that stands for a config's `quantization_config`."""
    said = file.config.get("quantization_config") or file.text_config.get("quantization_config")
    if not said:
        return None
    method = said.get("quant_method") if isinstance(said, dict) else said
    if method == "fp8":
        return "fp8"
    raise CheckpointError(
        f"{file.directory}/config.json has quantization_config with quant_method {method!r}, and "
        "there is no weight file whose header says what is stored; expected 'fp8' or none: add "
        "the checkpoint's *.safetensors files"
    )


def load_config(directory: Path, dtype: str | None, needs_mtp: bool) -> LoadedModel:
    """The model that a config.json describes. Without a `dtype`, weights have config.json's, or
    bfloat16.

    An embedding and a head that a checkpoint may store with an MTP layer are taken for the
    target's.

    Raises:
        CheckpointError: config.json is missing or invalid, or does not describe such a model.
        UnsupportedModelError: the architecture is not in `FAMILIES`.
    """
    file, family = _described(directory)
    wanted = getattr(torch, dtype or file.announced_dtype or "bfloat16")
    with explaining(file, family):
        target = build_shapes(file, family, wanted)
        with torch.device("meta"):
            count = _count(family, target, file.directory) if needs_mtp else 0
            layers = tuple(build_mtp_layer(family, target, i).to(wanted) for i in range(count))
    return LoadedModel(family, target.eval(), layers, (), str(file.directory), None, True)


def _count(family: ModelFamily, target: Any, directory: Path) -> int:
    """The number of MTP layers, which `block_config` then reads from the config, too."""
    config = target.config.get_text_config(decoder=True)
    count = family.num_mtp_layers(config)
    if not count:
        raise CheckpointError(
            f"{directory}/config.json gives {count} for the number of MTP layers, and there is no "
            f"weight file to find them in; expected {MTP_COUNT_NAMES[-1]} of at least 1; use "
            "--spec-tokens 0 to plan without drafts"
        )
    setattr(config, MTP_COUNT_NAMES[-1], count)
    return count

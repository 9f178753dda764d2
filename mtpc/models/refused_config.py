"""Which entry of config.json transformers refuses.

Few errors of transformers' checks, config classes and modules name the entry. So this module
searches for it: it builds the model without each entry, and with another value in its place, until
that succeeds. It builds models without memory, and only after something has failed. A model of many
layers takes seconds each time, so the search has a time limit, and reports what it has found.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING
from itertools import takewhile
from typing import Any, TypeAlias

import torch
from huggingface_hub.errors import StrictDataclassError

from mtpc.errors import CheckpointError, MtpcError
from mtpc.models.family import ModelFamily
from mtpc.models.hf import model_class
from mtpc.models.mtp_layers import build_mtp_layer
from mtpc.models.read_config import (
    TEXT,
    config_class,
    config_field,
    kinds_of,
    quiet_transformers,
    read_config,
    sub_configs,
)
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.checkpoint_files import ConfigFile
from mtpc.weights.json_file import kind_of

Place: TypeAlias = tuple[str, ...]
"""Where an entry is: the names of the objects that it is in, and its own."""
_ABSENT, _SUITABLE = object(), 2
"""In place of a value: no entry at all; and a number that suits many sizes."""
_LONGEST_S = 20.0
"""The time limit of a search."""
_MOST_NAMED, _MOST_SAID = 3, 300
"""A message names so many entries, and quotes so many characters of another error."""
_MOST_PER_BYTE = 4
"""Weights of a model for each byte of its checkpoint, at most: no format has fewer than 2 bits."""


def build_shapes(file: ConfigFile, family: ModelFamily, dtype: torch.dtype | None = None) -> Any:
    """The target that a config.json describes, on the meta device; by default in float32.

    Raises:
        Exception: transformers refuses the config, with an error of any kind.
    """
    with quiet_transformers(), torch.device("meta"):
        config = read_config(file, family)
        return model_class(family)._from_config(
            config, dtype=dtype or torch.float32, attn_implementation="eager"
        )


def are_too_many(weights: int, nbytes: int) -> bool:
    """Whether so many weights cannot be stored in so many bytes."""
    return weights > _MOST_PER_BYTE * nbytes + 2**20


def check_size(checkpoint: Checkpoint, family: ModelFamily) -> None:
    """Refuse a config.json whose model is far larger than the tensors, before it takes memory.

    transformers fills what a checkpoint lacks with random values before it says what is missing.
    """
    model = build_shapes(checkpoint, family)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    count = sum(sizes.values())
    if are_too_many(count, checkpoint.nbytes):
        raise CheckpointError(
            f"{checkpoint.config_path} describes a model of {count} weights, the most of them in "
            f"{max(sizes, key=sizes.__getitem__)}, and the checkpoint's tensors have "
            f"{checkpoint.nbytes} bytes; correct the file or download it again"
        )


@contextmanager
def explaining(file: ConfigFile, family: ModelFamily) -> Iterator[None]:
    """Within it, an error of any kind that transformers raises becomes one for the checkpoint.

    Raises:
        CheckpointError: it names the entry of config.json. If a model can be built from that, it is
            about the tensors.
    """
    try:
        yield
    except MtpcError:
        raise
    except Exception as error:
        reason = said(_failure(file, family, file.config) or error)
        end = time.monotonic() + _LONGEST_S
        found = _guilty(file, family, _ABSENT, end) or _guilty(file, family, _SUITABLE, end)
        if not found:
            raise CheckpointError(
                f"transformers cannot load {file.config_path} and the tensors beside it: {reason}; "
                f"expected those of one released {family.hf_class}: correct or download them again"
            ) from error
        shown = found[:_MOST_NAMED]
        names = " or ".join(f"{'.'.join(path)} is {kind_of(value)}" for path, value in shown)
        raise CheckpointError(
            f"{file.config_path}: {names}, and transformers refuses it: {reason}; expected "
            f"{_expected(family, found[0][0])}: correct the file or download it again"
        ) from error


def misshapen(
    file: ConfigFile, family: ModelFamily, found: Iterable[tuple[str, Any, Any]]
) -> CheckpointError:
    """The error for tensors of other shapes than config.json describes: name, shape in the
    checkpoint and shape in the model of each."""
    name, stored, described = min(found)
    sizes = [*_sizes_of(file, family, name)]
    on = f", by {', '.join(sizes)}" if sizes else ""
    return CheckpointError(
        f"{file.config_path} describes {name} as {[*described]}{on}; the checkpoint's tensor is "
        f"{[*stored]}: correct the file or download the checkpoint again"
    )


def _sizes_of(file: ConfigFile, family: ModelFamily, name: str) -> Iterator[str]:
    """The entries on which the shape of a tensor depends: with other values, the shape differs."""

    def shape(config: dict[str, Any]) -> Any:
        if _failure(file, family, config) is not None:  # The entry cannot change alone.
            return None
        parameters = dict(build_shapes(_edited(file, config), family).named_parameters())
        return parameters[name].shape if name in parameters else None

    usual, end = shape(file.config), time.monotonic() + _LONGEST_S
    parts = {(): file.config, (TEXT,): file.config.get(TEXT) or {}}
    entries = [((*at, name), value) for at, part in parts.items() for name, value in part.items()]
    for path, value in takewhile(lambda _: time.monotonic() <= end, entries):
        if value is not None and type(value) is not int:
            continue
        other = 2 * value if value else 1
        if shape(_with(file.config, path, other)) not in (None, usual):
            yield f"{'.'.join(path)} ({kind_of(value)})"


def _edited(file: ConfigFile, config: dict[str, Any]) -> ConfigFile:
    edited = copy.copy(file)
    edited.config = config
    return edited


def _with(config: dict[str, Any], path: Place, value: Any) -> dict[str, Any]:
    """A config with another value in one place, or without that entry."""
    name, *rest = path
    if rest:
        return {**config, name: _with(config[name], tuple(rest), value)}
    if value is _ABSENT:
        return {key: held for key, held in config.items() if key != name}
    return {**config, name: value}


def _failure(file: ConfigFile, family: ModelFamily, config: dict[str, Any]) -> Exception | None:
    """What building a model, its MTP layers and its state raises; None if nothing does."""
    try:
        target = build_shapes(_edited(file, config), family, torch.bfloat16)
        text = target.config.get_text_config(decoder=True)
        count = family.num_mtp_layers(text) or 0
        with torch.device("meta"):
            for index in range(count):
                build_mtp_layer(family, target, index)
        for layer in range(text.num_hidden_layers + count):
            family.cache_specs(text, layer, torch.bfloat16)
    except Exception as error:
        return error
    return None


def _guilty(
    file: ConfigFile, family: ModelFamily, other: Any, end: float
) -> list[tuple[Place, Any]]:
    """The entries that make the model fail: with another value of one, it can be built.

    Of entries within each other these are the innermost. The search stops at `end`.
    """

    def search(part: Mapping[str, Any], above: Place) -> Iterator[tuple[Place, Any]]:
        for name, value in takewhile(lambda _: time.monotonic() <= end, part.items()):
            path = (*above, name)
            if _failure(file, family, _with(file.config, path, other)) is not None:
                continue
            inner = [*search(value, path)] if isinstance(value, dict) else []
            yield from inner or [(path, value)]

    is_fine = _failure(file, family, file.config) is None
    return [] if is_fine else [*search(file.config, ())]


def said(error: Exception) -> str:
    while isinstance(error, StrictDataclassError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # The error of one of transformers' own checks.
    kind = "" if isinstance(error, (MtpcError, TypeError, ValueError)) else type(error).__name__
    text = " ".join(f"{kind}: {error}".removeprefix(": ").split())
    return text if len(text) <= _MOST_SAID else text[:_MOST_SAID] + "..."


def _expected(family: ModelFamily, path: Place) -> str:
    """The type and the default that transformers gives an entry."""
    kind = config_class(family)
    for name in path[:-1]:
        kind = sub_configs(kind).get(name) or (kind if name == TEXT else None)
    field = config_field(kind, path[-1])
    if field is None:
        return f"what a released {family.hf_class} has"
    names = " or ".join(getattr(one, "__name__", str(one)) for one in kinds_of(field.type))
    has_default = field.default is not MISSING and field.default is not None
    return f"{names}, such as {field.default!r}" if has_default else names

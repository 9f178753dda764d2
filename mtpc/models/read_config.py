"""From config.json to transformers' config, without entries that steer transformers itself.

transformers copies every entry of config.json onto its config object. Some would make it ask the
hub for code (`attn_implementation`), import packages, read other files, or replace its own methods.
mtpc decides all of that itself, so it drops what does not describe the model.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import transformers

from mtpc.models.family import ModelFamily, check_computed
from mtpc.models.hf import model_class
from mtpc.models.rotary import check_rotary
from mtpc.weights.checkpoint_files import ConfigFile
from mtpc.weights.json_file import LARGEST, wrong

_STEERING = (
    "auto_map",
    "custom_generate",
    "distributed_config",
    "fusion_config",
    "gguf_file",
    "kernel_config",
    "quantization_config",
    "transformers_weights",
    "use_kernels",
)
"""Entries that transformers looks up on a config, and that its base class does not declare."""
_PER_LAYER = "per_layer_config"
_MODEL = ("rope_scaling", _PER_LAYER)
"""Entries of the base class that describe the model."""


TEXT = "text_config"
_BOUNDLESS = "window"
"""Sizes whose names have this may be negative: nothing limits them then."""


def read_config(file: ConfigFile, family: ModelFamily) -> Any:
    """The config object of the family's class.

    Raises:
        CheckpointError: a whole number in the file is impossible for a model.
        Exception: what transformers and the family raise; see `refused_config.explaining`.
    """
    kind = config_class(family)
    check_numbers(file, kind)
    entries = file.config if TEXT in sub_configs(kind) else file.text_config
    check_computed(entries, family.computed)
    config = kind(**family.config_entries(describing(entries)))
    check_rotary(config.get_text_config(decoder=True), file.config_path)
    return config


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off transformers' progress bar, and warnings about what mtpc checks or reads itself."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def config_class(family: ModelFamily) -> Any:
    """transformers' class of a family's config."""
    name = family.hf_config_class
    return getattr(transformers, name) if name else model_class(family).config_class


def sub_configs(kind: Any) -> Mapping[str, Any]:
    """The classes of the parts of a config, by their entries."""
    return getattr(kind, "sub_configs", None) or {}


def check_numbers(file: ConfigFile, kind: Any) -> None:
    """Refuse sizes that are negative or huge. transformers would take them, and fail later. What
    transformers' class of the config has a positive default for is a size.

    Raises:
        CheckpointError: a size is wrong; the message names it.
    """
    for part, prefix, entries in _parts(file, kind):
        for name, value in entries.items():
            field = config_field(part, name)
            if field is None or type(value) is not int or float in kinds_of(field.type):
                continue
            is_size = type(field.default) is int and field.default > 0
            least = 0 if is_size and _BOUNDLESS not in name else -LARGEST
            if not least <= value <= LARGEST:
                expected = f"a whole number from {least} to {LARGEST}"
                raise wrong(file.config_path, prefix + name, value, expected)


def _parts(file: ConfigFile, kind: Any) -> Iterator[tuple[Any, str, Mapping[str, Any]]]:
    """The config and that of its language model: class, prefix of its entries, entries."""
    nested = file.config.get(TEXT)
    if nested is None or TEXT in sub_configs(kind):
        yield kind, "", file.config
    if nested is not None:
        yield sub_configs(kind).get(TEXT, kind), f"{TEXT}.", nested


def config_field(kind: Any, name: str) -> Any:
    """The dataclass field of a config class that an entry is for; None if it has none."""
    names = getattr(kind, "attribute_map", {})
    return getattr(kind, "__dataclass_fields__", {}).get(names.get(name, name))


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union, without None; of another type, itself."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if is_union else (hint,)
    return tuple(kind for kind in kinds if kind is not types.NoneType)


def describing(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that describe the model, also within the configs of its parts and layers; a new
    object."""
    kept = {n: value for n, value in fields.items() if n in _MODEL or not _is_steering(n)}
    found = {name: _described(name, value) for name, value in kept.items()}
    if kept.get(_PER_LAYER) and not found[_PER_LAYER]:
        del found[_PER_LAYER]  # No layer has an entry that describes it.
    return found


def _described(name: str, value: Any) -> Any:
    if name == _PER_LAYER and isinstance(value, dict):
        layers = {n: describing(own) if isinstance(own, dict) else own for n, own in value.items()}
        return {layer: own for layer, own in layers.items() if own != {}}
    if name.endswith("_config") and isinstance(value, dict):
        return describing(value)
    return _number(value)


def _number(value: Any) -> Any:
    """A value of config.json; transformers writes numbers that JSON lacks as {"__float__": ...}."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    if isinstance(value, dict) and value.keys() == {"__float__"}:
        return float(value["__float__"])
    return value


def _is_steering(name: str) -> bool:
    """Whether an entry is private, or names something of transformers' base class."""
    return (
        name.startswith("_")
        or name.endswith("_implementation")
        or name in _STEERING
        or hasattr(transformers.PreTrainedConfig, name)
    )

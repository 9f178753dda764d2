"""From config.json to transformers' config, without entries that steer transformers itself.

transformers copies every entry of config.json onto its config object. Some would make it ask the
hub for code (`attn_implementation`), import packages, read other files, or replace its own methods.
mtpc decides all of that itself, so it drops what does not describe the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from mtpc.models.family import ModelFamily
from mtpc.weights.checkpoint_files import ConfigFile

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
_MODEL = ("rope_scaling",)
"""Entries of the base class that describe the model."""


def read_config(checkpoint: ConfigFile, family: ModelFamily) -> Any:
    """The config object of the family's class. It raises what transformers and the family raise."""
    config_class = getattr(transformers, family.hf_config_class)
    is_nested = "text_config" in getattr(config_class, "sub_configs", {})
    fields = checkpoint.config if is_nested else checkpoint.text_config
    return config_class(**family.config_entries(describing(fields)))


def describing(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that describe the model, also within the configs of its parts; a new object."""
    return {
        name: describing(value)
        if name.endswith("_config") and isinstance(value, dict)
        else _number(value)
        for name, value in fields.items()
        if name in _MODEL or not _is_steering(name)
    }


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

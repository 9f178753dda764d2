"""JSON files of a checkpoint, checked where they are read: one error names the file and the field.

A checkpoint may come from a stranger. So a count is checked before anything loops over it, and a
path before anything opens it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from mtpc.config import DTYPES
from mtpc.errors import CheckpointError
from mtpc.weights.plain_file import open_plain

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
QKV_LAYOUT = "attention_projection_layout"
"""Entry of config.json: how queries, keys and values are stored; see `mtpc.weights.fused_qkv`."""
QUANTIZATION = "hf_quant_config.json"
"""What ModelOpt says of a checkpoint, where config.json does not."""

_MOST_BYTES = 2**27
"""No such file of a released model has a tenth of this."""
LARGEST = 2**31 - 1
"""No size of a model, and no token id, exceeds this."""
_MOST_LAYERS = 4096
"""No released model has a tenth of this."""
_FEW_LAYERS = 256
"""Decoder layers that may be without tensors: a drafter's config.json counts its target's."""
_SIZE = re.compile(
    r"(num|n|max|moe|head|hidden|vocab|index|top|kv_lora|q_lora|o_lora|v_head|qk_\w+)_\w+"
)
"""Names of entries that are sizes or counts wherever they are whole numbers."""
_SHARE = "partial_rotary_factor"
_LOOPED = re.compile(r"(num_\w*layers|n_layers?|num_layers?|first_k_dense_replace)")
"""Counts of layers: at most as many as there are tensors."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: the file cannot be read, is too large, or holds anything but one object.
    """
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise CheckpointError(f"{path} has {size} bytes; expected at most {_MOST_BYTES}")
        with open_plain(path) as file:
            value = json.loads(file.read().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(
            f"{path} is not valid JSON: {reason}; expected an object in UTF-8: copy or download "
            "the file again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {kind_of(value)}; expected an object with entries")
    return value


def kind_of(value: Any) -> str:
    """A value in a message: its type, and its text where that is short."""
    if value is None:
        return "null"
    text = repr(value)
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean"}
    return f"{names.get(type(value), 'a number')} {text if len(text) <= 60 else text[:60] + '...'}"


def check_config(config: Mapping[str, Any], path: Path) -> None:
    """Refuse entries of config.json that have the wrong type or cannot be a size.

    Raises:
        CheckpointError: an entry is wrong.
    """
    names = config.get("architectures")
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if names is not None and not is_list:
        raise wrong(path, "architectures", names, "a list of class names")
    for name in ("text_config", "quantization_config"):
        if config.get(name) is not None and not isinstance(config[name], dict):
            raise wrong(path, name, config[name], "an object with entries")
    nested = config.get("text_config")
    for prefix, part in (("", config), ("text_config.", nested or {})):
        for name in ("dtype", "torch_dtype"):
            if part.get(name) is not None and part[name] not in DTYPES:
                raise wrong(path, prefix + name, part[name], f"one of {', '.join(DTYPES)}")
        for name, value in part.items():
            # Released configs have -1 for no limit.
            if _SIZE.fullmatch(name) and isinstance(value, int) and not -1 <= value <= LARGEST:
                raise wrong(path, prefix + name, value, f"a size of at most {LARGEST}")
        check_ids(part.get("eos_token_id"), path, f"{prefix}eos_token_id")
    _check_shares(config, path, "")


def _check_shares(part: Mapping[str, Any], path: Path, prefix: str) -> None:
    """Refuse a share of a head that exceeds it: angles would be computed for as many numbers."""
    for name, value in part.items():
        if isinstance(value, dict):
            _check_shares(value, path, f"{prefix}{name}.")
        elif name == _SHARE and isinstance(value, (int, float)) and not 0 <= value <= 1:
            raise wrong(path, prefix + name, value, "a share of 0 to 1")


def check_counts(config: Mapping[str, Any], path: Path, num_tensors: int | None = None) -> None:
    """Refuse counts of layers that the checkpoint cannot hold, because each has a tensor. Configs
    of its parts are checked, too. Without `num_tensors` of the checkpoint, there is only
    config.json.

    Raises:
        CheckpointError: a count is not a whole number, or is too large.
    """
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, dict):
            check_counts(value, path, num_tensors)
        if not _LOOPED.fullmatch(name) or value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(path, name, value, "a whole number")
        most = _MOST_LAYERS if num_tensors is None else num_tensors
        if name == "num_hidden_layers":
            most = max(most, _FEW_LAYERS)
        if not 0 <= value <= most:
            of = "" if most != num_tensors else ", the tensors of the checkpoint"
            raise wrong(path, name, value, f"0 to {most}{of}")


def check_ids(ids: Any, path: Path, name: str) -> None:
    """Refuse an `eos_token_id` that is neither null nor one token id or several.

    Raises:
        CheckpointError: see above.
    """
    row = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= LARGEST for i in row):
        raise wrong(path, name, ids, "a token id, a list of token ids, or null")


def shard_names(index: Mapping[str, Any], path: Path) -> list[str]:
    """Names of the files that an index lists; all are below its directory.

    Raises:
        CheckpointError: the index has no such list, or a file's path leads out of the directory.
    """
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise wrong(path, "weight_map", listed, "an object: tensor name -> file name")
    for tensor, name in listed.items():
        pure = PurePosixPath(name) if isinstance(name, str) else None
        if pure is None or pure.is_absolute() or ".." in pure.parts or "\0" in name:
            raise wrong(
                path, f"weight_map[{tensor[:60]!r}]", name, "a file name below the directory"
            )
    return sorted(set(listed.values()))


def wrong(path: Path, name: str, value: Any, expected: str) -> CheckpointError:
    """The error for an entry of a JSON file."""
    return CheckpointError(
        f"{path}: {name} is {kind_of(value)}; expected {expected}; correct the file or download it "
        "again"
    )

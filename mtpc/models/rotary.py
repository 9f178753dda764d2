"""Rotary embeddings by their types: how far their angles reach, and which ones depend on lengths.

transformers computes the angles of the types dynamic and longrope from the longest text of a call.
A text would so depend on its company in a batch, and on the chunks of its prompt. In mtpc they
follow from `max_len` alone:

- dynamic: the angles do not change up to `max_position_embeddings`, and `max_len` ends there;
- longrope: the short factors where `max_len` is at most `original_max_position_embeddings`, else
  the long factors, as vLLM chooses them by `max_model_len`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mtpc.errors import CheckpointError, UnsupportedModelError

BY_LENGTH = ("dynamic", "longrope")
"""Types whose angles transformers computes from the longest text of a call."""
_POSITIVE = (
    "factor",
    "original_max_position_embeddings",
    "rope_theta",
    "attention_factor",
    "low_freq_factor",
    "high_freq_factor",
)
_LISTS = ("short_factor", "long_factor")
_Module = TypeVar("_Module", bound=nn.Module)


def max_positions(config: Any) -> int | None:
    """Positions that a model's angles are made for; None if its config names no limit.

    That is `max_position_embeddings`, times the factor of the type linear, and for yarn
    `original_max_position_embeddings` times the factor, as vLLM derives `max_model_len`. Where
    types of layers differ, the least counts.
    """
    most = getattr(config, "max_position_embeddings", None)
    reaches = [_reach(most, part) for _, part in _parts(config)]
    return min((reach for reach in reaches if reach is not None), default=most)


def _reach(most: int | None, part: Mapping[str, Any]) -> int | None:
    unscaled = {"linear": most, "yarn": part.get("original_max_position_embeddings")}
    start, factor = unscaled.get(part.get("rope_type", "default")), part.get("factor")
    return most if start is None or factor is None else int(start * factor)


def _parts(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The entries of rotary embeddings: (layer type, entries), or ("", entries) of all layers."""
    given = getattr(config, "rope_parameters", None) or {}
    nested = {name: part for name, part in given.items() if isinstance(part, Mapping)}
    yield from (nested or {"": given}).items()


def check_rotary(config: Any, where: Path) -> None:
    """Refuse types that transformers does not have for text, and numbers that give no angles.

    Raises:
        UnsupportedModelError: there is no such type.
        CheckpointError: a number is wrong.
    """
    known = ("default", *ROPE_INIT_FUNCTIONS)
    for layers, part in _parts(config):
        kind = part.get("rope_type", "default")
        place = f"rope_scaling (or rope_parameters) {layers}".rstrip()
        said = f"{where}: {place} has rope_type {kind!r}"
        if kind not in known:
            raise UnsupportedModelError(f"{said}; expected one of {', '.join(known)}")
        for name in _POSITIVE:
            if part.get(name) is not None and not _is_positive(part[name]):
                raise CheckpointError(
                    f"{said} with {name} {part[name]!r}; expected a number above 0"
                )
        lists = [part[name] for name in _LISTS if name in part]
        is_fine = all(isinstance(each, list) and all(map(_is_positive, each)) for each in lists)
        if not is_fine or len({len(each) for each in lists}) > 1:
            raise CheckpointError(
                f"{said}; expected {' and '.join(_LISTS)} of equal length, with numbers above 0"
            )


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def with_fixed_angles(root: _Module, max_len: int) -> _Module:
    """A model whose angles do not depend on the texts of a call, for texts of up to `max_len`:
    itself, if none do; else a copy of its modules, which share all other tensors."""
    if not any(_kinds(module) for module in root.modules()):
        return root
    tensors = [*root.parameters(), *root.buffers()]
    shared = copy.deepcopy(root, {id(tensor): tensor for tensor in tensors})
    for module in shared.modules():
        for layers, kind in _kinds(module).items():
            _fix(module, layers, kind, max_len)
    return shared


def _kinds(module: nn.Module) -> dict[str | None, str]:
    """Types of a rotary embedding that depend on lengths, by layer type; None is for all layers."""
    kind = getattr(module, "rope_type", None)
    kinds = kind if isinstance(kind, dict) else {None: kind}
    return {layers: each for layers, each in kinds.items() if each in BY_LENGTH}


def _fix(module: Any, layers: str | None, kind: str, max_len: int) -> None:
    """Give transformers' module the angles of one length, and a type that it leaves as they are."""
    name = "inv_freq" if layers is None else f"{layers}_inv_freq"
    held = getattr(module, name)
    made, _ = ROPE_INIT_FUNCTIONS[kind](
        module.config, held.device, seq_len=max_len, layer_type=layers
    )
    module.register_buffer(name, made.to(held.dtype), persistent=False)
    module.rope_type = "default" if layers is None else {**module.rope_type, layers: "default"}

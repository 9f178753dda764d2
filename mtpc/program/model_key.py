"""Key fields of a model: everything of it that shapes the graph, nothing of its weights' values."""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mtpc.backends.package import signature
from mtpc.store.key import hash_of
from mtpc.weights.checkpoint import Checkpoint

_PROVENANCE = ("_name_or_path", "transformers_version")
"""Config entries that say where a model comes from and decide nothing."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def checkpoint_fields(checkpoint: Checkpoint) -> dict[str, str]:
    """Fields of a checkpoint directory, from its config and its tensors' headers."""
    tensors = {name: str(tensor) for name, tensor in checkpoint.tensors.items()}
    return {
        "model.source": "checkpoint",
        **_config_fields(checkpoint.config),
        **_tensor_fields("model.weights", tensors),
    }


def object_fields(model: Any, checkpoint: Checkpoint | None) -> dict[str, str] | None:
    """Fields of a transformers model object; None where its code was changed in place.

    Args:
        model: a `PreTrainedModel`.
        checkpoint: where its MTP tensors come from.
    """
    if any(_is_patched(module) for module in model.modules()):
        return None
    stored = checkpoint.tensors if checkpoint else {}
    return {
        "model.source": "object",
        **_config_fields(model.config.to_dict()),
        **_class_fields(model),
        **_tensor_fields(
            "model.weights", {n: signature(t) for n, t in model.state_dict(keep_vars=True).items()}
        ),
        **_tensor_fields("checkpoint.weights", {name: str(t) for name, t in stored.items()}),
    }


def _is_patched(module: torch.nn.Module) -> bool:
    """Whether a forward was replaced on the instance, or hooks see or change its values."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return "forward" in module.__dict__ or any(hooks)


def _class_fields(model: Any) -> dict[str, str]:
    """A digest of the files that define the model's classes; torch's are in torch's version."""
    classes = {type(module) for module in model.modules()}
    files = {inspect.getsourcefile(c) for c in classes if not c.__module__.startswith("torch.")}
    paths = sorted(Path(file) for file in files if file)
    names = sorted(f"{c.__module__}.{c.__qualname__}".encode() for c in classes)
    return {"model.classes": hash_of([*names, *(path.read_bytes() for path in paths)])}


def _config_fields(config: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"model.config.{name}": value
        for name, value in _flat("", config)
        if name.split(".")[0] not in _PROVENANCE
    }


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Leaves of nested mappings, by dotted name."""
    if not isinstance(value, Mapping):
        yield prefix, json.dumps(value, sort_keys=True, default=str)
        return
    for name, inner in value.items():
        yield from _flat(f"{prefix}.{name}" if prefix else str(name), inner)


def _tensor_fields(prefix: str, tensors: Mapping[str, str]) -> dict[str, str]:
    """Names, dtypes and shapes: exactly, as one digest; readably, layers and experts together."""
    groups: dict[str, set[str]] = defaultdict(set)
    for name, description in tensors.items():
        groups[_NUMBER.sub("*", name)].add(description)
    exact = hash_of(f"{name} {tensors[name]}".encode() for name in sorted(tensors))
    readable = {
        f"{prefix}.{pattern}": " | ".join(sorted(found)) for pattern, found in groups.items()
    }
    return {prefix: f"{len(tensors)} tensors, {exact}", **readable}

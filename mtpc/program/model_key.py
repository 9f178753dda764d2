"""What a model is known by: key fields of all that shapes its graphs, and an identity of its pages.

The key has no values of weights. The identity has them: it is one digest of what the content of KV
pages depends on, in addition to tokens, for `kv_offload_dir`.
"""

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
from mtpc.errors import OptionError
from mtpc.plan import Plan
from mtpc.program.step_cache import program_fields
from mtpc.store.key import digest, hash_of
from mtpc.store.machine import processor_fields
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.content import content_digest
from mtpc.weights.paired_checkpoint import DRAFT, PairedCheckpoint

_PROVENANCE = ("_name_or_path", "transformers_version")
"""Config entries that say where a model comes from; they do not affect its graphs."""
_SAMPLED = 256
"""Bytes of each tensor that tell checkpoints of one architecture apart."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def checkpoint_fields(checkpoint: Checkpoint) -> dict[str, str]:
    """Key fields of a checkpoint directory, from its config and the headers of its tensors."""
    specs = checkpoint.specs
    tensors = {
        name: f"{tensor} as {specs[name]}" if name in specs else str(tensor)
        for name, tensor in checkpoint.tensors.items()
    }
    return {
        "model.source": "checkpoint",
        **_config_fields(checkpoint.config),
        **_tensor_fields("model.weights", tensors),
        **_draft_fields(checkpoint),
    }


def sample_digest(checkpoint: Checkpoint) -> str:
    """A digest of some bytes of each tensor: another one for a checkpoint with other weights."""
    paired = [checkpoint.draft] if isinstance(checkpoint, PairedCheckpoint) else []
    return hash_of(
        each.sample(name, _SAMPLED)
        for each in (checkpoint, *paired)
        for name in sorted(each.stored)
    )


def object_fields(model: Any, checkpoint: Checkpoint | None) -> dict[str, str] | None:
    """Key fields of a transformers model object; None if hooks or replaced forwards change it.

    Args:
        model: a `PreTrainedModel`.
        checkpoint: holds its MTP tensors; None if there is none.
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
        **_draft_fields(checkpoint),
    }


def _draft_fields(checkpoint: Checkpoint | None) -> dict[str, str]:
    """The config of a drafter that has a checkpoint of its own; its headers are the pair's."""
    if not isinstance(checkpoint, PairedCheckpoint):
        return {}
    fields = _config_fields(checkpoint.draft.config)
    return {f"{DRAFT}{name}": value for name, value in fields.items()}


def _is_patched(module: torch.nn.Module) -> bool:
    """Whether a module has hooks, or a forward that replaces the one of its class."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return "forward" in module.__dict__ or any(hooks)


def _class_fields(model: Any) -> dict[str, str]:
    """A digest of the files that define the model's classes. torch's version covers its own."""
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
    """Leaves of nested mappings as (dotted name, JSON text)."""
    if not isinstance(value, Mapping):
        yield prefix, json.dumps(value, sort_keys=True, default=str)
        return
    for name, inner in value.items():
        yield from _flat(f"{prefix}.{name}" if prefix else str(name), inner)


def _tensor_fields(prefix: str, tensors: Mapping[str, str]) -> dict[str, str]:
    """Fields of tensors' names, dtypes and shapes.

    One field is an exact digest of all. The others are readable, and each joins the tensors whose
    names differ only in numbers, such as those of layers and experts.
    """
    groups: dict[str, set[str]] = defaultdict(set)
    for name, description in tensors.items():
        groups[_NUMBER.sub("*", name)].add(description)
    exact = hash_of(f"{name} {tensors[name]}".encode() for name in sorted(tensors))
    readable = {
        f"{prefix}.{pattern}": " | ".join(sorted(found)) for pattern, found in groups.items()
    }
    return {prefix: f"{len(tensors)} tensors, {exact}", **readable}


_ROWS_IN_RINGS = "options.rows_in_rings"
"""A key field that only sizes buffers. A snapshot's own form states their sizes."""
MEMORY = ".mtpc-weights.json"
"""File of `kv_offload_dir` that keeps the digests of weights' files."""


def page_identity(checkpoint: Checkpoint, plan: Plan, backend: str) -> str:
    """A digest of the weights, the options, mtpc's sources, libraries and the processor.

    Args:
        checkpoint: holds the weights. All its files are read, the first time.
        plan: of the steps, with a `kv_offload_dir`.
        backend: name of the backend that runs the steps.

    Raises:
        OptionError: `kv_offload_dir` cannot be made.
        OSError: a file of the checkpoint cannot be read.
    """
    directory = Path(plan.kv_offload_dir)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"kv_offload_dir is {directory}, which cannot be made: {error}") from None
    fields = program_fields(backend, checkpoint_fields(checkpoint), plan)
    del fields[_ROWS_IN_RINGS]
    weights = content_digest(checkpoint.paths, directory / MEMORY)
    return digest({**fields, **processor_fields(), "weights": weights})

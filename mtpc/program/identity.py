"""Digests that few starts need: of a model object, and of what KV pages in files depend on."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from mtpc.backends.package import signature
from mtpc.errors import OptionError
from mtpc.plan import Plan
from mtpc.program.open_cache import checkpoint_fields, config_fields, draft_fields, tensor_fields
from mtpc.program.step_cache import program_fields
from mtpc.store.key import digest, hash_of
from mtpc.store.machine import processor_fields
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.content import content_digest

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


def object_fields(model: Any, checkpoint: Checkpoint | None) -> dict[str, str] | None:
    """Key fields of a transformers model object; None if hooks or replaced forwards change it.

    Args:
        model: a `PreTrainedModel`.
        checkpoint: holds its MTP tensors; None if there is none.
    """
    for module in model.modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        if "forward" in module.__dict__ or any(hooks):
            return None
    stored = checkpoint.tensors if checkpoint else {}
    return {
        "model.source": "object",
        **config_fields(model.config.to_dict()),
        **_class_fields(model),
        **tensor_fields(
            "model.weights", {n: signature(t) for n, t in model.state_dict(keep_vars=True).items()}
        ),
        **tensor_fields("checkpoint.weights", {name: str(t) for name, t in stored.items()}),
        **draft_fields(checkpoint),
    }


def _class_fields(model: Any) -> dict[str, str]:
    """A digest of the files that define the model's classes. torch's version covers its own."""
    classes = {type(module) for module in model.modules()}
    files = {inspect.getsourcefile(c) for c in classes if not c.__module__.startswith("torch.")}
    paths = sorted(Path(file) for file in files if file)
    names = sorted(f"{c.__module__}.{c.__qualname__}".encode() for c in classes)
    return {"model.classes": hash_of([*names, *(path.read_bytes() for path in paths)])}

"""The key of a transformers model object in the graph cache."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from mtpc.backends.package import signature
from mtpc.program.open_cache import config_fields, draft_fields, tensor_fields
from mtpc.store.key import hash_of
from mtpc.weights.checkpoint import Checkpoint


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

"""What a model object must be, so that mtpc computes what the object itself would compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.models.family import ModelFamily
from mtpc.models.hf import model_class
from mtpc.weights.checkpoint import Checkpoint, listing

_ROWS = 64
"""Rows of the embedding that are compared with the checkpoint."""
ALIKE = 0.5
"""Least cosine similarity of an embedding with what it was copied from: training moves it a little,
and other weights are near 0."""
_OWNER = "transformers."
_DIRECTORY = "pass the checkpoint's directory instead"


def check_object(model: Any, family: ModelFamily) -> None:
    """Refuse an object that mtpc would compute differently, or cannot compute.

    Raises:
        UnsupportedModelError: a forward that mtpc does not call is overridden or hooked; or tensors
            are on the meta device, on several devices, or of several dtypes.
    """
    for name, why in _bypassed(model, family):
        raise UnsupportedModelError(
            f"{name} has {why}, which mtpc would not run; expected transformers' "
            f"{family.hf_class} as it is; {_DIRECTORY}"
        )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        raise UnsupportedModelError(
            f"the model has {len(empty)} tensor(s) on the meta device, which hold no values: "
            f"{listing(empty)}; expected a model in memory: load it without offloading "
            f"(no device_map), or {_DIRECTORY}"
        )
    devices = sorted({str(tensor.device) for tensor in tensors.values()})
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"the model is on several devices: {', '.join(devices)}; expected one: move it by "
            f"model.to({devices[-1]!r}), or {_DIRECTORY}"
        )
    dtype = model.get_input_embeddings().weight.dtype
    lists = (model._keep_in_fp32_modules_strict, model._keep_in_fp32_modules)
    kept = [f".{part}." for parts in lists for part in parts or ()]
    mixed = [
        f"{name} ({str(p.dtype).removeprefix('torch.')})"
        for name, p in model.named_parameters()
        if p.dtype != dtype
        and p.dtype.itemsize > 1  # `mtpc.models.load` refuses these.
        and not any(part in f".{name}." for part in kept)
    ]
    if mixed:
        raise UnsupportedModelError(
            f"the model's embedding is {dtype}, and {len(mixed)} other parameter(s) are not: "
            f"{listing(mixed)}; expected one dtype: convert the model by model.to({dtype}), or "
            f"{_DIRECTORY}"
        )


def _bypassed(model: Any, family: ModelFamily) -> Iterator[tuple[str, str]]:
    """Modules whose forward mtpc does not call, and that have another one than transformers'.

    mtpc calls decoder and head, but not the model that holds them; some families step the
    decoder's layers; and canonical modules stand in place of modules of certain classes.
    """
    yield from _altered("the model", model, model_class(family))
    for name, module in model.named_modules():
        known = next((c for c in type(module).__mro__ if c.__module__.startswith(_OWNER)), None)
        is_stepped = family.parts is not None and module is model.get_decoder()
        if known and (is_stepped or known.__name__ in family.canonical):
            yield from _altered(name, module, known)


def _altered(name: str, module: nn.Module, expected: type[nn.Module]) -> Iterator[tuple[str, str]]:
    kind = type(module)
    if kind.forward is not expected.forward:
        yield name, f"a forward of its own, by its class {kind.__module__}.{kind.__name__}"
    elif "forward" in vars(module):
        yield name, "a forward that replaces the one of its class"
    elif module._forward_hooks or module._forward_pre_hooks:
        yield name, "forward hooks"


def check_same_weights(model: Any, checkpoint: Checkpoint, family: ModelFamily) -> None:
    """Refuse an object that does not hold the checkpoint's weights, even trained further.

    An object made from a config has the name of the config's directory, and random weights. Drafts
    of the directory's MTP layers would never be accepted.

    Raises:
        CheckpointError: the embedding of the object differs from that of the checkpoint.
    """
    weight = model.get_input_embeddings().weight
    own = next(name for name, parameter in model.named_parameters() if parameter is weight)
    names = [own, *(s + own.removeprefix(o) for o, s in family.stored_prefixes)]
    stored = next((name for name in names if name in checkpoint.tensors), None)
    alike = 0.0 if stored is None else similarity(weight.detach(), checkpoint.tensor(stored))
    if not alike >= ALIKE:
        raise CheckpointError(
            f"the model's name_or_path is {model.name_or_path!r}, but its weights are others: the "
            f"embeddings have a cosine similarity of {alike:.2f}; expected the model that "
            f"from_pretrained({model.name_or_path!r}) gives, since MTP layers fit no other; load "
            "it so, or use spec_tokens=0"
        )


def similarity(one: Tensor, other: Tensor) -> float:
    """Cosine of the angle between the same rows of two matrices; 0 if their widths differ."""
    if one.dim() != 2 or other.dim() != 2 or one.shape[1] != other.shape[1]:
        return 0.0
    count = min(len(one), len(other))
    rows = torch.arange(0, count, max(1, count // _ROWS))
    left = one[rows.to(one.device)].double().cpu().flatten()
    return float(nn.functional.cosine_similarity(left, other[rows].double().flatten(), dim=0))

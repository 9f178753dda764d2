"""Where each weight of a loaded model is in its checkpoint, checked against what was loaded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mtpc.models.family import ModelFamily
from mtpc.models.load import LoadedModel, repeated_tensors
from mtpc.models.mtp_layers import layer_names, stored_name
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.recipes import Join, Recipe, make, names


def weight_recipes(loaded: LoadedModel) -> dict[str, Recipe | None]:
    """A recipe for each weight of the table, over the checkpoint's tensors.

    Every recipe was carried out and gave, bit for bit, what transformers loaded. None is for
    constants that are no part of checkpoints (non-persistent buffers such as rotary frequencies).
    A weight that should be in the checkpoint but cannot be explained is left out: programs with
    such a weight are loaded by transformers.
    """
    checkpoint = loaded.checkpoint
    if checkpoint is None:
        return {}
    persistent = set(loaded.target.state_dict())
    for index, layer in enumerate(loaded.mtp_layers):
        persistent |= {f"mtp.{index}.{name}" for name in layer.state_dict()}
    found: dict[str, Recipe | None] = {}
    for name, tensor in loaded.weights().items():
        if name not in persistent:
            found[name] = None
            continue
        recipe = next((r for r in _candidates(name, loaded, checkpoint)), None)
        if recipe is not None and _gives(recipe, checkpoint, tensor):
            found[name] = recipe
    return found


def repeats(loaded: LoadedModel) -> dict[str, str]:
    """Stored tensors of MTP layers that repeat a weight, with that weight's name."""
    if loaded.checkpoint is None:
        return {}
    name_of = {id(tensor): name for name, tensor in loaded.weights().items()}
    repeated = repeated_tensors(
        loaded.checkpoint, loaded.family, loaded.target, len(loaded.mtp_layers)
    )
    return {stored: name_of[id(weight)] for stored, weight in repeated.items()}


def _candidates(name: str, loaded: LoadedModel, checkpoint: Checkpoint) -> Iterator[Recipe]:
    """Recipes whose tensors all exist: a stored name itself, else experts stored one by one, or
    gate and up apart."""
    for stored in _stored_names(name, loaded):
        if stored in checkpoint.tensors:
            yield stored
        stem, _, part = stored.rpartition(".")
        if not stem.endswith(".experts") or part not in ("gate_up_proj", "down_proj"):
            continue
        joined = (_joined(stem),) if part == "gate_up_proj" else ()
        for recipe in (_stacked(stem, part, loaded.family, checkpoint), *joined):
            if recipe.parts and all(part in checkpoint.tensors for part in names(recipe)):
                yield recipe


def _stored_names(name: str, loaded: LoadedModel) -> Iterator[str]:
    """Names that a weight may have in a checkpoint."""
    family = loaded.family
    if name.startswith("mtp."):
        _, index, inner = name.split(".", 2)
        prefix = family.layer_prefix(loaded.config.num_hidden_layers, int(index))
        yield prefix + stored_name(inner, family)
        return
    moved = [
        stored + name.removeprefix(own)
        for own, stored in family.stored_prefixes.items()
        if name.startswith(own)
    ]
    for place in (name, *moved):
        yield from layer_names(place, family)


def _stacked(stem: str, part: str, family: ModelFamily, checkpoint: Checkpoint) -> Join:
    """transformers' stacked experts, gate and up rows of each joined."""
    gate, up, down = family.expert_names
    count = sum(name.endswith(f".{down}.weight") for name in checkpoint.names(f"{stem}."))
    of = [f"{stem}.{index}." for index in range(count)]
    if part == "down_proj":
        return Join("stack", tuple(f"{expert}{down}.weight" for expert in of))
    pairs = [(f"{expert}{gate}.weight", f"{expert}{up}.weight") for expert in of]
    return Join("stack", tuple(Join("cat", pair) for pair in pairs))


def _joined(stem: str) -> Join:
    """The same of experts stored stacked, gate and up apart (Step-3.5, Step-3.7)."""
    moe = stem.removesuffix("mlp.experts") + "moe."
    return Join("cat_rows", (f"{moe}gate_proj.weight", f"{moe}up_proj.weight"))


def _gives(recipe: Recipe, checkpoint: Checkpoint, tensor: Tensor) -> bool:
    made = make(recipe, checkpoint.tensor)
    return made.shape == tensor.shape and torch.equal(made.to(tensor.dtype), tensor)

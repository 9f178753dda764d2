"""Where each weight of a loaded model is in its checkpoint, checked against what was loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from mtpc.checkpoint import Checkpoint
from mtpc.models.family import ModelFamily
from mtpc.models.load import LoadedModel, repeated_tensors
from mtpc.models.mtp_layers import layer_name, stored_name
from mtpc.recipes import Join, Recipe, make, names

_EXPERTS = re.compile(r"(?P<stem>.*mlp\.experts)\.(?P<part>gate_up|down)_proj")


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
    """Recipes whose tensors all exist: the stored name itself, else experts stored one by one."""
    if name.startswith("mtp."):
        _, index, inner = name.split(".", 2)
        layers = loaded.config.num_hidden_layers
        prefix = loaded.family.layer_prefix(layers, int(index))
        name = prefix + stored_name(inner, loaded.family)
    for stored in (name, *_elsewhere(name, loaded.family)):
        if stored in checkpoint.tensors:
            yield stored
        match = _EXPERTS.fullmatch(stored)
        if match is None:
            continue
        stem, part = match["stem"], match["part"]
        joined = (_joined(stem),) if part == "gate_up" else ()
        for recipe in (_stacked(stem, part, checkpoint), *joined):
            if recipe.parts and all(part in checkpoint.tensors for part in names(recipe)):
                yield recipe


def _elsewhere(name: str, family: ModelFamily) -> Iterator[str]:
    """Other names that checkpoints of the family may have a tensor under."""
    yield layer_name(name, family)
    for own, stored in family.stored_prefixes.items():
        if name.startswith(own):
            moved = stored + name.removeprefix(own)
            yield moved
            yield layer_name(moved, family)


def _stacked(stem: str, part: str, checkpoint: Checkpoint) -> Join:
    """transformers' stacked experts, gate and up rows of each joined."""
    count = sum(name.endswith(".down_proj.weight") for name in checkpoint.names(f"{stem}."))
    of = [f"{stem}.{index}." for index in range(count)]
    if part == "down":
        return Join("stack", tuple(f"{expert}down_proj.weight" for expert in of))
    pairs = [(f"{expert}gate_proj.weight", f"{expert}up_proj.weight") for expert in of]
    return Join("stack", tuple(Join("cat", pair) for pair in pairs))


def _joined(stem: str) -> Join:
    """The same of experts stored stacked, gate and up apart (Step-3.5, Step-3.7)."""
    moe = stem.removesuffix("mlp.experts") + "moe."
    return Join("cat_rows", (f"{moe}gate_proj.weight", f"{moe}up_proj.weight"))


def _gives(recipe: Recipe, checkpoint: Checkpoint, tensor: Tensor) -> bool:
    made = make(recipe, checkpoint.tensor)
    return made.shape == tensor.shape and torch.equal(made.to(tensor.dtype), tensor)

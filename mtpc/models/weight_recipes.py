"""Recipes that make a loaded model's weights from the tensors of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mtpc.layout import dtype_name
from mtpc.models.header_weights import shards_of
from mtpc.models.load import LoadedModel
from mtpc.models.mtp_layers import expert_recipes, layer_names, stored_name
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.recipes import Cast, Join, Recipe, make, names, spec_of, substitute
from mtpc.weights.stored import StoredWeights


def weight_recipes(loaded: LoadedModel) -> dict[str, Recipe | None]:
    """Weight name -> recipe over the checkpoint's tensors, which are cast to the weight's dtype.

    Only headers are read, and only a model that was loaded from headers has recipes: another one
    has its weights. A recipe of one tensor names the tensor that transformers put there, and a
    recipe of several gives the weight's shape.
    The value None marks a constant that checkpoints do not store: a non-persistent buffer, such as
    rotary frequencies. A weight without a recipe is left out, and programs with such a weight are
    loaded by transformers.
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
        elif (recipe := _by_headers(name, tensor, loaded, checkpoint)) is not None:
            found[name] = substitute(recipe, partial(_cast, checkpoint, tensor.dtype))
    return found


def _cast(checkpoint: Checkpoint, dtype: torch.dtype, name: str) -> Recipe:
    """A stored tensor in the dtype of a weight."""
    return name if checkpoint.meta_tensor(name).dtype == dtype else Cast(dtype_name(dtype), name)


def stored_weights(loaded: LoadedModel) -> StoredWeights | None:
    """The weights that are made from files, not of the modules' tensors; from headers alone.

    Those of a rank's part, and those that the checkpoint stores in groups. A model object's weights
    are what the object holds, so none of them is.
    """
    checkpoint = loaded.checkpoint
    if loaded.stored is not None or checkpoint is None or not loaded.owned or not checkpoint.specs:
        return loaded.stored
    recipes: dict[str, Recipe] = {}
    for name, tensor in loaded.weights().items():
        recipe = (
            next(_candidates(name, loaded, checkpoint), None)
            if loaded.headers is None
            else _by_headers(name, tensor, loaded, checkpoint)
        )
        if recipe is not None and spec_of(recipe, checkpoint.specs) is not None:
            recipes[name] = recipe
    return StoredWeights(checkpoint, recipes)


def _by_headers(
    name: str, tensor: Tensor, loaded: LoadedModel, checkpoint: Checkpoint
) -> Recipe | None:
    """The stored tensor that loading put there, or the first that joins several to its shape."""
    if loaded.headers is None:
        return None
    origin = loaded.headers.origin(tensor)
    if origin is not None:
        return origin
    # Of one tensor, transformers made this in another way than by its name; mtpc only casts.
    is_ours = name.startswith("mtp.")
    for recipe in _candidates(name, loaded, checkpoint):
        may_be = is_ours or not isinstance(recipe, str)
        if may_be and make(recipe, checkpoint.meta_tensor).shape == tensor.shape:
            return recipe
    return None


def _candidates(name: str, loaded: LoadedModel, checkpoint: Checkpoint) -> Iterator[Recipe]:
    """Recipes whose tensors are all in the checkpoint.

    A weight is stored under one of its names, or in shards of rows, or its experts are stored one
    by one, or the gate and the up projections of all experts are one tensor each.
    """
    for stored in _stored_names(name, loaded):
        if stored in checkpoint.tensors:
            yield stored
        shards = shards_of(stored, checkpoint.tensors)
        if shards:
            yield Join("cat", shards)
        stem, _, part = stored.rpartition(".")
        if not stem.endswith(".experts"):
            continue
        last = f".{loaded.family.expert_names[2]}.weight"
        experts = sum(name.endswith(last) for name in checkpoint.names(f"{stem}."))
        for recipe in expert_recipes(stem, part, loaded.family, experts):
            if recipe.parts and all(part in checkpoint.tensors for part in names(recipe)):
                yield recipe


def _stored_names(name: str, loaded: LoadedModel) -> Iterator[str]:
    """Names that a weight may have in the checkpoint."""
    family = loaded.family
    if name.startswith("mtp."):
        _, index, inner = name.split(".", 2)
        prefix = family.layer_prefix(loaded.config.num_hidden_layers, int(index))
        yield prefix + stored_name(inner, family)
        return
    moved = [
        stored + name.removeprefix(own)
        for own, stored in family.stored_prefixes
        if name.startswith(own)
    ]
    for place in (name, *moved):
        yield from layer_names(place, family)

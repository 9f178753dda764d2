"""The recipes of a model's weights, each carried out and compared with what transformers loaded."""

from __future__ import annotations

import torch

from mtpc.layout import dtype_name
from mtpc.models.load import LoadedModel, load
from mtpc.models.weight_recipes import weight_recipes
from mtpc.weights.recipes import Recipe, make


def explained(loaded: LoadedModel) -> dict[str, Recipe | None]:
    """The recipes that headers give for a model that transformers loaded with its values.

    Each gives the weight, bit for bit; None marks a constant.
    """
    checkpoint, weights = loaded.checkpoint, loaded.weights()
    assert checkpoint is not None
    assert loaded.headers is None
    given = (dtype_name(loaded.dtype), bool(loaded.mtp_layers))
    recipes = weight_recipes(load(checkpoint, *given, headers_only=True))
    for name, recipe in recipes.items():
        if recipe is not None:
            made = make(recipe, checkpoint.tensor)
            assert made.dtype == weights[name].dtype, name
            assert torch.equal(made, weights[name]), name
    return recipes

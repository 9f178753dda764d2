"""Models that are loaded from headers: what tracing sees of them is what it sees of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import tiny
from torch import Tensor

from mtpc.models.load import load
from mtpc.models.weight_recipes import weight_recipes
from mtpc.weights.checkpoint import Checkpoint


class Watched(Checkpoint):
    """A checkpoint that keeps the names of the tensors that are read."""

    names_read: tuple[str, ...] = ()

    def read(self, name: str) -> Tensor:
        self.names_read += (name,)
        return super().read(name)


@pytest.mark.parametrize("family", [name for name in tiny.CONFIGS if "@" not in name])
def test_a_model_of_headers_is_the_model(family: str, checkpoint: Callable[..., Path]) -> None:
    """Names, dtypes, shapes, strides and ties; and recipes that loading found to be exact.

    Tensors are cast on the way, so that a recipe cannot rest on a tensor that is passed on.
    """
    directory, source = checkpoint(family, "random"), Watched(checkpoint(family, "random"))
    loaded, headers = load(directory, "bfloat16", True), load(source, "bfloat16", True, (), True)
    found = {name: _form(tensor) for name, tensor in headers.weights().items()}
    assert found == {name: _form(tensor) for name, tensor in loaded.weights().items()}
    exact, recipes = weight_recipes(loaded), weight_recipes(headers)
    assert {name: recipes.get(name) for name in exact} == exact
    assert source.names_read == ()
    source.tensor(source.names()[0])
    assert len(source.names_read) == 1


def _form(tensor: Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad

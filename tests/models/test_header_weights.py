"""Models that are loaded from headers: what tracing sees of them is what it sees of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import tiny
from helpers.explained import explained
from torch import Tensor

from mtpc.models.load import load
from mtpc.models.weight_recipes import weight_recipes
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.paired_checkpoint import PairedCheckpoint

READ: list[str] = []
"""Names of the tensors that a `Watched` checkpoint reads."""


class Watched(Checkpoint):
    """A checkpoint that notes which tensors are read."""

    def read(self, name: str) -> Tensor:
        READ.append(name)
        return super().read(name)


class WatchedPair(PairedCheckpoint, Watched):
    """The same of two; of a drafter's, the map of tokens is read when it is opened."""

    def __init__(self, directory: Path, draft: Path):
        super().__init__(directory, draft)
        self.draft = Watched(draft)

    def read(self, name: str) -> Tensor:
        if name in self.target_tensors:
            READ.append(name)
        return super().read(name)


@pytest.mark.parametrize("family", [name for name in tiny.CONFIGS if "@" not in name])
def test_a_model_of_headers_is_the_model(family: str, checkpoint: Callable[..., Path]) -> None:
    """Names, dtypes, shapes, strides and ties; and recipes that are exact.

    Tensors are cast on the way, so that a recipe cannot rest on a tensor that is passed on.
    """
    directory = checkpoint(family, "random")
    draft = tiny.drafter(directory)
    source = WatchedPair(directory, **draft) if draft else Watched(directory)
    READ.clear()
    loaded = load(directory, "bfloat16", True, **draft)
    headers = load(source, "bfloat16", True, headers_only=True)
    found = {name: _form(tensor) for name, tensor in headers.weights().items()}
    assert found == {name: _form(tensor) for name, tensor in loaded.weights().items()}
    recipes = weight_recipes(headers)
    assert READ == []
    assert recipes == explained(loaded)
    source.tensor(source.names()[0])
    source.tensor(source.names()[-1])
    assert len(READ) == 2


def _form(tensor: Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad

"""Tensors are asked for in the order of their use, some bytes ahead of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.read_ahead import ReadAhead


class _Watched(Checkpoint):
    """Notes what it is asked to read ahead."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.asked: list[str] = []

    def read_ahead(self, name: str) -> int:
        self.asked.append(name)
        return super().read_ahead(name)


def test_tensors_are_read_ahead_as_others_are_used(checkpoint: Callable[..., Path]) -> None:
    source = _Watched(checkpoint("mimo"))
    names = [*source.tensors][:6]
    two = sum(source.stored[name].nbytes for name in names[:2])
    ahead = ReadAhead(source, two)
    ahead.expect([*names, names[0]])
    assert source.asked == names[:2]
    ahead.use(names[:1])
    assert source.asked[2] == names[2]
    for name in names:
        ahead.use([name])
    assert source.asked == names


def test_a_tensor_larger_than_the_limit_is_read_ahead(checkpoint: Callable[..., Path]) -> None:
    source = _Watched(checkpoint("mimo"))
    names = [*source.tensors][:2]
    ahead = ReadAhead(source, 1)
    ahead.expect(names)
    assert source.asked == names[:1]


def test_reading_ahead_changes_no_value(checkpoint: Callable[..., Path]) -> None:
    source = Checkpoint(checkpoint("mimo"))
    for name in source.tensors:
        before = source.tensor(name).clone()
        assert source.read_ahead(name) == before.nbytes
        assert torch.equal(source.tensor(name), before)

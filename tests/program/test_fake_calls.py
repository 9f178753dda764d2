"""Values that follow from those of other calls are the ones that the operators would give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mtpc.capture.fake_calls import FakeCalls

aten = torch.ops.aten
MODE = FakeTensorMode()


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with MODE:
        return torch.empty(shape, dtype=dtype)


def turned() -> Tensor:
    """A tensor that lies in memory in another order."""
    with MODE:
        return torch.empty(6, 4).t()


def described(value: Any, arguments: list[Tensor]) -> Any:
    """Forms, and over which argument's memory each result is, or with which other result's."""
    results = value if isinstance(value, (tuple, list)) else [value]
    tensors = [*arguments, *(r for r in results if isinstance(r, Tensor))]
    memory = [t.untyped_storage()._cdata for t in tensors]
    return type(value), [
        (t.dtype, t.device, t.shape, t.stride(), t.storage_offset(), memory.index(m), is_given)
        for t, m in zip(tensors, memory, strict=True)
        for is_given in [any(t is a for a in arguments)]
    ]


CASES: list[tuple[Any, Callable[[], tuple[Any, ...]]]] = [
    (aten.transpose.int, lambda: (fake(4, 6), 0, 1)),
    (aten.select.int, lambda: (turned(), 1, 2)),
    (aten.slice.Tensor, lambda: (fake(4, 6), 1, 2, 5)),
    (aten.add.Tensor, lambda: (fake(4, 6), turned())),
    (aten.copy_.default, lambda: (fake(4, 6), fake(6))),
    (aten.split_with_sizes.default, lambda: (fake(4, 6), [1, 5], 1)),
    (aten.topk.default, lambda: (fake(4, 6), 2)),
    (aten.unsqueeze_.default, lambda: (fake(4, 6), 0)),
    (aten.contiguous.default, lambda: (fake(4, 6),)),
    (aten.contiguous.default, lambda: (turned(),)),
    (aten.index.Tensor, lambda: (fake(4, 6), [None, fake(3, dtype=torch.int64)])),
    (torch.ops.mtpc.rms_norm.default, lambda: (fake(4, 6), fake(6), 1e-6)),
]


@pytest.mark.parametrize(("target", "arguments"), CASES)
def test_a_value_is_what_the_operator_gives(
    target: Any, arguments: Callable[[], tuple[Any, ...]]
) -> None:
    calls, found = FakeCalls(MODE), []
    for run in (calls.value, calls.value, run_it):
        given = arguments()
        tensors = [a for a in given if isinstance(a, Tensor)]
        found.append(described(run(target, given, {}), tensors))
    assert found[0] == found[1] == found[2]


def run_it(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with MODE:
        return target(*args, **kwargs)


def test_what_is_alike() -> None:
    """Neither other constants, nor arguments of which other ones share memory."""
    calls, one = FakeCalls(MODE), fake(4, dtype=torch.int64)
    assert calls.value(aten.mul.Tensor, (one, 1), {}).dtype == torch.int64
    assert calls.value(aten.mul.Tensor, (one, 1.0), {}).dtype == torch.float32
    assert calls.value(aten.mul.Tensor, (fake(4, dtype=torch.int64), True), {}).dtype == torch.int64
    runs: list[Any] = []

    def pair(*tensors: Tensor) -> list[Tensor]:
        runs.append(tensors)
        return [tensor.view(-1) for tensor in tensors]

    same = fake(4)
    for tensors in ((fake(4), fake(4)), (same, same), (fake(4), fake(4)), (fake(4), fake(4))):
        given = list(tensors)
        value = calls.value(pair, tensors, {})
        assert described(value, given) == described([t.view(-1) for t in given], given)
    assert len(runs) == 3, "the last call is like the third"


def test_memory_of_its_own() -> None:
    calls = FakeCalls(MODE)
    values = [calls.value(aten.add.Tensor, (fake(4), fake(4)), {}) for _ in range(3)]
    assert len({value.untyped_storage()._cdata for value in values}) == 3
    assert {value.untyped_storage().nbytes() for value in values} == {16}

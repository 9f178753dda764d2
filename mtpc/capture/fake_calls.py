"""Results of operators on fake tensors: of calls with equal forms of arguments, one is run.

The form of a result (dtype, sizes, strides, and which argument's memory it is over) follows from
the operator and the forms of its arguments. The layers of a model make the same calls again and
again, so most of them need no operator to be run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate


class _UnlikeError(Exception):
    """The result cannot be derived from that of another call."""


class FakeCalls:
    """The calls that have been run, by operator and form of the arguments."""

    def __init__(self, mode: FakeTensorMode):
        self._mode = mode
        self._run: dict[Hashable, tuple[Any, Any]] = {}

    def value(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a call, whose tensors are fake."""
        given, key = (args, kwargs), (target, form_of(args), form_of(kwargs))
        if key in self._run and torch.Tag.inplace_view not in getattr(target, "tags", ()):
            before, result = self._run[key]
            with suppress(_UnlikeError):
                return _Memory(before, given).moved(result)
        with self._mode:
            result = target(*args, **kwargs)
        self._run[key] = given, result
        return result


class _Memory:
    """Maps tensors and memory of one call's arguments to those of a call of the same form.

    Raises:
        _UnlikeError: the new ones do not share memory as the old ones do.
    """

    def __init__(self, old: Any, new: Any):
        self._tensors: dict[int, Tensor] = {}
        self._by_old: dict[int, torch.UntypedStorage] = {}
        old_of: dict[int, int] = {}
        for one, other in zip(tensors_in(old), tensors_in(new), strict=True):
            storage = other.untyped_storage()
            was, now = one.untyped_storage()._cdata, storage._cdata
            same = self._by_old.setdefault(was, storage)._cdata == now
            if not same or old_of.setdefault(now, was) != was:
                raise _UnlikeError
            self._tensors[id(one)] = other

    def moved(self, value: Any) -> Any:
        """The result, moved to the new call: tensors over no argument's memory get new memory.
        Raises _UnlikeError: it has open sizes, or is known to be a constant."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.moved, value))
        if value is None or id(value) in self._tensors:
            return value if value is None else self._tensors[id(value)]
        if not isinstance(value, FakeTensor) or value.constant is not None:
            raise _UnlikeError
        place = (value.storage_offset(), value.shape, value.stride())
        if isinstance(place[0], torch.SymInt) or _has_open_sizes(value):
            raise _UnlikeError
        was = value.untyped_storage()
        if was._cdata not in self._by_old:
            self._by_old[was._cdata] = torch.UntypedStorage(was.nbytes(), device="meta")
        tensor = torch.empty(0, dtype=value.dtype, device="meta")
        tensor.set_(self._by_old[was._cdata], *place)
        return FakeTensor(value.fake_mode, tensor, value.device)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among arguments or results, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    is_row = isinstance(value, (tuple, list))
    return [tensor for item in value for tensor in tensors_in(item)] if is_row else []


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Arguments or results with what a function makes of their tensors, in the order of
    `tensors_in`."""
    return map_aggregate(value, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def form_of(value: Any) -> Hashable:
    """Arguments as a value to compare: of a tensor, everything but the memory that it is over."""
    if isinstance(value, Tensor):
        place = (*value.shape, *value.stride(), value.storage_offset())
        if _has_open_sizes(value) or isinstance(place[-1], torch.SymInt):
            place = tuple(map(form_of, place))
        return Tensor, value.dtype, value.device, value.dim(), place
    if isinstance(value, (tuple, list)):
        return type(value), *map(form_of, value)
    if isinstance(value, Mapping):
        return Mapping, *((name, form_of(item)) for name, item in value.items())
    if isinstance(value, slice):
        return slice, form_of((value.start, value.stop, value.step))
    if isinstance(value, float):  # 0.0 and -0.0 are equal.
        return float, repr(value)
    if isinstance(value, torch.SymInt):  # Comparing open sizes themselves could fix them.
        return torch.SymInt, value.node.expr
    return type(value), value


def _has_open_sizes(tensor: Tensor) -> bool:
    return any(isinstance(n, torch.SymInt) for n in (*tensor.shape, *tensor.stride()))

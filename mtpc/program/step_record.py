"""The record of a step: all that is needed to allocate, bind and run it, and how long it took."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, get_args

import torch

from mtpc.backends.package import Package
from mtpc.errors import CacheError
from mtpc.layout import Bucket, BufferSpec, Layout, Part, StepKey, dtype_name, step_name
from mtpc.layout.keys import Phase
from mtpc.layout.open_sizes import Size, is_size_text, size_of
from mtpc.layout.progress import PassRecord
from mtpc.weights import recipes
from mtpc.weights.recipes import Recipe

FORMAT = 5
"""Version of the record's format; part of the key."""
_LARGEST = 2**40
"""No size in a record exceeds this."""


@dataclass(frozen=True)
class StepRecord:
    """The record of one step.

    Attributes:
        step: phase, bucket and K.
        part: the whole step, or one half of a split step.
        buffers: its buffers, with numbers as sizes, or text where sizes are open.
        package: how to call the compiled package.
        derived: weights that passes made, as recipes over other weights.
        stored: weights that a checkpoint holds, as recipes over its tensors. A weight that is
            neither derived nor stored is a constant in a file of the entry.
        unexplained: weights that only transformers can load from a checkpoint.
        ends: embeddings and heads among `stored`, of which a checkpoint may store copies.
        max_positions: how far the model's angles reach, where its config says so.
        vocab_size: every token id is smaller.
        history: passes that ran.
        seconds: duration of each stage of the build.
        source: checkpoint that it was built from, for messages.
        created: time of the build, in UTC.
        uncertified: why the step has no certificate, where it should have one; None: it has one, or
            need not.
    """

    step: StepKey
    part: Part
    buffers: tuple[BufferSpec, ...]
    package: Package
    derived: Mapping[str, Recipe]
    stored: Mapping[str, Recipe]
    unexplained: tuple[str, ...]
    ends: tuple[str, ...]
    max_positions: int | None
    vocab_size: int
    history: tuple[PassRecord, ...]
    seconds: Mapping[str, float]
    source: str
    created: str
    uncertified: str | None = None

    @property
    def name(self) -> str:
        """Name of the step."""
        return step_name(self.step, self.part)

    @property
    def fallback(self) -> str | None:
        """A line for `Stats.fallbacks`, if the step has no certificate."""
        if self.uncertified is None:
            return None
        reason = re.sub(r" \(\w+\)", "", self.uncertified)  # Without names of nodes.
        return f"{self.step.phase} steps have no certificate of exactness: {reason}"

    def layout(self, sizes: Mapping[str, int]) -> Layout:
        """The layout of its buffers, with numbers for the sizes that the step leaves open."""
        return Layout((replace(s, dims=_numbers(s.dims, sizes)) for s in self.buffers), {})

    def to_json(self) -> str:
        """The record as JSON; equal records give equal text."""
        value = {
            **vars(self),
            "format": FORMAT,
            "step": asdict(self.step),
            "buffers": [{**vars(s), "dtype": dtype_name(s.dtype)} for s in self.buffers],
            "package": asdict(self.package),
            "derived": {name: recipes.to_json(recipe) for name, recipe in self.derived.items()},
            "stored": {name: recipes.to_json(recipe) for name, recipe in self.stored.items()},
            "history": [asdict(passed) for passed in self.history],
        }
        return json.dumps(value, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> StepRecord:
        """Read what `to_json` wrote; the caller has checked its SHA-256.

        Raises:
            Exception: of any kind, if it is something else.
        """
        value: dict[str, Any] = json.loads(text)
        del value["format"]
        step = value["step"]
        made = cls(
            **{
                **value,
                "step": StepKey(step["phase"], Bucket(**step["bucket"]), step["spec_tokens"]),
                "buffers": tuple(map(_buffer_from_json, value["buffers"])),
                "package": Package(**value["package"]),
                "derived": _recipes_from_json(value["derived"]),
                "stored": _recipes_from_json(value["stored"]),
                "unexplained": tuple(value["unexplained"]),
                "ends": tuple(value["ends"]),
                "history": tuple(PassRecord(**passed) for passed in value["history"]),
            }
        )
        for part in (made, made.step, made.step.bucket, made.package, *made.buffers, *made.history):
            _check_types(part)
        return made


def _numbers(dims: Iterable[Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    numbers = tuple(size_of(dim, sizes) for dim in dims)
    if not all(0 <= number <= _LARGEST for number in numbers):
        raise CacheError(f"a step has a buffer of {numbers}; run `mtpc cache verify`")
    return numbers


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _is_size(value: Any) -> bool:
    return is_size_text(value) or _is_count(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "str": _is_text,
    "int": lambda value: type(value) is int and abs(value) <= _LARGEST,
    "int | None": lambda value: value is None or _is_count(value),
    "Mapping[str, int]": lambda value: all(map(_is_size, dict(value).values())),
    "bool": lambda value: isinstance(value, bool),
    "str | None": lambda value: value is None or _is_text(value),
    "float": _is_number,
    "torch.dtype": lambda value: isinstance(value, torch.dtype),
    "Part": lambda value: value in get_args(Part),
    "Phase": lambda value: value in get_args(Phase),
    "tuple[Dim, ...]": lambda value: all(map(_is_size, value)),
    "tuple[Writer, ...]": lambda value: all(map(_is_text, value)),
    "tuple[str, ...]": lambda value: all(map(_is_text, value)),
    "Mapping[str, str]": lambda value: all(map(_is_text, dict(value).values())),
    "Mapping[str, float]": lambda value: all(map(_is_number, dict(value).values())),
}
"""Checks of a field by its annotation. Fields of other types are checked as they are read."""


def _check_types(part: Any) -> None:
    """Refuse a dataclass with a field of another type than it declares.

    Raises:
        TypeError: the field has another type, or a size that no step has.
    """
    for field in fields(part):
        value, check = getattr(part, field.name), _TYPES.get(str(field.type))
        if check is not None and not check(value):
            raise TypeError(f"{type(part).__name__}.{field.name} is {str(value)[:60]!r}")


def settled_buffers(layout: Layout, settle: Callable[[Any], Size]) -> tuple[BufferSpec, ...]:
    """The buffers of a layout, with what `settle` makes of each dimension."""
    return tuple(replace(s, dims=tuple(map(settle, s.dims))) for s in layout.values())


def _recipes_from_json(value: dict[str, Any]) -> dict[str, Recipe]:
    return {name: recipes.from_json(recipe) for name, recipe in value.items()}


def _buffer_from_json(value: dict[str, Any]) -> BufferSpec:
    lists = {name: tuple(value[name]) for name in ("dims", "writers")}
    return BufferSpec(**{**value, **lists, "dtype": getattr(torch, value["dtype"])})

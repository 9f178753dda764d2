"""What a cache entry says of its step: enough to allocate, bind and run it without a graph."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mtpc.backends.package import Package
from mtpc.capture.graph import PassRecord
from mtpc.layout import Bucket, BufferSpec, Layout, Part, StepKey, dtype_name, step_name
from mtpc.weights import recipes
from mtpc.weights.recipes import Recipe

FORMAT = 1
"""Raised when old records can no longer be read; part of the key."""


@dataclass(frozen=True)
class StepRecord:
    """One step's entry.

    Attributes:
        lowering: digest of what was lowered, its text first: equal ones have equal packages.
        step: phase, bucket and K.
        part: the whole step, or which half of a split one.
        buffers: its buffers, sizes as numbers.
        package: how the compiled package is called.
        derived: weights that passes made of other weights.
        stored: weights that a checkpoint has: recipes over its tensors. Their dtype is in
            `dtypes`. Those in neither are constants, in the entry's own file.
        dtypes: dtype of each weight in `stored`.
        unexplained: weights that only transformers knows how to load from a checkpoint.
        repeats: stored tensors that must equal a weight: an MTP layer's own copy of the head.
        max_len: settled longest sequence, in tokens.
        vocab_size: token ids are below it.
        history: passes that ran.
        seconds: of each stage of the build.
        source: checkpoint it was built from, for people.
        created: when, in UTC.
    """

    lowering: str
    step: StepKey
    part: Part
    buffers: tuple[BufferSpec, ...]
    package: Package
    derived: Mapping[str, Recipe]
    stored: Mapping[str, Recipe]
    dtypes: Mapping[str, str]
    unexplained: tuple[str, ...]
    repeats: Mapping[str, str]
    max_len: int
    vocab_size: int
    history: tuple[PassRecord, ...]
    seconds: Mapping[str, float]
    source: str
    created: str

    @property
    def name(self) -> str:
        """What to call the step."""
        return step_name(self.step, self.part)

    def layout(self) -> Layout:
        """Its buffers."""
        return Layout(self.buffers, {})

    def to_json(self) -> str:
        """The record as text; equal records give equal text."""
        value = {
            "format": FORMAT,
            "lowering": self.lowering,
            "step": asdict(self.step),
            "part": self.part,
            "buffers": [_buffer_to_json(spec) for spec in self.buffers],
            "package": asdict(self.package),
            "derived": {name: recipes.to_json(recipe) for name, recipe in self.derived.items()},
            "stored": {name: recipes.to_json(recipe) for name, recipe in self.stored.items()},
            "dtypes": dict(self.dtypes),
            "unexplained": list(self.unexplained),
            "repeats": dict(self.repeats),
            "max_len": self.max_len,
            "vocab_size": self.vocab_size,
            "history": [asdict(passed) for passed in self.history],
            "seconds": dict(self.seconds),
            "source": self.source,
            "created": self.created,
        }
        return json.dumps(value, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> StepRecord:
        """What `to_json` wrote; its SHA-256 has been checked, so its shape is known."""
        value: dict[str, Any] = json.loads(text)
        del value["format"]
        step = value["step"]
        package = value["package"]
        return cls(
            **{
                **value,
                "step": StepKey(step["phase"], Bucket(**step["bucket"]), step["spec_tokens"]),
                "buffers": tuple(map(_buffer_from_json, value["buffers"])),
                "package": Package(**{**package, "inputs": tuple(package["inputs"])}),
                "derived": _recipes_from_json(value["derived"]),
                "stored": _recipes_from_json(value["stored"]),
                "unexplained": tuple(value["unexplained"]),
                "history": tuple(PassRecord(**passed) for passed in value["history"]),
            }
        )


def numbered(layout: Layout) -> tuple[BufferSpec, ...]:
    """A layout's buffers with numbers for symbols."""
    return tuple(
        BufferSpec(name, layout.shape(name), spec.dtype, spec.pad, spec.writer)
        for name, spec in layout.items()
    )


def _recipes_from_json(value: dict[str, Any]) -> dict[str, Recipe]:
    return {name: recipes.from_json(recipe) for name, recipe in value.items()}


def _buffer_to_json(spec: BufferSpec) -> list[Any]:
    return [spec.name, list(spec.dims), dtype_name(spec.dtype), spec.pad, spec.writer]


def _buffer_from_json(value: list[Any]) -> BufferSpec:
    name, dims, dtype, pad, writer = value
    return BufferSpec(name, tuple(dims), getattr(torch, dtype), pad, writer)

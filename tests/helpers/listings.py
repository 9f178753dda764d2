"""Listings of real steps, made once, and edits of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.plans import plan_of
from helpers.tiny import drafter
from mtpc.backends.cpu.backend import CpuBackend
from mtpc.backends.lower_tape import lower_to_tape
from mtpc.backends.tape import write_tape
from mtpc.capture.listing import listing
from mtpc.layout import Layout
from mtpc.models.load import load_planned
from mtpc.program.compiler import StepCompiler

Lines = list[list[Any]]


@dataclass(frozen=True)
class Listed:
    """A step's listing, its tape, and the text of its graph."""

    lines: Lines
    tape: bytes
    text: str


class Listings:
    """The steps of a checkpoint for the cpu backend in bfloat16; each is made once.

    Args:
        directory: of the checkpoint.
        options: of the program, in addition.
    """

    def __init__(self, directory: Path, **options: Any) -> None:
        sizes = dict(spec_tokens=2, batch_buckets=(3,), max_len=64, dtype="bfloat16")
        plan = plan_of(**{**drafter(directory), **sizes, **options})
        loaded = load_planned(directory, plan, headers_only=True)
        self._compiler = StepCompiler(loaded, plan, CpuBackend(), new_buffer=Layout.reserve)
        self._made: dict[str, Listed] = {}

    def __getitem__(self, phase: str) -> Listed:
        """The step of "decode" or "prefill"."""
        if phase not in self._made:
            key = next(key for key in self._compiler.keys if key.phase == phase)
            graph = self._compiler.rewritten(key)
            tape = write_tape(*lower_to_tape(graph)).encode()
            self._made[phase] = Listed(listing(graph), tape, graph.text())
        return self._made[phase]


@dataclass
class Edit:
    """A copy of a listing that is changed.

    Attributes:
        lines: of the listing.
        names: how many lines were added.
    """

    lines: Lines
    added: int = field(default=0)

    @classmethod
    def of(cls, lines: Lines) -> Edit:
        return cls(copy.deepcopy(lines))

    def find(self, op: str, number: int = 0, has: Callable[[Any], bool] = lambda line: True) -> Any:
        """The nth line of an operator that has something."""
        return [line for line in self.lines if line[1] == op and has(line)][number]

    def line(self, ref: str) -> Any:
        """The line that an argument names."""
        return next(line for line in self.lines if line[0] == ref.removeprefix("%"))

    def add(self, before: Any, op: str, args: dict[str, Any], shape: list[Any], dtype: str) -> str:
        """A new line before another; returns what names it."""
        self.added += 1
        name = f"planted_{self.added}"
        at = next(n for n, line in enumerate(self.lines) if line is before)
        self.lines.insert(at, [name, op, args, [shape], [dtype]])
        return f"%{name}"

    def redirect(self, ref: str, new: str, start: Any) -> None:
        """Lines from `start` on take a new value in the place of another."""
        at = next(n for n, line in enumerate(self.lines) if line is start)
        for line in self.lines[at:]:
            line[2] = {name: _swapped(value, ref, new) for name, value in line[2].items()}


def _swapped(value: Any, ref: str, new: str) -> Any:
    if isinstance(value, list):
        return [_swapped(one, ref, new) for one in value]
    return new if value == ref else value

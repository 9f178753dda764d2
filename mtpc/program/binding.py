"""Binding cached steps to tensors; all steps of a program share state and weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from safetensors.torch import load
from torch import Tensor

from mtpc.backends.package import signature_bytes
from mtpc.capture.graph import is_buffer_name
from mtpc.layout import StepKey
from mtpc.layout.progress import Listener, Progress, left_at
from mtpc.program.processes import free_bytes
from mtpc.program.program import CapturedStep, CostEntry, Program, allocate_results
from mtpc.program.step_cache import CONSTANTS, CachedStep, Steps
from mtpc.weights.weights import Weights

_TELL_S = 0.5
"""Seconds between two reports while weights are read."""


@dataclass(frozen=True)
class BuiltSteps:
    """Steps that are built, and what they are bound to.

    Attributes:
        steps: by step and part, the largest first.
        weights: the program's weights, which are made when a step reads them.
        shared: tensors of state and caches; None if a program has to make its own.
        meet: called before a step runs for the first time: ranks compile at their own pace.
    """

    steps: Steps
    weights: Weights
    shared: Mapping[str, Tensor] | None = None
    meet: Callable[[], object] = lambda: None


@dataclass
class StepBinder:
    """Binds steps to tensors.

    Attributes:
        built: the steps' weights.
        shared: tensors of state and caches by name.
        added: called with the name of each weight that the binder has added.
        begin: called with each stage that begins, where a step is lowered only now.
    """

    built: BuiltSteps
    shared: Mapping[str, Tensor]
    added: Callable[[str], None] = lambda name: None
    begin: Callable[[str], None] = lambda stage: None

    def bind(self, step: CachedStep, own: dict[str, Tensor] | None = None) -> CapturedStep:
        """Open a step over its tensors.

        Args:
            step: to open.
            own: buffers that only this step uses, by name. Missing ones are allocated and added, so
                that both halves of a split step can be bound to the same set.
        """
        start, weights = time.perf_counter(), self.built.weights
        own = {} if own is None else own
        layout = step.layout
        missing = [name for name in layout if name not in self.shared and name not in own]
        if missing:
            device = next(iter(self.shared.values())).device
            results = [name for name in missing if layout[name].is_result]
            own |= allocate_results(layout, results, device)
            own |= {n: layout.allocate(n, device) for n in missing if n not in results}
        buffers = {**self.shared, **own}

        def tensor_of(name: str) -> Tensor:
            if name in buffers:
                return buffers[name]
            is_new = not weights.is_made(name)
            if is_new and not weights.can_make(name):
                weights.bind(name, load(step.read(CONSTANTS))[name])
            value = weights.value(name)
            if is_new:
                self.added(name)
            return value

        weights.know(step.record.derived, step.record.stored, step.record.ends)
        opened = step.artifact.open(tensor_of, step.sizes, self._begin)
        seconds = time.perf_counter() - start
        return CapturedStep(step.record.step, layout, buffers, opened.run, seconds, opened.graph)

    def _begin(self, stage: str) -> None:
        if stage == "capture":
            self.built.meet()
        self.begin(stage)


def bind_program(
    built: BuiltSteps,
    listener: Listener = lambda progress: None,
    identity: str = "",
    costs: CostEntry | None = None,
) -> Program:
    """A program of whole steps.

    Args:
        built: the steps; those of a split step are no part of a program.
        listener: called at each step.
        identity: see `Program`.
        costs: see `Program`.
    """
    steps, weights, shared = built.steps, built.weights, built.shared
    layout = next(iter(steps.values())).layout
    if shared is None:
        shared = {name: layout.allocate(name) for name, spec in layout.items() if spec.shared}
    loading = _Loading(steps, weights, listener)
    binder = StepBinder(built, shared, loading.added, loading.begin)
    bound = {}
    needed = loading.total + sum(tensor.nbytes for tensor in shared.values())
    for step in steps.values():
        weights.know(step.record.derived, step.record.stored, step.record.ends)
    with weights.reading_ahead(loading.names, free_bytes(), needed):
        for done, ((key, _), step) in enumerate(steps.items()):
            loading.begins(key, done)
            bound[key] = binder.bind(step)
    return Program(bound, shared, identity=identity, costs=costs)


class _Loading:
    """Says which step is bound, and from time to time how much of all weights is there.

    Attributes:
        names: of the weights that are not there when binding begins, in the order of use.
        total: their bytes.
    """

    def __init__(self, steps: Steps, weights: Weights, listener: Listener):
        self._listener, self._start = listener, time.perf_counter()
        self._sizes = {
            name: signature_bytes(signature)
            for step in steps.values()
            for name, signature in step.record.package.tensors.items()
            if not is_buffer_name(name) and not weights.is_made(name)
        }
        self.names, self.total = tuple(self._sizes), sum(self._sizes.values())
        self._there, self._steps = 0, len(steps)
        self._told_s = 0.0

    def begins(self, key: StepKey, done: int) -> None:
        """A step is bound from now on."""
        self._key, self._done = key, done
        self._tell(time.perf_counter() - self._start)

    def begin(self, stage: str) -> None:
        """A stage of a step begins that is lowered only now."""
        self._tell(time.perf_counter() - self._start, stage)

    def added(self, name: str) -> None:
        """A weight is there."""
        self._there += self._sizes.get(name, 0)
        elapsed_s = time.perf_counter() - self._start
        if elapsed_s > self._told_s + _TELL_S:
            self._tell(elapsed_s)

    def _tell(self, elapsed_s: float, stage: str = "load") -> None:
        self._told_s = elapsed_s
        place = (self._key, self._done, self._steps, elapsed_s)
        fraction = self._there / self.total if self.total else self._done / self._steps
        self._listener(Progress(stage, *place, fraction, left_at(fraction, elapsed_s)))

"""Which configuration of a kernel is fastest on a device: measured once, kept in the graph cache.

    call of an op -> its launches -> the cache's row of each, or a measurement -> `configs`

A row is an entry of the cache, under a key of device, Triton, kernel, sizes and dtypes. The process
that measures holds the row's lock, so that processes that start together choose alike. It measures
while a step is bound to kernels, before the step is lowered or captured. Without a device nothing
is measured, and every launch runs by default.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from mtpc.backends.triton_kernels.configs import Config, configs_of
from mtpc.backends.triton_kernels.crosscompile import triton_fields
from mtpc.backends.triton_kernels.launch import Launch
from mtpc.backends.triton_kernels.plans import node_launches
from mtpc.capture.graph import StepGraph, get_tensor
from mtpc.capture.inline import fake_mode_of
from mtpc.errors import BackendError, CacheError, DamagedEntryError
from mtpc.layout import dtype_name
from mtpc.layout.progress import Report, silent
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.key import Fields, digest, hash_of
from mtpc.store.lookup import KEY, key_bytes, key_of

KIND = "gpu-tuning"
ROW = "tuning.json"
_MARGIN = 0.02
"""The share of the default's time by which a configuration must be faster; less may be noise."""


@dataclass(frozen=True)
class Call:
    """A call of an operator, to be measured.

    Attributes:
        node: the call, of fake tensors.
        graph: its step, whose weights are on the device.
    """

    node: fx.Node
    graph: StepGraph

    def weight(self, argument: Any) -> Tensor | None:
        """An argument's tensor if it is a weight, else None."""
        if not isinstance(argument, fx.Node) or argument.op != "get_attr":
            return None
        tensor = get_tensor(self.graph.module, str(argument.target))
        return None if self.graph.weights.name_of(tensor) is None else tensor


Timer = Callable[[Call, int, Sequence[Config]], list[float]]
"""Seconds that one launch of a call, given by its index, takes in each configuration; infinite
where the device refuses it. Raises BackendError where nothing can be measured."""


@dataclass(frozen=True)
class Tuned:
    """A row, and what was wrong with the one before.

    Attributes:
        choice: the configuration's name.
        notes: why it was measured again, or cannot be kept.
    """

    choice: str
    notes: tuple[str, ...] = ()


@dataclass
class Tuner:
    """Chooses for every launch of a call.

    Attributes:
        store: the graph cache; None: measurements last as long as this object.
        device: name of a kind of device; devices of one kind share rows.
        timer: measures.
        report: receives a line for each measurement.
        sources: a digest of this package: kernels, what they share, and their configurations. With
            other sources a row is measured anew.
        known: digest of a row's key -> the row.
    """

    store: EntryStore | None
    device: str
    timer: Timer
    report: Report = silent
    sources: str = field(
        default_factory=lambda: hash_of(
            path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))
        )
    )
    known: dict[str, Tuned] = field(default_factory=dict)

    def __call__(self, node: fx.Node, graph: StepGraph) -> tuple[str, tuple[str, ...]]:
        """The argument `configs` of a call ("" if all launches run by default), and notes."""
        with fake_mode_of(graph.graph):
            launches = node_launches(node)
        words: list[str] = []
        notes: list[str] = []
        for index, launch in enumerate(launches):
            configs = configs_of(launch)
            if len(configs) > 1:
                tuned = self._tuned(Call(node, graph), index, launch)
                notes += tuned.notes
                if tuned.choice != str(configs[0]):
                    words.append(f"{launch.name}:{tuned.choice}")
        return ";".join(words), tuple(notes)

    def _tuned(self, call: Call, index: int, launch: Launch) -> Tuned:
        fields = {**tuning_fields(launch, self.device), "source": self.sources}
        name = digest(fields)
        if name not in self.known:
            trial = _Trial(self, call, index, launch)
            try:
                self.known[name] = trial.obtain(fields)
            except BackendError as error:
                default = str(configs_of(launch)[0])
                note = f"{launch.name} could not be measured, and runs by default: {error}"
                self.known[name] = Tuned(default, (note,))
        return self.known[name]


@dataclass
class _Trial:
    """One launch, whose fastest configuration is wanted.

    Attributes:
        tuner: the tuner.
        call: the call of which the launch is a part.
        index: the launch's index in the call.
        launch: the launch in its default configuration.
        times: seconds by configuration; empty before the measurement.
    """

    tuner: Tuner
    call: Call
    index: int
    launch: Launch
    times: dict[str, float] = field(default_factory=dict)

    def obtain(self, fields: Fields) -> Tuned:
        """The cache's row, or a new measurement, which is kept where that is possible."""
        store, notes = self.tuner.store, list[str]()
        try:
            if store is None:
                return Tuned(fastest(self._measured()))
            found = _read(store, fields, self.launch, notes)
            if found is None:
                found = self._under_lock(store, fields)
            return Tuned(found, tuple(notes))
        except CacheError as error:
            notes.append(f"the autotune row of {self.launch.name} is not kept: {error}")
            return Tuned(fastest(self._measured()), tuple(notes))

    def _under_lock(self, store: EntryStore, fields: Fields) -> str:
        with store.lock(digest(fields), self.tuner.report):
            # The process that held the lock may have written it; damage was noted before.
            found = _read(store, fields, self.launch, [])
            if found is None:
                found = fastest(self._measured())
                _write(store, fields, found, self.times)
            return found

    def _measured(self) -> dict[str, float]:
        if not self.times:
            self.tuner.report(f"measure {self.launch.name} on {self.tuner.device}")
            configs = configs_of(self.launch)
            seconds = self.tuner.timer(self.call, self.index, configs)
            self.times = dict(zip(map(str, configs), seconds, strict=True))
        return self.times


def tuning_fields(launch: Launch, device: str) -> dict[str, str]:
    """The key of a row without the sources: everything that the time depends on, except lengths
    and the numbers of pages and slots."""
    arguments, constants = launch.arguments, dict(launch.constants)
    dtypes = {n: dtype_name(a.dtype) for n, a in arguments.items() if isinstance(a, Tensor)}
    integers = {n: a for n, a in arguments.items() if not isinstance(a, Tensor)}
    return {
        "kind": KIND,
        "device": device,
        "kernel": launch.name,
        "dtypes": json.dumps(dtypes, sort_keys=True),
        "arguments": json.dumps(integers, sort_keys=True),
        "constants": json.dumps(constants, sort_keys=True),
        "grid": json.dumps(launch.grid),
        "configurations": "; ".join(map(str, configs_of(launch))),
        **triton_fields(),
    }


def fastest(times: dict[str, float]) -> str:
    """The default, which comes first, unless another configuration is faster by `_MARGIN`."""
    default, *others = times
    best = min(others, key=times.__getitem__, default=default)
    return best if times[best] < times[default] * (1 - _MARGIN) else default


def _read(store: EntryStore, fields: Fields, launch: Launch, notes: list[str]) -> str | None:
    """A row's choice; None where there is no row, and, with a note, where it is damaged."""
    try:
        entry = store.read(digest(fields))
        if entry is None:
            return None
        key_of(entry)
        return _choice(entry, launch)
    except DamagedEntryError as error:
        notes.append(f"the autotune row of {launch.name} is refused, and measured again: {error}")
        return None


def _choice(entry: Entry, launch: Launch) -> str:
    known = [str(config) for config in configs_of(launch)]
    try:
        row = json.loads(entry.read(ROW)) if ROW in entry.files else {}
        choice = row["choice"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedEntryError(
            f"{entry.directory / ROW} is no row: {type(error).__name__} {error}; expected a JSON "
            "object with choice and seconds"
        ) from error
    if choice not in known:
        raise DamagedEntryError(
            f"{entry.directory / ROW} chooses {choice!r}; expected one of {', '.join(known)}"
        )
    return str(choice)


def _write(store: EntryStore, fields: Fields, choice: str, times: dict[str, float]) -> None:
    seconds = {name: None if math.isinf(value) else value for name, value in times.items()}

    def fill(directory: Path) -> None:
        row = {"choice": choice, "seconds": seconds}
        (directory / ROW).write_text(json.dumps(row, indent=1) + "\n")
        (directory / KEY).write_bytes(key_bytes(fields))

    store.write(digest(fields), fill)

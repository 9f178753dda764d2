"""What is fastest on a device: measured once, kept in the graph cache.

    candidates, the default first -> the cache's row, or a measurement -> the fastest

A row is an entry of the cache, under a key of the device and all that the times depend on. The
process that measures holds the row's lock, so that processes that start together choose alike. It
measures while a step is bound to kernels, before the step is lowered or captured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from mtpc.errors import BackendError, CacheError, DamagedEntryError
from mtpc.layout.progress import Report, silent
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.key import Fields, digest
from mtpc.store.lookup import find, keep

KIND = "gpu-tuning"
ROW = "tuning.json"
_MARGIN = 0.02
"""The share of the default's time by which another must be faster; less may be noise."""
Times = Callable[[], Mapping[str, float]]
"""Seconds by the name of a way, the default first; measured when they are asked for, once."""


@dataclass
class Table:
    """The rows of one kind of device, which devices of that kind share.

    Without a store, measurements last as long as this object. `report` receives a line for each.
    `known` has, by the digest of a row's key, what `choose` returns for it.
    """

    store: EntryStore | None
    device: str
    report: Report = silent
    known: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)

    def choose(
        self,
        what: str,
        names: tuple[str, ...],
        key: Mapping[str, str],
        measure: Callable[[], list[float]],
    ) -> tuple[str, tuple[str, ...]]:
        """The fastest of some ways to do one thing; the default, which comes first, where nothing
        can be measured.

        `key` is what their times depend on, but for the device. `measure` gives the seconds of
        each, in order; infinite where the device refuses it. It raises BackendError where nothing
        can be measured.

        Returns:
            The name of a way; and notes: why it was measured again, could not be, or is not kept.
            A frozen store is not measured for: what it lacks runs by default.
        """
        kind = {"kind": KIND, "device": self.device, "configurations": "; ".join(names)}
        fields, notes = {**kind, **key}, list[str]()

        @cache
        def times() -> Mapping[str, float]:
            self.report(f"measure {what} on {self.device}")
            return dict(zip(names, measure(), strict=True))

        name = digest(fields)
        if name not in self.known:
            try:
                self.known[name] = self._choice(what, names, fields, times, notes), tuple(notes)
            except BackendError as error:
                note = f"{what} could not be measured, and runs by default: {error}"
                self.known[name] = names[0], (note,)
        return self.known[name]

    def _choice(
        self, what: str, names: tuple[str, ...], fields: Fields, times: Times, notes: list[str]
    ) -> str:
        """That of the cache's row, or of a new measurement, which is kept where it can be."""
        if self.store is None:
            return fastest(times())
        try:
            found = _read(self.store, what, names, fields, notes)
            if found is None and self.store.frozen:
                raise BackendError("the graph cache is frozen, and has no row of it")
            if found is None:
                with self.store.lock(digest(fields), self.report):
                    # The process that held it may have written the row; damage was noted before.
                    found = _read(self.store, what, names, fields, [])
                    found = found or _keep(self.store, fields, times())
            return found
        except CacheError as error:
            notes.append(f"the autotune row of {what} is not kept: {error}")
            return fastest(times())


def fastest(times: Mapping[str, float]) -> str:
    """The default, which comes first, unless another is faster by `_MARGIN`."""
    default, *others = times
    best = min(others, key=times.__getitem__, default=default)
    return best if times[best] < times[default] * (1 - _MARGIN) else default


def _keep(store: EntryStore, fields: Fields, times: Mapping[str, float]) -> str:
    """A measurement's choice; the row of it is written."""
    seconds = {name: None if math.isinf(value) else value for name, value in times.items()}
    row = json.dumps({"choice": fastest(times), "seconds": seconds}, indent=1) + "\n"
    keep(store, fields, {ROW: row.encode()})
    return fastest(times)


def _read(
    store: EntryStore, what: str, names: tuple[str, ...], fields: Fields, notes: list[str]
) -> str | None:
    """A row's choice; None where there is no row, and, with a note, where it is damaged."""
    try:
        entry = find(store, fields)
        return None if entry is None else _choice_of(entry, names)
    except DamagedEntryError as error:
        notes.append(f"the autotune row of {what} is refused, and measured again: {error}")
        return None


def _choice_of(entry: Entry, known: tuple[str, ...]) -> str:
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

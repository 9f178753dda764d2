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

from mtpc.errors import BackendError, CacheError, DamagedEntryError
from mtpc.layout.progress import Report, silent
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.key import Fields, digest
from mtpc.store.lookup import keep, key_of

KIND = "gpu-tuning"
ROW = "tuning.json"
_MARGIN = 0.02
"""The share of the default's time by which another must be faster; less may be noise."""


@dataclass(frozen=True)
class Candidates:
    """Ways to do one thing, of which the fastest is wanted.

    Attributes:
        what: the thing, for messages.
        names: of the ways, the default first.
        key: what their times depend on, but for the device.
        measure: the seconds of each, in order; infinite where the device refuses it. Raises
            BackendError where nothing can be measured.
    """

    what: str
    names: tuple[str, ...]
    key: Mapping[str, str]
    measure: Callable[[], list[float]]


@dataclass(frozen=True)
class Tuned:
    """A row, and what was wrong with the one before.

    Attributes:
        choice: the name of a candidate.
        notes: why it was measured again, or cannot be kept.
    """

    choice: str
    notes: tuple[str, ...] = ()


@dataclass
class Table:
    """The rows of one kind of device.

    Attributes:
        store: the graph cache; None: measurements last as long as this object.
        device: name of the kind; devices of one kind share rows.
        report: receives a line for each measurement.
        known: digest of a row's key -> the row.
    """

    store: EntryStore | None
    device: str
    report: Report = silent
    known: dict[str, Tuned] = field(default_factory=dict)

    def choose(self, candidates: Candidates) -> Tuned:
        """The fastest; the default where nothing can be measured, with a note."""
        fields = row_fields(candidates, self.device)
        name = digest(fields)
        if name not in self.known:
            try:
                self.known[name] = _Trial(self, candidates, fields).obtain()
            except BackendError as error:
                note = f"{candidates.what} could not be measured, and runs by default: {error}"
                self.known[name] = Tuned(candidates.names[0], (note,))
        return self.known[name]


def row_fields(candidates: Candidates, device: str) -> Fields:
    """The key of a row."""
    names = "; ".join(candidates.names)
    return {"kind": KIND, "device": device, "configurations": names, **candidates.key}


def fastest(times: Mapping[str, float]) -> str:
    """The default, which comes first, unless another is faster by `_MARGIN`."""
    default, *others = times
    best = min(others, key=times.__getitem__, default=default)
    return best if times[best] < times[default] * (1 - _MARGIN) else default


@dataclass
class _Trial:
    """Candidates, and their times once they are measured."""

    table: Table
    candidates: Candidates
    fields: Fields
    times: dict[str, float] = field(default_factory=dict)

    def obtain(self) -> Tuned:
        """The cache's row, or a new measurement, which is kept where that is possible."""
        store, notes, what = self.table.store, list[str](), self.candidates.what
        try:
            if store is None:
                return Tuned(fastest(self._measured()))
            found = self._read(store, notes)
            if found is None:
                with store.lock(digest(self.fields), self.table.report):
                    # The process that held it may have written the row; damage was noted before.
                    found = self._read(store, []) or self._kept(store)
            return Tuned(found, tuple(notes))
        except CacheError as error:
            notes.append(f"the autotune row of {what} is not kept: {error}")
            return Tuned(fastest(self._measured()), tuple(notes))

    def _kept(self, store: EntryStore) -> str:
        """A new measurement's choice; the row of it is written."""
        times = self._measured()
        seconds = {name: None if math.isinf(value) else value for name, value in times.items()}
        row = json.dumps({"choice": fastest(times), "seconds": seconds}, indent=1) + "\n"
        keep(store, self.fields, {ROW: row.encode()})
        return fastest(times)

    def _measured(self) -> dict[str, float]:
        if not self.times:
            self.table.report(f"measure {self.candidates.what} on {self.table.device}")
            seconds = self.candidates.measure()
            self.times = dict(zip(self.candidates.names, seconds, strict=True))
        return self.times

    def _read(self, store: EntryStore, notes: list[str]) -> str | None:
        """A row's choice; None where there is no row, and, with a note, where it is damaged."""
        try:
            entry = store.read(digest(self.fields))
            if entry is None:
                return None
            key_of(entry)
            return _choice(entry, self.candidates.names)
        except DamagedEntryError as error:
            what = self.candidates.what
            notes.append(f"the autotune row of {what} is refused, and measured again: {error}")
            return None


def _choice(entry: Entry, known: tuple[str, ...]) -> str:
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

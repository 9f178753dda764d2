"""What Inductor makes of a GPU's step, kept in the graph cache.

    step -> key -> entry -> torch's caches -> lowering, which compiles nothing

torch records what its caches take (`torch.compiler.save_cache_artifacts`), and puts it back. An
entry holds what the lowering of one step records, and what its first run adds: the configurations
that Inductor chooses by measurement. The key only says which entry to try. Inductor looks up each
graph by a key of its own, so an entry of another step is of no use, and gives no wrong step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch
from torch.compiler._cache import CacheArtifactManager, CacheInfo

import mtpc
from mtpc.backends.base import Run
from mtpc.backends.graphs import ALIGNMENT, Lower, static_tensors
from mtpc.backends.package import signature
from mtpc.capture.graph import StepGraph
from mtpc.errors import CacheError, DamagedEntryError
from mtpc.layout.progress import Report, silent
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.key import Fields, digest, hash_of
from mtpc.store.lookup import find, keep
from mtpc.store.machine import torch_field
from mtpc.store.safety import DIRECTORY_MODE, check_owner
from mtpc.store.sources import PACKAGE

KIND = "gpu-step"
LOWERING, FIRST_RUN = "lowering.artifacts", "first-run.artifacts"
"""Files of an entry, as torch writes them. The second is there only if the first run adds any."""
_ROOMS = ("backends", "capture", "ops", "passes")
"""Rooms whose code decides what Inductor makes of a graph."""

Names = frozenset[tuple[str, str]]
"""Kind and key of each of torch's artifacts."""
T = TypeVar("T")


@dataclass(frozen=True)
class Artifacts:
    """What torch's caches have taken or served for a while, by names; `data` is empty if there was
    nothing."""

    data: bytes = b""
    names: Names = frozenset()


@dataclass(frozen=True)
class KeptSteps:
    """A `Lower` that keeps in the graph cache what another one makes. `machine` has key fields of
    the device and its compilers.

    `note` is called with a line when an entry is refused, or cannot be kept; `report` when another
    process lowers the step, which this one awaits.
    """

    store: EntryStore
    machine: Mapping[str, str]
    lower: Lower
    note: Callable[[str], None]
    report: Report = silent

    def __call__(self, graph: StepGraph) -> Run:
        """Lower a step, by its entry if there is one.

        Raises:
            BackendError: see `lower`.
            CacheError: the store is frozen, and lacks the step or a part of it.
        """
        fields = {**step_fields(graph), **self.machine}
        try:
            # No other user may write there: torch runs what it finds, and the graph cache keeps it.
            from torch._inductor.runtime.cache_dir_utils import cache_dir

            path = Path(cache_dir()).resolve()
            if not any(path.iterdir()):  # torch has just made it, with the bits of the umask.
                with suppress(PermissionError):  # It is another user's, which the check says.
                    path.chmod(DIRECTORY_MODE)
            check_owner(path)
        except CacheError as error:
            if self.store.frozen:
                raise
            self.note(f"{graph.name} is compiled without the graph cache: {error}")
            return self.lower(graph)
        known = self._hand_over(fields, self.note)
        if known is not None:
            return self._lowered_with(graph, fields, known)
        if self.store.frozen:
            raise self._lacks(graph)
        with self._locked(fields) as is_held:
            if not is_held:
                return self.lower(graph)
            # The process that held the lock may have written it; damage was noted before.
            known = self._hand_over(fields, silent)
            if known is not None:
                return self._lowered_with(graph, fields, known)
            run, made = _record(lambda: self.lower(graph))
            self._write(fields, made, Artifacts())
            return _FirstRun(run, partial(self._add, fields, made.names, made))

    def _lowered_with(self, graph: StepGraph, fields: Fields, known: Names) -> Run:
        """Lower a step after torch was given an entry; `known` is what the entry holds."""
        run, made = _record(lambda: self.lower(graph))
        if not made.names <= known:
            if self.store.frozen:
                raise self._lacks(graph)
            self.note(f"{graph.name} was compiled again: its entry in the graph cache lacks a part")
        return run if self.store.frozen else _FirstRun(run, partial(self._add, fields, known, made))

    def _lacks(self, graph: StepGraph) -> CacheError:
        """What a start says that may not compile a step."""
        return CacheError(
            f"frozen, and the graph cache {self.store.root} lacks {graph.name}, or a part of it, "
            "for this device, these versions and these sizes, num_pages among them; start once "
            "without frozen on such a device"
        )

    def _add(self, fields: Fields, known: Names, lowering: Artifacts, first: Artifacts) -> None:
        """Replace an entry by one that also has what a first run adds; leave it if it has all."""
        if not lowering.names | first.names <= known:
            with self._locked(fields) as is_held:
                if is_held:
                    self._write(fields, lowering, first)

    def _hand_over(self, fields: Fields, note: Callable[[str], None]) -> Names | None:
        """Give torch what an entry holds; returns what that is, or None without a good entry."""
        try:
            entry = find(self.store, fields)
            if entry is None:
                return None
            if LOWERING not in entry.files:
                raise DamagedEntryError(f"{entry.directory} has no {LOWERING}")
            names = [name for name in (LOWERING, FIRST_RUN) if name in entry.files]
            return Names().union(*(_load(entry, name) for name in names))
        except CacheError as error:
            note(f"{fields['step']} is compiled again, its cache entry was refused: {error}")
            return None

    def _write(self, fields: Fields, lowering: Artifacts, first: Artifacts) -> None:
        """Write an entry, whose lock is held, if that is possible."""
        if not lowering.data:
            return  # Inductor's caches are switched off.
        try:
            files = {LOWERING: lowering.data, FIRST_RUN: first.data}
            keep(self.store, fields, {name: data for name, data in files.items() if data})
        except CacheError as error:
            self.note(f"{fields['step']} is not kept in the graph cache: {error}")

    @contextmanager
    def _locked(self, fields: Fields) -> Iterator[bool]:
        """Hold the lock of an entry; gives False, with a note, where that is not possible."""
        with ExitStack() as held:
            try:
                held.enter_context(self.store.lock(digest(fields), self.report))
            except CacheError as error:
                self.note(f"{fields['step']} is not kept in the graph cache: {error}")
                yield False
            else:
                yield True


class _FirstRun:
    """A lowered step whose first run is recorded, too."""

    def __init__(self, run: Run, keep: Callable[[Artifacts], None]):
        self._run = run
        self._keep: Callable[[Artifacts], None] | None = keep

    def __call__(self) -> None:
        if self._keep is None:
            self._run()
            return
        keep, self._keep = self._keep, None
        _, made = _record(self._run)
        keep(made)


def step_fields(graph: StepGraph) -> dict[str, str]:
    """The key of a step, without the machine: its calls, and the forms of all its tensors."""
    forms = [
        f"{name} {signature(tensor)} {tensor.device} {tensor.data_ptr() % ALIGNMENT == 0}"
        for name, tensor in sorted(static_tensors(graph).items())
    ]
    return {
        "kind": KIND,
        "step": graph.name,
        "graph": hash_of(text.encode() for text in (graph.text(), *forms)),
        "version.mtpc": mtpc.__version__,
        **torch_field(),
        "source": sources_digest(),
    }


@cache
def sources_digest() -> str:
    """A digest of the code of mtpc that decides what Inductor makes of a graph."""
    paths = (path for room in _ROOMS for path in sorted((PACKAGE / room).rglob("*.py")))
    return hash_of(path.read_bytes() for path in paths)


def _record(work: Callable[[], T]) -> tuple[T, Artifacts]:
    """Do some work; returns its result, and what torch's caches took or served meanwhile."""
    with CacheArtifactManager.with_fresh_cache():
        result = work()
        saved = torch.compiler.save_cache_artifacts()
    return result, Artifacts() if saved is None else Artifacts(saved[0], _names(saved[1]))


def _names(info: CacheInfo) -> Names:
    return frozenset((kind, key) for kind, keys in info.artifacts.items() for key in keys)


def _load(entry: Entry, name: str) -> Names:
    """Put a file's artifacts into torch's caches. torch unpickles them: they are code. Raises
    DamagedEntryError: the file was changed, or torch cannot read it."""
    data = entry.read(name)
    try:
        info = torch.compiler.load_cache_artifacts(data)
    except Exception as error:
        raise DamagedEntryError(
            f"{entry.directory / name} is nothing that this torch can load: "
            f"{type(error).__name__}: {error}"
        ) from error
    if info is None:
        raise DamagedEntryError(f"{entry.directory / name} is nothing that this torch can read")
    return _names(info)

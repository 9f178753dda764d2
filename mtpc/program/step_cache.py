"""The cache as a compiler sees it: steps by key, and a note of each time it could not help."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mtpc.backends.package import CALLS, LIBRARY
from mtpc.config import CompileOptions
from mtpc.errors import CacheError, CacheWriteError, DamagedEntryError
from mtpc.layout import Part, StepKey, step_name
from mtpc.program.step_record import FORMAT, StepRecord
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.key import Difference, Fields, digest, hash_of
from mtpc.store.lookup import KEY, find, key_bytes, nearest, peek
from mtpc.store.machine import environment_fields

_SHOWN = 4
"""Differences that a one-line reason names."""
RECORD = "step.record.json"
CONSTANTS = "constants.safetensors"
KIND = "step"


def graph_file(index: int, name: str) -> str:
    """File with the graph's text after the pass of this number and name."""
    return f"graph.{index:02d}-{name}.txt.gz"


Build = Callable[[Path], StepRecord]
"""Compiles a step's files into the directory it is given."""


@dataclass(frozen=True)
class CachedStep:
    """A step's files and what is known of them.

    Attributes:
        directory: where they are.
        record: how to bind and call the package.
        entry: their checked entry; None where the cache could not be written and they are
            temporary.
    """

    directory: Path
    record: StepRecord
    entry: Entry | None


def program_fields(model: Fields, options: CompileOptions) -> dict[str, str]:
    """What all steps of a program have in their keys: model, options, versions, machine."""
    return {
        "kind": KIND,
        "format": str(FORMAT),
        "backend": "cpu",
        **model,
        "options.spec_tokens": str(options.spec_tokens),
        "options.largest_bucket": str(max(options.batch_buckets)),
        "options.max_len": str(options.max_len or "the model's"),
        "options.page_size": str(options.page_size),
        "options.num_pages": str(options.num_pages or "enough"),
        "options.sampling": str(options.sampling),
        "options.max_logprobs": str(options.max_logprobs) if options.sampling else "none",
        "options.token_mask": str(options.token_mask),
        "options.dtype": options.dtype or "the checkpoint's",
        "options.draft_vocab": _described(options.draft_vocab),
        "passes.disabled": " ".join(sorted(set(options.disabled_passes))),
        "passes.enabled": " ".join(sorted(set(options.enabled_passes))),
        **environment_fields(),
    }


def _described(token_ids: tuple[int, ...]) -> str:
    """Token ids, in a line."""
    if not token_ids:
        return "all"
    return f"{len(token_ids)} ids, {hash_of([repr(token_ids).encode()])}"


def step_fields(program: Fields, key: StepKey, part: Part = "step") -> dict[str, str]:
    """The key of one step."""
    return {
        **program,
        "step.phase": key.phase,
        "step.num_reqs": str(key.bucket.num_reqs),
        "step.query_len": str(key.bucket.query_len),
        "step.spec_tokens": str(key.spec_tokens),
        "step.part": part,
    }


class StepCache:
    """The entries of one program.

    Args:
        store: where they are.
        program: what `program_fields` gave.
        frozen: refuse to build.
        tell: hears of waiting, and of entries that are damaged.

    Attributes:
        notes: why the cache could not serve or keep something, counted; `Stats.fallbacks` in the
            end.
    """

    def __init__(
        self,
        store: EntryStore,
        program: Fields,
        frozen: bool = False,
        tell: Callable[[str], None] = lambda line: None,
    ):
        self.store, self.program, self.frozen = store, program, frozen
        self.notes: Counter[str] = Counter()
        self._tell = tell
        self._scratch = tempfile.TemporaryDirectory(prefix="mtpc-steps-")

    def find(self, key: StepKey, part: Part = "step") -> CachedStep | None:
        """The step, if the cache has it; a damaged entry is noted and counts as missing.

        Raises:
            CacheError: another user could have written the cache, or (frozen) it is damaged.
        """
        try:
            return self._look_up(step_fields(self.program, key, part))
        except DamagedEntryError as error:
            if self.frozen:
                raise
            self.note(f"a damaged cache entry was not used: {error}")
            return None

    def find_all(
        self, keys: Iterable[StepKey], part: Part = "step"
    ) -> dict[StepKey, CachedStep] | None:
        """All the steps, or that half of each, or None where one is missing.

        Raises:
            CacheError: see `find`; or, frozen, the reason why a step is missing.
        """
        found: dict[StepKey, CachedStep] = {}
        for key in keys:
            step = self.find(key, part)
            if step is None:
                self._refuse_if_frozen(key, part)
                self._tell(self.miss(key, part))
                return None
            found[key] = step
        return found

    def obtain(self, key: StepKey, build: Build, part: Part = "step") -> CachedStep:
        """The step from the cache, or built and kept there; other builders of it are waited for.

        Raises:
            CacheError: another user could have written the cache, or it is frozen.
        """
        found = self.find(key, part)
        if found is not None:
            return found
        self._refuse_if_frozen(key, part)
        fields = step_fields(self.program, key, part)
        with ExitStack() as held:
            try:
                held.enter_context(self.store.lock(digest(fields), self._tell))
            except CacheWriteError as error:
                self.note(f"not kept in the cache: {error}")
            return self._built_meanwhile(fields) or self._build(fields, build)

    def _built_meanwhile(self, fields: Fields) -> CachedStep | None:
        """What another builder left while this one waited for the lock."""
        try:
            return self._look_up(fields)
        except DamagedEntryError:
            return None  # As before the wait, when it was noted.

    def _look_up(self, fields: Fields) -> CachedStep | None:
        entry = find(self.store, fields)
        return None if entry is None else _read(entry)

    def find_lowered(self, lowering: str) -> CachedStep | None:
        """A step of any key that was lowered from the very same graph, on such a machine."""
        for name, fields in peek(self.store):
            path = self.store.directory(name) / RECORD
            if fields.get("format") != str(FORMAT) or lowering not in _text(path):
                continue
            try:
                step = _read_entry(self.store, name)
            except DamagedEntryError:
                continue
            if step is not None and step.record.lowering == lowering:
                return step
        return None

    def reasons(self, key: StepKey, part: Part = "step") -> list[Difference]:
        """How the nearest entry differs from a step's key; empty where there is no step at all."""
        row = nearest(self.store, step_fields(self.program, key, part))
        return row.differences if row else []

    def miss(self, key: StepKey, part: Part = "step") -> str:
        """Why a step is not in the cache, in a line."""
        reasons = self.reasons(key, part)
        shown = "; ".join(map(str, reasons[:_SHOWN]))
        more = f" and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
        why = f"the nearest entry differs in {shown}{more}" if reasons else "it has none like it"
        return f"{step_name(key, part)} is not in the cache {self.store.root}: {why}"

    def _refuse_if_frozen(self, key: StepKey, part: Part = "step") -> None:
        if self.frozen:
            raise CacheError(f"{self.miss(key, part)}; frozen, so nothing was built")

    def _build(self, fields: Fields, build: Build) -> CachedStep:
        directory = Path(tempfile.mkdtemp(dir=self._scratch.name))
        record = build(directory)
        (directory / RECORD).write_text(record.to_json())
        (directory / KEY).write_bytes(key_bytes(fields))
        try:
            entry = self.store.write(digest(fields), lambda into: _copy_files(directory, into))
        except CacheWriteError as error:
            self.note(f"not kept in the cache: {error}")
            return CachedStep(directory, record, None)
        shutil.rmtree(directory)
        return _read(entry)

    def note(self, line: str) -> None:
        """Say, and remember, that the cache could not serve or keep something."""
        self.notes[line] += 1
        self._tell(line)


def _read(entry: Entry) -> CachedStep:
    if RECORD not in entry.files:
        raise DamagedEntryError(f"{entry.directory} has no {RECORD}")
    return CachedStep(entry.directory, StepRecord.from_json(entry.read(RECORD)), entry)


def _read_entry(store: EntryStore, name: str) -> CachedStep | None:
    entry = store.read(name)
    return None if entry is None else _read(entry)


def _text(path: Path) -> str:
    """A file's text, unchecked; nothing where there is none."""
    return path.read_text(errors="replace") if path.is_file() else ""


def _copy_files(source: Path, target: Path) -> None:
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)


def reuse_package(step: CachedStep, directory: Path) -> None:
    """Copy a step's compiled package for another key that lowers to the same graph."""
    shutil.copyfile(step.directory / LIBRARY, directory / LIBRARY)
    if (step.directory / CALLS).exists():
        shutil.copyfile(step.directory / CALLS, directory / CALLS)


def program_pin(entries: Mapping[str, Entry]) -> str:
    """One digest of all entries that a program loads, by what each is for."""
    lines = [f"{name} {entry.pin}\n" for name, entry in sorted(entries.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()

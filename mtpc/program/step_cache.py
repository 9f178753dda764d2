"""The graph cache as the compiler uses it: steps by key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from mtpc.backends.base import Artifact
from mtpc.backends.package import TAPE, TapeArtifact
from mtpc.config import CompileOptions
from mtpc.declaration import declared
from mtpc.errors import CacheError, CacheWriteError, DamagedEntryError
from mtpc.layout import Layout, Part, StepKey
from mtpc.layout.open_sizes import BLOCKS, PAGES, SIZES, SLOTS, shared_sizes
from mtpc.plan import Plan
from mtpc.program.step_record import FORMAT, StepRecord
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.key import Fields, digest
from mtpc.store.lookup import find, keep
from mtpc.store.machine import environment_fields
from mtpc.weights.checkpoint import DRAFT

RECORD = "step.record.json"
CONSTANTS = "constants.safetensors"
CERTIFICATE = "step.certificate.json.gz"
"""File of a whole step: see `mtpc.certificate`."""
KIND = "step"
ANY = "any"
"""A key's value for an option that only decides sizes which the step leaves open."""
FIXED: tuple[frozenset[str], ...] = (frozenset(), frozenset((BLOCKS,)), frozenset(SIZES))
"""The sets of fixed sizes that keys distinguish. A step's key names the first set that contains all
sizes that the step fixes."""


def graph_file(index: int, name: str) -> str:
    """Name of the file with the graph's text after a pass, given its number and name."""
    return f"graph.{index:02d}-{name}.txt.gz"


Build = Callable[[], tuple[StepRecord, Artifact, Mapping[str, bytes]]]
"""Builds a step; returns its record, its artifact and all its files but the record, by name."""


@dataclass(frozen=True)
class CachedStep:
    """A built step.

    Attributes:
        record: how to bind it.
        artifact: what to open.
        entry: the checked entry of its files; None if no cache keeps them.
        plan: of the program that it is for.
        files: those that no cache keeps, by name.
    """

    record: StepRecord
    artifact: Artifact
    entry: Entry | None
    plan: Plan
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def read(self, name: str) -> bytes:
        """The bytes of one of its files."""
        return self.files[name] if self.entry is None else self.entry.read(name)

    @property
    def sizes(self) -> dict[str, int]:
        """The program's numbers for the sizes that the step leaves open."""
        return shared_sizes(self.plan)

    @property
    def layout(self) -> Layout:
        """The step's buffers at these sizes."""
        return self.record.layout(self.sizes)

    @property
    def fixed(self) -> frozenset[str]:
        """Names of the sizes that the step does not leave open."""
        return frozenset(self.record.package.fixed)


Steps = Mapping[tuple[StepKey, Part], CachedStep]
"""Built steps of one program, by step and part."""


KEYED = {name: said.key for name, said in declared(CompileOptions) if said.key is not None}
"""The options that steps depend on in more than sizes, each with its text in keys."""


def program_fields(backend: str, model: Fields, plan: Plan, part: str = "") -> dict[str, str]:
    """Key fields that all steps of a program share: backend, model, options, versions, machine.

    Args:
        backend: its name.
        model: fields of the model.
        plan: of the program.
        part: of which rank they are a part; "": the whole.
    """
    sizes_state = plan.images or _has_rings(model)  # Whether prefill rows size any state.
    # Whether angles depend on `max_len`; see `mtpc.models.rotary`.
    has_lengths = any(v == '"longrope"' for name, v in model.items() if name.endswith("type"))
    fields = {
        "kind": KIND,
        "format": str(FORMAT),
        "backend": backend,
        **model,
        **{f"options.{name}": text(getattr(plan, name)) or "none" for name, text in KEYED.items()},
        "options.angles": str(plan.max_len) if has_lengths else "none",
        "options.rows_in_rings": str(plan.prefill_chunk) if sizes_state else "none",
        **environment_fields(),
    }
    return {**fields, "options.tensor_parallel_size": part} if part else fields


def size_fields(plan: Plan, fixed: Collection[str]) -> dict[str, str]:
    """Key fields of the options that decide open sizes, for a step that fixes some of the sizes."""
    given = {
        "options.max_len": (plan.max_len, BLOCKS),
        "options.num_pages": (plan.num_pages, PAGES),
        "options.largest_bucket": (max(plan.batch_buckets), SLOTS),
    }
    # The number of pages follows from all three options.
    return {
        field: str(number) if size in fixed or PAGES in fixed else ANY
        for field, (number, size) in given.items()
    }


def _has_rings(model: Fields) -> bool:
    """Whether layers may keep rings of a sliding window. A prefill step's rows size them."""
    entries = {
        name.rpartition(".")[2]: value
        for name, value in model.items()
        if not name.startswith(DRAFT)  # A drafter in a checkpoint of its own has pages.
    }
    if entries.get("use_sliding_window") == "false":
        return False
    return any(
        name.startswith("sliding_window") and value not in ("null", "0")
        for name, value in entries.items()
    )


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


class OwnSteps:
    """Steps that no cache keeps: only this process has them.

    Args:
        plan: of the program.

    Attributes:
        notes: lines that say why a cache could not serve or keep a step -> count; part of
            `Stats.fallbacks`.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.notes: Counter[str] = Counter()

    def find(self, key: StepKey, part: Part = "step") -> CachedStep | None:
        """The step, if it is kept."""
        return None

    def lacks(self, key: StepKey, part: Part = "step") -> bool:
        """Whether a step is still to be built."""
        return True

    def obtain(self, key: StepKey, build: Build, part: Part = "step") -> CachedStep:
        """Build the step."""
        record, artifact, files = build()
        return CachedStep(record, artifact, None, self._plan(record), files)

    def _plan(self, record: StepRecord) -> Plan:
        return self.plan.of_model(record.max_positions)


class StepCache(OwnSteps):
    """The entries of one program in the graph cache.

    Args:
        store: where the entries are.
        program: the result of `program_fields`.
        plan: of the program.
        tell: is called with a line when the cache waits, or finds a damaged entry.
    """

    def __init__(
        self,
        store: EntryStore,
        program: Fields,
        plan: Plan,
        tell: Callable[[str], None] = lambda line: None,
    ):
        super().__init__(plan)
        self.store, self.program = store, program
        self._tell, self._told_miss = tell, ""

    def find(self, key: StepKey, part: Part = "step") -> CachedStep | None:
        """The step, or None if the cache lacks it. A damaged entry is noted and counts as missing.

        Raises:
            CacheError: another user could have written the cache; or the entry is damaged and the
                cache is frozen.
        """
        try:
            return self._look_up(key, part)
        except DamagedEntryError as error:
            if self.plan.frozen:
                raise
            self.note(f"a damaged cache entry was not used: {error}")
            return None

    def lacks(self, key: StepKey, part: Part = "step") -> bool:
        """Whether there is no entry of a step; one that is there may be damaged."""
        keys = (digest(self.fields(key, part, fixed)) for fixed in FIXED)
        return not any(self.store.directory(name).exists() for name in keys)

    def find_all(self, wanted: Iterable[tuple[StepKey, Part]]) -> Steps | None:
        """All the graphs, or None where one is missing.

        Raises:
            CacheError: as `find`; or a step is missing and the cache is frozen.
        """
        found: dict[tuple[StepKey, Part], CachedStep] = {}
        for key, part in wanted:
            step = self.find(key, part)
            if step is None:
                self._refuse_if_frozen(key, part)
                from mtpc.program.forecast import miss  # Not above: a warm start lacks nothing.

                if (why := miss(self, key, part)) != self._told_miss:
                    self._tell(why)
                self._told_miss = why
                return None
            found[key, part] = step
        return found

    def obtain(self, key: StepKey, build: Build, part: Part = "step") -> CachedStep:
        """The step from the cache; if it is missing, build it and keep it there.

        If another process builds it, wait for that process.

        Raises:
            CacheError: another user could have written the cache; or the step is missing and the
                cache is frozen.
        """
        found = self.find(key, part)
        if found is not None:
            return found
        self._refuse_if_frozen(key, part)
        with ExitStack() as held:
            try:
                name = digest(self.fields(key, part))
                held.enter_context(self.store.lock(name, self._tell))
            except CacheWriteError as error:
                self.note(f"not kept in the cache: {error}")
            # Another process may have built it while this one waited for the lock.
            with suppress(DamagedEntryError):  # `find` has noted the damage.
                found = self._look_up(key, part)
            return found or self._build(key, part, build)

    def fields(
        self, key: StepKey, part: Part = "step", fixed: Collection[str] = ()
    ) -> dict[str, str]:
        """The key of a step that fixes some sizes; by default it leaves all open."""
        return {**step_fields(self.program, key, part), **size_fields(self.plan, fixed)}

    def _look_up(self, key: StepKey, part: Part) -> CachedStep | None:
        """A step for the program's sizes: one that leaves them open, or one that fixes these."""
        for fixed in FIXED:
            entry = find(self.store, self.fields(key, part, fixed))
            if entry is None:
                continue
            step = self._read(entry)
            if (step.record.step, step.record.part) != (key, part) or not step.fixed <= fixed:
                raise DamagedEntryError(
                    f"{entry.directory}: {RECORD} is that of {step.record.name}, for "
                    f"{step.record.package.fixed or 'any sizes'}"
                )
            if step.record.package.refusal(step.sizes) is None:
                return step
        return None

    def _read(self, entry: Entry) -> CachedStep:
        if RECORD not in entry.files:
            raise DamagedEntryError(f"{entry.directory} has no {RECORD}")
        record = read_record(entry)
        artifact = TapeArtifact(record.package, entry.directory / TAPE)
        return CachedStep(record, artifact, entry, self._plan(record))

    def _refuse_if_frozen(self, key: StepKey, part: Part) -> None:
        if self.plan.frozen:
            from mtpc.program.forecast import miss

            raise CacheError(
                f"{miss(self, key, part)}; frozen, so nothing was built: run `mtpc build` with the "
                "same options first"
            )

    def _build(self, key: StepKey, part: Part, build: Build) -> CachedStep:
        step = super().obtain(key, build, part)
        own = frozenset(step.record.package.fixed)
        fields = self.fields(key, part, next(fixed for fixed in FIXED if own <= fixed))
        files = {**step.files, RECORD: step.record.to_json().encode()}
        try:
            return self._read(keep(self.store, fields, files))
        except CacheWriteError as error:
            self.note(f"not kept in the cache: {error}")
            return step

    def note(self, line: str) -> None:
        """Report and count that the cache could not serve or keep something."""
        self.notes[line] += 1
        self._tell(line)


def read_record(entry: Entry) -> StepRecord:
    """The record of an entry, which has one.

    Raises:
        DamagedEntryError: it is no record, whatever its checksum says.
    """
    data = entry.read(RECORD)
    try:
        return StepRecord.from_json(data)
    except Exception as error:
        raise DamagedEntryError(
            f"{entry.directory}: {RECORD} is not a record as mtpc writes it: "
            f"{type(error).__name__}: {error}"
        ) from error

"""Binding cached steps to tensors; all steps of a program share state and weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from safetensors.torch import load
from torch import Tensor

from mtpc.backends.package import signature_bytes
from mtpc.capture.graph import WeightTable, is_buffer_name
from mtpc.layout import StepKey
from mtpc.layout.progress import Listener, Progress, left_at
from mtpc.program.processes import free_bytes
from mtpc.program.program import CapturedStep, CostEntry, Program, allocate_results
from mtpc.program.step_cache import CONSTANTS, CachedStep, Steps
from mtpc.program.step_record import StepRecord
from mtpc.weights.checkpoint import Checkpoint, is_finite, refuse_not_finite
from mtpc.weights.grouped import GroupedWeight, Runs
from mtpc.weights.grouped_recipes import GroupedRows, GroupSpec, take_rows
from mtpc.weights.packing import TILE, Fill, SharedPages, allocate_packed, count_tiles
from mtpc.weights.quantise import quantised_rows
from mtpc.weights.read_ahead import ReadAhead, Span
from mtpc.weights.recipes import (
    Grouped,
    GroupedMaker,
    Packed,
    Recipe,
    Rows,
    make,
    names,
    packs_all,
    parts_read,
    rename_read,
    substitute,
    take,
    take_early,
)

_TELL_S = 0.5
"""Seconds between two reports while weights are read."""
_AHEAD_BYTES = 1 << 29
"""Bytes of weights to read ahead of packing, if as much memory is free."""
_IN_MAP_BYTES = 2 << 20
"""A weight of at least this size that steps read as it is stored stays in the file's memory map,
which the system can drop."""
_FIRST_ROWS = 16
"""Rows of two embeddings or heads to compare first: unequal ones nearly always differ there."""


class Explains(Protocol):
    """How weights are made of a checkpoint's tensors; the attributes are those of `StepRecord`."""

    @property
    def derived(self) -> Mapping[str, Recipe]: ...
    @property
    def stored(self) -> Mapping[str, Recipe]: ...
    @property
    def dtypes(self) -> Mapping[str, str]: ...
    @property
    def ends(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class BuiltSteps:
    """Steps that are built, and what they are bound to.

    Attributes:
        steps: by step and part, the largest first.
        weights: the program's weights; binding adds those that it reads or makes.
        source: where to read weights that the table lacks; None if it lacks none.
        shared: tensors of state and caches; None if a program has to make its own.
        meet: called before a step runs for the first time: ranks compile at their own pace.
    """

    steps: Steps
    weights: WeightTable
    source: WeightSource | None = None
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
        weights.settle()
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
            if name not in buffers and name not in weights:
                self._add_weight(name, step)
                self.added(name)
            return buffers[name] if name in buffers else weights[name]

        opened = step.artifact.open(tensor_of, step.sizes, self._begin)
        seconds = time.perf_counter() - start
        return CapturedStep(step.record.step, layout, buffers, opened.run, seconds, opened.graph)

    def _begin(self, stage: str) -> None:
        if stage == "capture":
            self.built.meet()
        self.begin(stage)

    def _add_weight(self, name: str, step: CachedStep) -> None:
        """Add a weight that a step reads: from the checkpoint, by a recipe, or a constant."""
        record, weights, source = step.record, self.built.weights, self.built.source
        if source is not None and _stored_recipe(name, record) is not None:
            weights.bind(name, source.weight(name, record))
        elif name in record.derived:
            weights.derive(name, record.derived[name])
        else:
            weights.bind(name, load(step.read(CONSTANTS))[name])


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
    steps, weights, source, shared = built.steps, built.weights, built.source, built.shared
    layout = next(iter(steps.values())).layout
    if shared is None:
        shared = {name: layout.allocate(name) for name, spec in layout.items() if spec.shared}
    loading = _Loading(steps, weights, listener)
    binder = StepBinder(built, shared, loading.added, loading.begin)
    bound = {}
    needed = loading.total + sum(tensor.nbytes for tensor in shared.values())
    with source.reading_ahead(steps, weights, needed) if source else nullcontext():
        for done, ((key, _), step) in enumerate(steps.items()):
            loading.begins(key, done)
            bound[key] = binder.bind(step)
    return Program(bound, shared, identity=identity, costs=costs)


class _Loading:
    """Says which step is bound, and from time to time how much of all weights is there."""

    def __init__(self, steps: Steps, weights: WeightTable, listener: Listener):
        self._listener, self._start = listener, time.perf_counter()
        self._sizes = {
            name: signature_bytes(signature)
            for step in steps.values()
            for name, signature in step.record.package.tensors.items()
            if not is_buffer_name(name) and name not in weights
        }
        self.total, self._there, self._steps = sum(self._sizes.values()), 0, len(steps)
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


class WeightSource:
    """Makes the weights of steps from the tensors of a checkpoint.

    It packs and joins weights straight from the mapped files. So plain weights that no step reads
    are never in memory, and of a tensor of which a rank has some rows, these alone are read. An
    embedding or a head that a checkpoint stores once more for its MTP layers is made once.

    Args:
        checkpoint: holds the tensors.
        fill: packs a weight.
    """

    def __init__(self, checkpoint: Checkpoint, fill: Fill):
        self._checkpoint, self._fill, self._pages = checkpoint, fill, SharedPages()
        self._finite: dict[str | Rows, bool] = {}
        self._maker, self._dtypes = GroupedMaker(self._grouped, fill), dict[str, torch.dtype]()
        # Weights that were dequantised for tracing are gone, and notes must not count them.
        checkpoint.dequantised.clear()
        self._copies: dict[str, str] = {}
        self._shared: dict[Hashable, Tensor] = {}

    @contextmanager
    def reading_ahead(self, steps: Steps, weights: WeightTable, needed: int) -> Iterator[None]:
        """Within the block, a thread reads the next weights while one is packed.

        Args:
            steps: what will be bound, in this order.
            weights: those that exist.
            needed: bytes of memory that all weights and buffers will take.
        """
        free = free_bytes()
        if free is None or 2 * self._checkpoint.nbytes <= free:
            yield  # The page cache can keep the files. Memory maps are faster then.
            return
        room, wanted = max(0, free - needed) // 2, self._wanted(steps, weights)
        with self._checkpoint.reading_ahead(ReadAhead(wanted, min(_AHEAD_BYTES, room), room)):
            yield

    def _wanted(self, steps: Steps, weights: WeightTable) -> Iterator[Span]:
        """Spans of the tensors that are read whole, in the order of use."""
        records: dict[str, StepRecord] = {}
        for record in (step.record for step in steps.values()):
            for name in record.package.tensors:
                if not is_buffer_name(name) and name not in weights:
                    records.setdefault(name, record)  # It is made once, for the first step.
        for name, record in records.items():
            stored = _stored_recipe(name, record)
            if stored is None:
                continue
            whole = self._read_in_pieces(stored, _dtypes(record, name))
            if whole is not None:
                yield from self._checkpoint.piece_spans(whole)
                continue
            for part in parts_read(take_early(stored, self._checkpoint.meta_tensor)):
                yield from self._checkpoint.spans(part) if isinstance(part, str) else ()

    def weight(self, name: str, record: Explains) -> Tensor:
        """Make a weight by the recipes of a record."""
        made_of, dtypes = self.made_of(name, record)
        if self._copies.keys().isdisjoint(dtypes):
            return self._make(made_of, dtypes)
        key = (made_of, *dtypes.items())
        if key not in self._shared:
            self._shared[key] = self._make(made_of, dtypes)
        return self._shared[key]

    def made_of(self, name: str, record: Explains) -> tuple[Recipe, dict[str, torch.dtype]]:
        """A weight's recipe over stored tensors, and their dtypes; equal ends have the same one."""
        recipe = record.derived.get(name, name)
        for part in sorted(set(names(recipe)).intersection(record.ends)):
            for stored in names(record.stored[part]):
                self._find_copy(stored)
        dtypes = {self._first_copy(n): dtype for n, dtype in _dtypes(record, name).items()}
        stored_recipe = _stored_recipe(name, record)
        assert stored_recipe is not None
        return substitute(stored_recipe, self._first_copy), dtypes

    def _make(self, recipe: Recipe, dtypes: Mapping[str, torch.dtype]) -> Tensor:
        whole = self._read_in_pieces(recipe, dtypes)
        if isinstance(recipe, Grouped):
            self._dtypes |= dtypes
            early = take_early(recipe, self._checkpoint.meta_tensor)
            assert isinstance(early, Grouped)
            made = self._maker.make(early)
        elif whole is None:
            made = self._make_plain(take_early(recipe, self._checkpoint.meta_tensor), dtypes)
        elif isinstance(recipe, Packed):
            made = self._pack_in_pieces(whole, dtypes[whole])
        else:
            if whole not in self._finite:
                self._finite[whole] = all([*map(is_finite, self._checkpoint.pieces(whole))])
            made = self._checkpoint.tensor(whole)
        # The tensors that a weight was made of are not needed again. Of an embedding, steps read a
        # few rows.
        for name in dtypes:
            self._checkpoint.release(name)
        return self._pages.take(made)

    def _make_plain(self, recipe: Recipe, dtypes: Mapping[str, torch.dtype]) -> Tensor:
        """Make a weight that is not grouped, and check what it is made of."""
        packs, finite = packs_all(recipe), torch.ones(1, dtype=torch.bool)
        parts = {str(part): self._part(part, dtypes) for part in parts_read(recipe)}
        if not packs:
            self._look(recipe, parts)
        fill = partial(self._fill, finite=finite)
        made = make(rename_read(recipe, str), parts.__getitem__, fill).contiguous()
        if packs and not finite:
            self._look(recipe, parts)
        return made

    def _part(self, part: str | Rows, dtypes: Mapping[str, torch.dtype]) -> Tensor:
        """A stored tensor or rows of one, cast: in the mapped file where it is plain, or a copy.

        No more than these rows stays in memory, and no more is cast.
        """
        (name,) = names(part)
        if isinstance(part, str):
            return self._read(name, dtypes[name])
        rows = take(part, self._checkpoint.tensor(name)).to(dtypes[name])
        return rows if self._checkpoint.is_plain(name) else rows.clone()

    def _read_in_pieces(self, recipe: Recipe, dtypes: Mapping[str, torch.dtype]) -> str | None:
        """The weight that a recipe packs, or that steps read from its file's memory map."""
        name = recipe.part if isinstance(recipe, Packed) else recipe
        if not isinstance(name, str) or not self._checkpoint.is_plain(name):
            return None
        stored = self._checkpoint.meta_tensor(name)
        if isinstance(recipe, Packed):
            return name if stored.dim() == 2 else None
        is_as_stored = dtypes[name] == stored.dtype and stored.nbytes >= _IN_MAP_BYTES
        return name if is_as_stored else None

    def _pack_in_pieces(self, name: str, dtype: torch.dtype) -> Tensor:
        """A packed weight, of which some rows at a time are in memory as they are stored."""
        packed = allocate_packed(self._checkpoint.meta_tensor(name).shape, dtype)
        begin, finite = 0, torch.ones(1, dtype=torch.bool)
        for rows in self._checkpoint.pieces(name):
            end = begin + len(rows)
            self._fill(rows.to(dtype), packed[begin // TILE : count_tiles(end)], finite)
            begin = end
        self._finite[name] = self._finite.get(name, True) and bool(finite)
        return packed

    def _grouped(self, name: str, spec: GroupSpec) -> GroupedRows:
        """A weight as codes of this form: as it is stored, or else rounded."""
        if spec.is_of(self._checkpoint.specs.get(name)):
            return self._looked_at(name, self._checkpoint.grouped(name))
        plain = self._read(name, self._dtypes[name])
        return self._looked_at(name, quantised_rows(plain, spec))

    def _looked_at(self, name: str, rows: GroupedRows) -> GroupedRows:
        """Rows whose scales are checked as they are read; infinite weights show there."""
        some = Rows((), name)  # Never all of the tensor, which other weights may need.

        def read(start: int, stop: int) -> GroupedWeight:
            part = rows.read(start, stop)
            is_sound = all(map(is_finite, part.numbers))
            self._finite[some] = self._finite.get(some, True) and is_sound
            return part

        def take(runs: Runs, dim: int) -> GroupedRows:
            return self._looked_at(name, take_rows(rows, runs, dim))

        return GroupedRows(rows.shape, read, take)

    def _first_copy(self, name: str) -> str:
        """The first of equal embeddings or heads; for any other tensor, its own name."""
        return self._copies.get(name, name)

    def _find_copy(self, name: str) -> None:
        """Find an equal embedding or head among those that were used so far."""
        if name in self._copies:
            return
        firsts = dict.fromkeys(self._copies.values())
        self._copies[name] = next((first for first in firsts if self._is_copy(name, first)), name)
        if self._copies[name] != name:
            self._checkpoint.release(name)

    def _is_copy(self, name: str, other: str) -> bool:
        """Whether two weights are stored as equal tensors; codes are compared, not their values."""
        checkpoint = self._checkpoint
        headers, specs = checkpoint.tensors, checkpoint.specs
        if headers[name].shape != headers[other].shape or specs.get(name) != specs.get(other):
            return False
        ours, theirs = checkpoint.parts_of(name), checkpoint.parts_of(other)
        return len(ours) == len(theirs) and all(
            self._is_equal(one, two) for one, two in zip(ours, theirs, strict=True)
        )

    def _is_equal(self, one: str, two: str) -> bool:
        """Whether two tensors of the files have the same dtype and values."""
        ours, theirs = self._checkpoint.read(one), self._checkpoint.read(two)
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return False
        if ours.dim() and not torch.equal(ours[:_FIRST_ROWS], theirs[:_FIRST_ROWS]):
            return False
        pieces = zip(self._checkpoint.pieces(one), self._checkpoint.pieces(two), strict=True)
        return all(torch.equal(*pair) for pair in pieces)

    def check(self) -> None:
        """Check the tensors that were read so far: all of them, once the steps are bound.

        Raises:
            CheckpointError: tensors hold NaN or infinity.
        """
        bad = {next(names(part)): None for part, finite in self._finite.items() if not finite}
        refuse_not_finite([*bad], str(self._checkpoint.directory))

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._checkpoint.tensor(name).to(dtype)

    def _look(self, recipe: Recipe, parts: Mapping[str, Tensor]) -> None:
        """Check the values that a recipe reads, except those that were checked before."""
        for part in parts_read(recipe):
            if part not in self._finite:
                self._finite[part] = is_finite(parts[str(part)])


def _stored_recipe(name: str, record: Explains) -> Recipe | None:
    """How a weight of a step is made from tensors of the checkpoint; None if it is not."""
    recipe = record.derived.get(name, name)
    if any(part not in record.stored for part in names(recipe)):
        return None
    return substitute(recipe, record.stored.__getitem__)


def _dtypes(record: Explains, name: str) -> dict[str, torch.dtype]:
    """The stored tensors that a weight is made of, and the dtypes that they are read in."""
    return {
        stored: getattr(torch, record.dtypes[part])
        for part in names(record.derived.get(name, name))
        for stored in names(record.stored[part])
    }

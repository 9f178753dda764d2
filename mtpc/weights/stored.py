"""A model's weights in the files of its checkpoint: made by recipes, and checked as they are read.

Weights are packed and joined straight from the mapped files. So plain weights that no step reads
are never in memory, and of a tensor of which a rank has some rows, these alone are read. An
embedding or a head that a checkpoint stores once more for its MTP layers is made once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtpc.weights.checkpoint import Checkpoint, is_finite, refuse_not_finite
from mtpc.weights.packing import (
    TILE,
    Fill,
    FillBlocks,
    Packer,
    SharedPages,
    count_tiles,
    fill_packed,
)
from mtpc.weights.recipes import (
    Cast,
    Grouped,
    Packed,
    Recipe,
    Rows,
    allocate,
    cast,
    make_all,
    names,
    parts_read,
    spec_of,
    substitute,
    take,
    take_early,
    takes_all,
)
from mtpc.weights.tensor_file import Span

if TYPE_CHECKING:
    from mtpc.weights.grouped_recipes import GroupedRows, GroupSpec, SomeRows

_AHEAD_BYTES = 1 << 29
"""Bytes of weights to read ahead of packing, if as much memory is free."""
_IN_MAP_BYTES = 2 << 20
"""A weight of at least this size that steps read as it is stored stays in the file's memory map,
which the system can drop."""
_FIRST_ROWS = 16
"""Rows of two embeddings or heads to compare first: unequal ones nearly always differ there."""


class StoredWeights:
    """The weights of a model that its checkpoint explains: by name recipes over its tensors.

    It may store copies of those in `ends`, embeddings and heads. `fill` packs a weight, and
    `fill_blocks` rows as a file has them; None if they are decoded first. `pages` are memory for
    what is made.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipes: Mapping[str, Recipe],
        ends: Iterable[str] = (),
        fill: Fill = fill_packed,
        fill_blocks: FillBlocks | None = None,
        pages: SharedPages | None = None,
    ):
        self._checkpoint, self._pages = checkpoint, pages or SharedPages()
        self._packer = Packer(fill, fill_blocks, self._pages.allocate)
        self._recipes, self._ends = dict(recipes), set(ends)
        self._finite: dict[Recipe, bool] = {}
        self._copies: dict[str, str] = {}

    def know(self, recipes: Mapping[str, Recipe], ends: Iterable[str]) -> None:
        self._recipes |= recipes
        self._ends.update(ends)

    def has(self, recipe: Recipe) -> bool:
        """Whether a recipe over weights uses none but these."""
        return all(name in self._recipes for name in names(recipe))

    @property
    def specs(self) -> dict[str, GroupSpec]:
        """The weights that are stored in groups; from headers alone."""
        stored = self._checkpoint.specs
        found = {name: spec_of(recipe, stored) for name, recipe in self._recipes.items()}
        return {name: spec for name, spec in found.items() if spec is not None}

    def over_tensors(self, recipe: Recipe) -> Recipe:
        """A recipe over weights as one over stored tensors; equal ends have the same one."""
        for end in sorted(self._ends.intersection(names(recipe))):
            for name in names(self._recipes[end]):
                self._find_copy(name)
        stored = substitute(recipe, self._recipes.__getitem__)
        return substitute(stored, lambda name: self._copies.get(name, name))

    def make(self, recipe: Recipe) -> dict[Recipe, Tensor]:
        """The tensor of a recipe over stored tensors, in the host's memory or the mapped files; see
        `make_all`."""
        whole = self._read_in_pieces(recipe)
        if whole is None:
            found = self._make(recipe)
        elif isinstance(recipe, Packed):
            # Some rows at a time are in memory as they are stored.
            packed = allocate(recipe, self._checkpoint.meta_tensor, self._packer.allocate)
            begin, finite = 0, torch.ones(1, dtype=torch.bool)
            for rows in self._checkpoint.pieces(whole):
                end = begin + len(rows)
                self._packer.fill(
                    rows.to(packed.dtype), packed[begin // TILE : count_tiles(end)], finite
                )
                begin = end
            self._finite[whole] = self._finite.get(whole, True) and bool(finite)
            found = {recipe: packed}
        else:
            if whole not in self._finite:
                self._finite[whole] = all([*map(is_finite, self._checkpoint.pieces(whole))])
            found = {recipe: self._checkpoint.tensor(whole)}
        # The tensors that a weight was made of are not needed again. Of an embedding, steps read a
        # few rows.
        for name in names(recipe):
            self._checkpoint.release(name)
        if isinstance(recipe, (Packed, Grouped)):
            return found
        return {each: self._pages.take(tensor.contiguous()) for each, tensor in found.items()}

    def _make(self, recipe: Recipe) -> dict[Recipe, Tensor]:
        """Make a weight, and check the values that it reads. What packs all of them sees them."""
        if isinstance(recipe, Grouped):
            return make_all(recipe, _Files(self._checkpoint, self._finite, False), self._packer)
        early, finite = take_early(recipe, self._checkpoint.meta_tensor), torch.ones(1).bool()
        packs = isinstance(early, Packed) and takes_all(early.part)
        files = _Files(self._checkpoint, self._finite, not packs)
        fill = partial(self._packer.fill, finite=finite)
        made = make_all(recipe, files, replace(self._packer, fill=fill))
        if not finite:
            for part in parts_read(early):
                files.look(part, files.read(part))
        return made

    def _read_in_pieces(self, recipe: Recipe) -> str | None:
        """The tensor that a recipe packs, or that steps read from its file's memory map."""
        if isinstance(recipe, Packed):
            held = recipe.part.part if isinstance(recipe.part, Cast) else recipe.part
        else:
            held = recipe
        if not isinstance(held, str) or not self._checkpoint.is_plain(held):
            return None
        stored = self._checkpoint.meta_tensor(held)
        may_be = stored.dim() == 2 if held is not recipe else stored.nbytes >= _IN_MAP_BYTES
        return held if may_be else None

    def check(self) -> None:
        """Check the tensors that were read so far: all of them, once the steps are bound. Memory
        that they did not need is given back.

        Raises:
            CheckpointError: tensors hold NaN or infinity.
        """
        self._pages.give_back()
        bad = {next(names(part)): None for part, finite in self._finite.items() if not finite}
        refuse_not_finite([*bad], str(self._checkpoint.directory))

    @contextmanager
    def reading_ahead(
        self, recipes: Iterable[Recipe], free: int | None, need: int
    ) -> Iterator[None]:
        """Within the block, a thread reads the next weights, made in the order of these recipes,
        while one is packed. `free` are bytes of free memory, None if the system does not say; all
        weights and buffers will take `need` bytes."""
        if free is None or 2 * self._checkpoint.nbytes <= free:
            yield  # The page cache can keep the files. Memory maps are faster then.
            return
        from mtpc.weights.read_ahead import ReadAhead  # Not above: few starts need it.

        room, spans = max(0, free - need) // 2, self._spans(recipes)
        with self._checkpoint.reading_ahead(ReadAhead(spans, min(_AHEAD_BYTES, room), room)):
            yield

    def _spans(self, recipes: Iterable[Recipe]) -> Iterator[Span]:
        """Spans of the tensors that are read whole, in the order of use."""
        for recipe in filter(self.has, recipes):
            stored = substitute(recipe, self._recipes.__getitem__)
            whole = self._read_in_pieces(stored)
            if whole is not None:
                yield from self._checkpoint.piece_spans(whole)
                continue
            for part in parts_read(take_early(stored, self._checkpoint.meta_tensor)):
                is_whole = not isinstance(part, Rows)
                yield from self._checkpoint.spans(next(names(part))) if is_whole else ()

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


@dataclass(frozen=True)
class _Files:
    """The tensors of a checkpoint, as a `Source`. If it `checks` what it reads, it notes in
    `finite` whether all values are."""

    checkpoint: Checkpoint
    finite: dict[Recipe, bool]
    checks: bool

    def form(self, name: str) -> Tensor:
        return self.checkpoint.meta_tensor(name)

    def read(self, part: Recipe) -> Tensor:
        """A tensor or rows of one, cast: in the mapped file where it is plain, or a copy.

        No more than these rows stays in memory, and no more is cast.
        """
        (name,) = names(part)
        tensor = self.checkpoint.tensor(name)
        if not isinstance(part, Rows):
            tensor = cast(tensor, part)
        elif self.checkpoint.is_plain(name):
            tensor = cast(take(part, tensor), part.part)
        else:
            tensor = cast(take(part, tensor), part.part).clone()
        if self.checks:
            self.look(part, tensor)
        return tensor

    def look(self, part: Recipe, tensor: Tensor) -> None:
        """Check values, but for those that were checked before."""
        if part not in self.finite:
            self.finite[part] = is_finite(tensor)

    def codes(self, part: Recipe, spec: GroupSpec) -> GroupedRows:
        """A weight as codes of this form: as it is stored, or else rounded."""
        (name,) = names(part)
        if spec.is_of(self.checkpoint.specs.get(name)):
            return self._looked_at(name, self.checkpoint.grouped(name))
        from mtpc.weights.quantise import quantised_rows  # Few starts round weights.

        return self._looked_at(name, quantised_rows(self.read(part), spec))

    def _looked_at(self, name: str, rows: GroupedRows) -> GroupedRows:
        """Rows whose scales are checked as they are read; infinite weights show there."""
        from mtpc.weights.grouped_recipes import seen_rows  # Not above: many weights are plain.

        some = Rows((), name)  # Never all of the tensor, which other weights may need.

        def see(part: SomeRows) -> None:
            is_sound = all(map(is_finite, part.numbers))
            self.finite[some] = self.finite.get(some, True) and is_sound

        return seen_rows(rows, see)

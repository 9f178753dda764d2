"""Snapshots: copies of the state that a request keeps by request slot, taken at page ends.

A page holds a text's KV. Recurrent state, rings of sliding windows and compressed entries are rows
of a request slot (`layout.slot_state`). A request can reuse the beginning of another one only where
a snapshot of these rows stands for exactly that beginning.

The rows after a step are right for the committed length L that the step ends with, whatever drafts
it rejected: places and roll-back are a matter of position (docs/design.md). So a snapshot is exact
if it is taken between two steps and L is the page's end.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtpc.engine.pages import PagePool
from mtpc.engine.prefix import PrefixCache, PrefixIndex, SnapshotIndex
from mtpc.engine.request import Request
from mtpc.engine.scheduler import Turn
from mtpc.engine.stats import Stats
from mtpc.errors import OptionError
from mtpc.layout.slot_state import rows_of_slot, slot_state, snapshot_count, snapshot_nbytes
from mtpc.plan import Plan
from mtpc.program.program import Program
from mtpc.weights.packing import allocate

if TYPE_CHECKING:
    from mtpc.engine.offload import Offload


class SlotStates:
    """The memory of snapshots, and copies between it and the rows of request slots.

    A snapshot is one copy per buffer on the device's current stream, behind the steps that are
    launched already. No captured graph takes part.

    `names` are the buffers with such state: without any, all of a request's past is in pages. One
    snapshot has `nbytes` bytes, and `count` is their number.
    """

    def __init__(self, program: Program, options: Plan):
        layout = program.layout
        self.names, self.nbytes = slot_state(layout), snapshot_nbytes(layout)
        self.count, self._options = snapshot_count(layout, options), options
        self.prefixes: PrefixCache | None = None
        self._pairs = [
            _pair(name, program.shared[name], program.max_reqs + 1, self.count)
            for name in (self.names if self.count else ())
        ]
        self._copy, self._program = program.copy, program
        program.snapshots += [snapshots for _, snapshots in self._pairs]

    def open_prefixes(self, index: PrefixIndex, fallbacks: Counter[str]) -> PrefixCache | None:
        """Make the prefix cache; None if it is off or, which `fallbacks` counts, lacks memory for
        snapshots."""
        options = self._options
        if not options.prefix_caching:
            return None
        if self.names and not self.count:
            given = f"no prefix reuse: snapshot_bytes is {options.snapshot_bytes}"
            fallbacks[f"{given}, and one snapshot takes {self.nbytes}"] += 1
            return None
        distance = options.snapshot_distance if self.names else 0
        size, lookahead = options.page_size, options.spec_tokens
        offload = self._open_offload(fallbacks)
        self.prefixes = PrefixCache(index, size, lookahead, distance, offload)
        return self.prefixes

    def _open_offload(self, fallbacks: Counter[str]) -> Offload | None:
        options, program = self._options, self._program
        if not options.kv_offload_dir:
            return None
        if not program.identity:
            raise OptionError(
                f"kv_offload_dir is {options.kv_offload_dir} for a program of unknown weights; "
                "expected mtpc.compile with a checkpoint's directory"
            )
        # Imported here: few programs have files.
        from mtpc.engine.offload import Offload
        from mtpc.engine.offload_files import OffloadDirectory

        pages = {n: program.shared[n] for n, spec in program.layout.items() if spec.is_paged}
        pairs = zip(self.names, self._pairs, strict=True)
        return Offload(
            OffloadDirectory(Path(options.kv_offload_dir), options.kv_offload_bytes),
            pages,
            {name: (snapshots, slots) for name, (slots, snapshots) in pairs},
            options.page_size,
            options.spec_tokens,
            program.identity,
            fallbacks,
        )

    def save(self, pages: PagePool) -> None:
        """Write what the pool's index knows to the files, if there are any."""
        if self.prefixes is not None:
            self.prefixes.save(pages.known)

    def forget(self, pages: PagePool) -> None:
        """Forget what all pages hold, and use the files no more: the weights have changed."""
        pages.forget_all()
        if self.prefixes is not None:
            self.prefixes.offload = None

    def save_prompts(self, turn: Turn) -> None:
        """Take snapshots of the prompts that a launched step brings to a chosen length."""
        if self.prefixes is None:
            return
        for request in turn.prompts:
            end = request.num_prefilled
            if self.prefixes.next_snapshot(request, end - 1) == end:
                self._save(request, end, self.prefixes.index.snapshots)

    def save_decoded(self, request: Request) -> None:
        """Take a snapshot of a request if the step that was just read has ended at a page's end.

        With `async_scheduling` the next step has moved the state on already.
        """
        prefixes, end = self.prefixes, request.num_committed
        if prefixes is None or not prefixes.distance or self._options.async_scheduling:
            return
        if end % prefixes.page_size == 0:
            self._save(request, end, prefixes.index.snapshots)

    def restore(self, request: Request) -> None:
        """Write the snapshot that a placed request begins with into its slot."""
        assert request.slot is not None
        if request.restored is not None:
            for slots, snapshots in self._pairs:
                self._copy(slots[request.slot - 1], snapshots[request.restored])

    def _save(self, request: Request, length: int, index: SnapshotIndex) -> None:
        """Take a snapshot of a request's slot, whose rows stand for `length` tokens now."""
        assert request.slot is not None
        snapshot = index.take()
        if snapshot is None:
            return
        request.snapshots[length] = snapshot
        for slots, snapshots in self._pairs:
            self._copy(snapshots[snapshot], slots[request.slot - 1])

    def describe(self, stats: Stats, index: PrefixIndex) -> None:
        snapshots = index.snapshots
        stats.num_snapshots, stats.snapshots_used = snapshots.count, snapshots.num_used
        stats.snapshot_bytes = snapshots.num_used * self.nbytes
        stats.snapshot_evictions = snapshots.num_evicted
        if self.prefixes is not None and self.prefixes.offload is not None:
            files = self.prefixes.offload
            stats.offload_saved, stats.offload_loaded = files.num_saved, files.num_loaded
            stats.offload_bytes = files.directory.nbytes
            stats.offload_evictions = files.directory.num_evicted


def _pair(name: str, buffer: Tensor, num_slots: int, count: int) -> tuple[Tensor, Tensor]:
    """A buffer by request slot, without the scratch slot, and the memory of its snapshots.

    Shapes [num_slots - 1, n, ...] and [count, n, ...], where a request slot has n rows.
    """
    rows = rows_of_slot(name, buffer.shape[0], num_slots)
    slots = buffer[1:].unflatten(0, (num_slots - 1, rows))
    shape = (count, *slots.shape[1:])
    if buffer.device.type == "cpu":  # Memory that no snapshot has touched costs nothing.
        return slots, allocate(shape, buffer.dtype)
    return slots, torch.empty(shape, dtype=buffer.dtype, device=buffer.device)

"""State that requests keep by request slot, and the sizes of its snapshots.

Examples are recurrent state, rings of sliding windows, compressed entries, and the rows that
chained MTP layers keep. No page holds them, and the host cannot write them from a request's text.
A snapshot is a copy of all such rows of one request slot.
"""

from __future__ import annotations

from mtpc.errors import GraphError
from mtpc.layout.specs import Layout
from mtpc.plan import Plan

_OF_REQUESTS = ("kv.", "state.")
"""Prefixes of buffers that keep values from step to step."""
_BY_SLOT = "state.committed_lens"


def slot_state(layout: Layout) -> tuple[str, ...]:
    """Names of the buffers of which a snapshot copies rows."""
    return tuple(
        name
        for name, spec in sorted(layout.items())
        if name.startswith(_OF_REQUESTS) and not (spec.is_paged or spec.is_rebuilt)
    )


def rows_of_slot(name: str, num_rows: int, num_slots: int) -> int:
    """The number n of a buffer's rows that belong to one request slot; `num_slots` counts the
    scratch slot.

    Row 0 is scratch. Request slot s has the rows from 1 + (s - 1) n on, as `caches.RingKV` says.
    With n = 1, request slot s has row s.

    Raises:
        GraphError: the rows are not those of request slots.
    """
    count, rest = divmod(num_rows - 1, num_slots - 1)
    if rest or not count:
        raise GraphError(
            f"{name} has {num_rows} rows for {num_slots} request slots; expected 1 + n rows for "
            "each slot but the first, or `is_paged` in its BufferSpec"
        )
    return count


def snapshot_nbytes(layout: Layout) -> int:
    """Bytes of one snapshot; 0 if all of a request's past is in pages."""
    total = 0
    for name in slot_state(layout):
        num_rows, num_slots = layout.shape(name)[0], layout.shape(_BY_SLOT)[0]
        total += layout.nbytes(name) // num_rows * rows_of_slot(name, num_rows, num_slots)
    return total


def snapshot_count(layout: Layout, plan: Plan) -> int:
    """The number of snapshots for which a plan gives memory, at most one for each page."""
    nbytes = snapshot_nbytes(layout)
    if not nbytes or not plan.prefix_caching:
        return 0
    return min(plan.snapshot_bytes // nbytes, plan.num_pages - 1)


def snapshots_nbytes(layout: Layout, plan: Plan) -> int:
    return snapshot_nbytes(layout) * snapshot_count(layout, plan)

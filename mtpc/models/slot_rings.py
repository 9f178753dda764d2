"""State of a fixed size per request: rings of its last rows, and what windows of them come to.

A ring holds what a layer keeps of a request's last positions, at the position's remainder by the
ring's length. A forward reads the ring *before* it writes: rows of its own, of which a prefill
chunk may have more than the ring has places, are taken from the forward itself. So a layer that
looks back over B positions needs B + K places and no more: after a step at committed length L with
K drafts the ring ends at L + K, and the next step, at L + 1 or later, looks back to L + 1 - B. A
rejected row costs nothing to take back. It lies where the mask expects a position that is too old,
and is overwritten before that changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtpc import ops
from mtpc.layout import NO_SLOT
from mtpc.ops.ragged import request_of
from mtpc.step.records import Metadata


@dataclass(frozen=True)
class Rows:
    """What each flat row, and each request, of a forward is; all int64 unless stated.

    Attributes:
        live: bool [T], whether a row is a token at all.
        position: [T].
        request: [T], index of a row's request.
        slot: [T], its state slot.
        context: [T], tokens of its request before this forward.
        request_context: [R], the same by request.
        request_end: [R], tokens of a request with this forward's; 0 where off.
        request_start: [R], a request's first flat row.
        request_slot: [R].
    """

    live: Tensor
    position: Tensor
    request: Tensor
    slot: Tensor
    context: Tensor
    request_context: Tensor
    request_end: Tensor
    request_start: Tensor
    request_slot: Tensor

    @classmethod
    def of(cls, metadata: Metadata) -> Rows:
        """From what every layer is given."""
        starts, ends = metadata.query_start_loc.long(), metadata.seq_lens.long()
        token = torch.arange(metadata.positions.shape[0], device=starts.device)
        request = request_of(token, starts).clamp(max=metadata.state_slots.shape[0] - 1)
        context = torch.where(ends > 0, ends - (starts[1:] - starts[:-1]), 0)
        return cls(
            live=metadata.slot_mapping != NO_SLOT,
            position=metadata.positions,
            request=request,
            slot=metadata.state_slots[request],
            context=context[request],
            request_context=context,
            request_end=ends,
            request_start=starts[:-1],
            request_slot=metadata.state_slots,
        )


@dataclass(frozen=True)
class SlotRing:
    """Rings by state slot, [S, places, ...]."""

    tensor: Tensor

    @property
    def places(self) -> int:
        return self.tensor.shape[1]

    def positions(self, rows: Rows) -> Tensor:
        """[T, places]: the position each place holds of a row's request, before this forward.

        Negative: none yet.
        """
        last = rows.context[:, None] - 1
        place = torch.arange(self.places, device=last.device)[None]
        return last - torch.remainder(last - place, self.places)

    def write(self, values: Tensor, rows: Rows) -> None:
        """Keep the last rows [T, ...] of each request; two rows never share a place."""
        kept = rows.live & (rows.position >= rows.request_end[rows.request] - self.places)
        place = rows.slot * self.places + torch.remainder(rows.position, self.places)
        ops.write_cache(self.tensor, values, torch.where(kept, place, NO_SLOT))

    def at(self, request: Tensor, position: Tensor, fresh: Tensor, rows: Rows) -> Tensor:
        """Rows at positions [J, W] of requests [J], from this forward or from before: [J, W, ...].

        Positions that are not alive give any row at all.
        """
        context = rows.request_context[request][:, None]
        index = rows.request_start[request][:, None] + position - context
        index = index.clamp(min=0, max=fresh.shape[0] - 1)
        place = rows.request_slot[request][:, None] * self.places
        place = place + torch.remainder(position, self.places)
        is_new = (position >= context)[..., None]
        return torch.where(is_new, fresh[index], self.tensor.flatten(0, 1)[place])


@dataclass(frozen=True)
class WindowMasks:
    """Which keys each row of a forward sees of those within a window, own position included.

    Attributes:
        rows: of the forward.
        ring: bool [T, places], of the ring as it was before the forward.
        fresh: bool [T, T], of the forward's own rows.
    """

    rows: Rows
    ring: Tensor
    fresh: Tensor

    @classmethod
    def of(cls, metadata: Metadata, ring: SlotRing, window: int) -> WindowMasks:
        """The same for all layers that have such a ring.

        Args:
            metadata: of the forward.
            ring: any of those layers'.
            window: positions a row sees.
        """
        rows = Rows.of(metadata)
        own, held = rows.position[:, None], ring.positions(rows)
        old = (held >= 0) & (held > own - window) & rows.live[:, None]
        mine = (rows.request[:, None] == rows.request[None]) & rows.live[None] & rows.live[:, None]
        at = rows.position[None]
        return cls(rows, old, mine & (at <= own) & (at > own - window))


@dataclass(frozen=True)
class ClosedWindows:
    """Windows of `ratio` tokens whose last token is in this forward; J = T // ratio + R, at most.

    Attributes:
        valid: bool [J]; a request closes only so many.
        request: int64 [J].
        index: int64 [J], of the window in its request.
    """

    valid: Tensor
    request: Tensor
    index: Tensor

    @classmethod
    def of(cls, rows: Rows, ratio: int) -> ClosedWindows:
        """All windows that a forward closes, request by request."""
        first = rows.request_context // ratio
        count = torch.where(rows.request_end > 0, rows.request_end // ratio - first, 0)
        ends = count.cumsum(0)
        most = rows.position.shape[0] // ratio + ends.shape[0]
        entry = torch.arange(most, device=ends.device)
        request = (entry[:, None] >= ends[None]).sum(1)
        valid = request < ends.shape[0]
        request = request.clamp(max=ends.shape[0] - 1)
        index = first[request] + entry - (ends - count)[request]
        return cls(valid, request, index)

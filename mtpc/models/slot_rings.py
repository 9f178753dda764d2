"""Rings: state of a fixed size per request that holds the last rows of a layer.

Position p of a request is at place p mod n of a ring with n places. A forward reads the ring
*before* it writes, and takes its own rows from itself. So the length of a ring does not depend on
the prefill chunk: a layer that looks back over B positions needs B + K places. After a step at
committed length L with K drafts, the newest position in the ring is L + K. The next step begins at
L + 1 or later and looks back to L + 1 - B.

A rejected row needs no rollback. By the mask, its place holds an older position, which no row sees,
until the place is overwritten.
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
    """The flat rows and the requests of a forward; int64 unless another dtype is given.

    Attributes:
        live: bool [T], whether a row holds a token; the others are padding.
        position: [T], sequence position of a row.
        request: [T], index of a row's request.
        slot: [T], request slot of a row.
        context: [T], tokens that a row's request had before this forward.
        request_context: [R], tokens that a request had before this forward.
        request_end: [R], tokens of a request, this forward's included; 0 for inactive requests.
        request_start: [R], first flat row of a request.
        request_slot: [R], request slot.
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
        """Derive the rows from a forward's metadata."""
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


def rows_of(state: Tensor) -> Tensor:
    """State [S, n, D] as rows [S * n, D]; no number of a step may depend on S."""
    return state.view(-1, state.shape[-1])


@dataclass(frozen=True)
class SlotRing:
    """The rings of a layer by request slot, [S, places, ...]."""

    tensor: Tensor

    @property
    def places(self) -> int:
        return self.tensor.shape[1]

    def positions(self, rows: Rows) -> Tensor:
        """Position that each place of a row's ring held before this forward, [T, places].

        Negative where the place held none.
        """
        last = rows.context[:, None] - 1
        place = torch.arange(self.places, device=last.device)[None]
        return last - torch.remainder(last - place, self.places)

    def write(self, values: Tensor, rows: Rows) -> None:
        """Write the last rows of each request, values [T, ...], each to a place of its own."""
        kept = rows.live & (rows.position >= rows.request_end[rows.request] - self.places)
        place = rows.slot * self.places + torch.remainder(rows.position, self.places)
        ops.write_cache(self.tensor, values, torch.where(kept, place, NO_SLOT), None)

    def at(self, request: Tensor, position: Tensor, fresh: Tensor, rows: Rows) -> Tensor:
        """Rows at given positions [J, W] of given requests [J]: [J, W, ...]. This forward's are
        `fresh` [T, ...]; earlier ones come from the ring. A position without a row gives an
        arbitrary one."""
        context = rows.request_context[request][:, None]
        index = rows.request_start[request][:, None] + position - context
        index = index.clamp(min=0, max=fresh.shape[0] - 1)
        place = rows.request_slot[request][:, None] * self.places
        place = place + torch.remainder(position, self.places)
        is_new = (position >= context)[..., None]
        return torch.where(is_new, fresh[index], rows_of(self.tensor)[place])


@dataclass(frozen=True)
class WindowMasks:
    """Which keys within a window each row of a forward sees; its own position is included: of the
    ring's contents before the forward, bool [T, places], and of its own rows (`fresh`), bool [T,
    T]."""

    rows: Rows
    ring: Tensor
    fresh: Tensor

    @classmethod
    def of(cls, metadata: Metadata, ring: SlotRing, window: int) -> WindowMasks:
        """Compute the masks for a number of positions that a row sees, its own included; all layers
        with rings of the same length share them."""
        rows = Rows.of(metadata)
        own, held = rows.position[:, None], ring.positions(rows)
        old = (held >= 0) & (held > own - window) & rows.live[:, None]
        mine = (rows.request[:, None] == rows.request[None]) & rows.live[None] & rows.live[:, None]
        at = rows.position[None]
        return cls(rows, old, mine & (at <= own) & (at > own - window))


@dataclass(frozen=True)
class ClosedWindows:
    """Windows of `ratio` tokens whose last token is in this forward: at most J = T // ratio + R.
    `valid`, bool [J], is false in padding. Others have the request's index and their own in it,
    int64 [J]."""

    valid: Tensor
    request: Tensor
    index: Tensor

    @classmethod
    def of(cls, rows: Rows, ratio: int) -> ClosedWindows:
        """Find all windows that a forward closes, ordered by request."""
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

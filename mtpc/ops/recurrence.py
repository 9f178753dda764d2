"""Recurrences over rows of several requests, with state that rolls back: the shared part.

Rows and requests are as in `mtpc.ops.attention`; row j of a request stands at position
L + j, L = seq_lens - query_len, the committed length.

A request has one row of each of three state tensors, the row `state_slots`:

- `recurrent`: the state matrices after `standing` positions, all of which are certain.
- `history`: the inputs of the last B positions, with position p at p % B. The convolution looks
  back at them, and they are replayed. B = W - 1 + (the most rows of a step that are uncertain).
- `standing`: the number of positions that `recurrent` has seen.

A step first replays positions standing..L-1, which are the accepted drafts of the step before. Then
it runs its rows. `recurrent` keeps the state after the certain rows, and `history` takes all rows.
Rejected rows need no undoing: they never reach `recurrent`, and `history` overwrites them before
anything reads them. L = 0 is a fresh request: its state is zero, whatever the slot holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtpc.ops.ragged import request_of
from mtpc.ops.traits import Traits

STATE = ("recurrent", "history", "standing")
"""The arguments of an operator that are state, which it writes."""
RECURS = Traits(
    "earlier",
    "sums",
    rows="rows",
    requests="state_slots seq_lens query_start_loc certain_lens",
    slots=" ".join(STATE),
    skips_idle=True,
)


def by_head(rows: Tensor, recurrent: Tensor) -> Tensor:
    """The result of an operator, uninitialised: [T, HV, DV]."""
    return rows.new_empty((rows.shape[0], recurrent.shape[1], recurrent.shape[3]))


@dataclass(frozen=True)
class Rule(ABC):
    """A recurrence after a convolution of its first C inputs over W positions."""

    conv: Tensor  # [C, W]

    @property
    def channels(self) -> int:
        return self.conv.shape[0]

    @property
    def width(self) -> int:
        return self.conv.shape[1]

    @abstractmethod
    def terms(self, taps: Tensor, rows: Tensor) -> Any:
        """The inputs of the recurrence, a named tuple of tensors [..., HV, ...], of those of the
        convolution, taps [..., W, C], and the rows themselves, [..., >= C]."""

    @abstractmethod
    def update(self, state: Tensor, terms: Any) -> Tensor:
        """One position: state [..., HV, Dk, Dv]."""

    @abstractmethod
    def read(self, state: Tensor, terms: Any) -> Tensor:
        """The output of a position, [..., HV, Dv], from the state after it."""


@dataclass(frozen=True)
class RequestState:
    """The state tensors, and which rows belong to which request; shapes: `mtpc.ops.gated_delta`.

    The three state tensors are written.
    """

    recurrent: Tensor
    history: Tensor
    standing: Tensor
    state_slots: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    certain_lens: Tensor


def run_recurrence(rule: Rule, rows: Tensor, slots: RequestState) -> Tensor:
    """Run a recurrence over rows [T, ...], and bring the state forward; returns [T, HV, Dv].

    Rows that belong to no request that is on give zeros.
    """
    starts, lens = slots.query_start_loc[:-1].long(), slots.query_start_loc.diff().long()
    on, committed = slots.seq_lens > 0, slots.seq_lens.long() - lens
    stood = torch.where(on & (committed > 0), slots.standing[slots.state_slots].long(), 0)
    zero = (~on | (stood == 0))[:, None, None, None]
    state = torch.where(zero, 0, slots.recurrent[slots.state_slots])
    past = slots.history[slots.state_slots]

    token = torch.arange(rows.shape[0], device=rows.device)
    request = request_of(token, slots.query_start_loc).clamp(max=len(lens) - 1)
    index = token - starts[request]  # Row of its request.
    live = (index >= 0) & (index < lens[request]) & on[request]
    position = committed[request] + index

    state = _replay(state, past, rule, stood, torch.where(on, committed, 0))
    inputs = rows[:, : rule.channels]
    # The inputs of the convolution at each row: W positions, its own the last, [T, W, C].
    taps = []
    for back in range(rule.width - 1, -1, -1):
        there = position - back
        older = past[request, there % past.shape[1], : inputs.shape[1]]
        older = torch.where((there >= 0)[:, None], older, 0)
        taps.append(torch.where((index >= back)[:, None], inputs.roll(back, 0), older))
    terms = rule.terms(torch.stack(taps, 1), rows)
    certain = live & (index < slots.certain_lens[request])
    out, state = _run(rule, state, terms, request, live, certain)

    kept = on[:, None, None, None]
    slots.recurrent.index_copy_(
        0, slots.state_slots, torch.where(kept, state, slots.recurrent[slots.state_slots])
    )
    seen = committed + torch.minimum(slots.certain_lens.long(), lens)
    seen = torch.where(on, seen, slots.standing[slots.state_slots]).to(slots.standing.dtype)
    slots.standing.index_copy_(0, slots.state_slots, seen)
    remembered = live & (position >= slots.seq_lens[request] - slots.history.shape[1])
    # Rows that are not remembered write the first entry of slot 0 back.
    flat = slots.history.view(-1, slots.history.shape[2])
    size, own = slots.history.shape[1], slots.state_slots[request]
    target = torch.where(remembered, own * size + position % size, 0)
    flat.index_copy_(0, target, torch.where(remembered[:, None], rows, flat[0]))
    return out.to(rows.dtype)


def _at(terms: Any, index: tuple[slice | int, ...]) -> Any:
    """The terms of the positions at `index`."""
    return type(terms)(*(part[index] for part in terms))


def _replay(state: Tensor, past: Tensor, rule: Rule, stood: Tensor, until: Tensor) -> Tensor:
    """State [R, ...] after positions stood..until-1, from the inputs that were kept."""
    length, width = past.shape[1], rule.width
    if length < width:  # Every row is certain: there is never anything to replay.
        return state
    offset = torch.arange(length, device=past.device) - (width - 1)
    position = stood[:, None] + offset
    rows = past.gather(1, (position % length)[..., None].expand_as(past))
    known = (position >= 0) & (position < until[:, None])
    rows = torch.where(known[..., None], rows, 0)
    windows = rows[..., : rule.channels].unfold(1, width, 1).transpose(-1, -2)
    terms = rule.terms(windows, rows[:, width - 1 :])
    for step in range(length - width + 1):
        live = (stood + step < until)[:, None, None, None]
        state = torch.where(live, rule.update(state, _at(terms, (slice(None), step))), state)
    return state


def _run(
    rule: Rule, state: Tensor, terms: Any, request: Tensor, live: Tensor, certain: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [T, HV, Dv], zeros where not live, and the state after the certain rows."""
    kept, out = state, []
    for row in range(request.shape[0]):
        of = request[row : row + 1]
        before = state[of]
        there = _at(terms, (slice(row, row + 1),))
        after = rule.update(before, there)
        out.append(rule.read(after, there))
        state = state.index_copy(0, of, torch.where(live[row], after, before))
        kept = kept.index_copy(0, of, torch.where(certain[row], after, kept[of]))
    return torch.where(live[:, None, None], torch.cat(out), 0), kept

"""Decode steps with packed rows: a request has as many as it needs, or its part of a budget.

R requests with K drafts each would be R (K + 1) rows. Where drafts are copies, many do not exist,
and get no row. A step with a budget of T rows gives each request the row of its last token, and the
other rows to the drafts with the greatest chance: that a draft and all before it are accepted. So a
request gets a prefix of its drafts, and one whose text is hard to predict leaves its rows to
others. Only which drafts are verified depends on the other requests. The text does not, because
acceptance emits the target's own choices.

The chances are counted on the device: for each request and position, how many drafts were judged,
and how many of them were accepted. Old counts fade, so that drafts are tried again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mtpc.layout import NO_TOKEN, SCRATCH_SLOT, StepKey
from mtpc.step.accept import AcceptInputs
from mtpc.step.metadata import flat_metadata, rows_within, starts_of
from mtpc.step.records import Accepted, Begun

if TYPE_CHECKING:
    from mtpc.step.step import Step

aten = torch.ops.aten

FADE = 0.95
"""What is left of a count after a step."""
EXPECTED, WEIGHT = 0.7, 2.0
"""The chance of a draft of which nothing is known, and how many judged drafts that is worth."""


def chances(counts: Tensor) -> Tensor:
    """The chance that a draft and all before it are accepted.

    Args:
        counts: float32 [R, K, 2], drafts that were judged, and those of them that were accepted.

    Returns:
        float32 [R, K], not ascending along K.
    """
    judged, accepted = counts.unbind(-1)
    return ((accepted + EXPECTED * WEIGHT) / (judged + WEIGHT)).cumprod(1)


def leading(flags: Tensor) -> Tensor:
    """How many flags of each row are true before one is not: bool [R, K] -> int64 [R]."""
    return ((~flags).long().cumsum(1) == 0).sum(1)


def choose_drafts(worth: Tensor, is_useful: Tensor, room: Tensor) -> Tensor:
    """How many drafts of each request are verified: those of the greatest worth, as many as fit.

    Args:
        worth: float32 [R, K], not ascending along K.
        is_useful: bool [R, K]; no other draft is chosen.
        room: int64 [], the number of drafts that fit.

    Returns:
        int64 [R].
    """
    num_reqs, count = worth.shape
    # Of equal worths the earlier position comes first, so that a request gets a prefix.
    flat = torch.where(is_useful, worth, -1.0).t().reshape(-1)
    order = torch.arange(num_reqs * count, device=worth.device)
    is_before = (flat[None, :] > flat[:, None]) | (
        (flat[None, :] == flat[:, None]) & (order[None, :] < order[:, None])
    )
    is_chosen = (is_before.sum(1) < room).view(count, num_reqs).t() & is_useful
    return leading(is_chosen)


class BeginPacked(nn.Module):
    """Gather the requests of a decode step in which each has 1 to K + 1 rows, packed.

    A request has a row for each draft that exists, or with a budget for those that fit.
    """

    def __init__(self, key: StepKey, page_size: int, vocab_size: int):
        super().__init__()
        self.key, self.page_size, self.vocab_size = key, page_size, vocab_size

    def forward(
        self,
        state_indices: Tensor,
        committed_lens: Tensor,
        remaining_tokens: Tensor,
        token_ids: Tensor,
        *tables: Tensor,
    ) -> tuple[Tensor, ...]:
        """As `BeginDecode`; with a budget draft_counts [S, K_max, 2] are before the block table."""
        *draft_counts, block_table = tables
        num_tokens, drafts = self.key.bucket.num_tokens, self.key.spec_tokens
        remaining = remaining_tokens[state_indices]
        active = (state_indices != SCRATCH_SLOT) & (remaining > 0)
        column = torch.arange(drafts, device=active.device)
        is_draft = token_ids[state_indices][:, 1 : drafts + 1] != NO_TOKEN
        # The last token that a request may emit is the target's own.
        is_useful = is_draft & active[:, None] & (column + 1 < remaining[:, None])
        if draft_counts:
            worth = chances(draft_counts[0][state_indices][:, :drafts])
            count = choose_drafts(worth, is_useful, num_tokens - active.long().sum())
        else:
            count = leading(is_useful)
        counts = torch.where(active, count + 1, 0)
        starts = starts_of(counts)
        context_lens = torch.where(active, committed_lens[state_indices], 0)
        blocks = block_table[state_indices]
        request, place = rows_within(starts, num_tokens)
        ids = token_ids[state_indices[request], place.clamp(0, drafts)]
        ids = ids.clamp(0, self.vocab_size - 1)
        fresh = flat_metadata(context_lens, active, blocks, starts, num_tokens, self.page_size)
        slots = torch.where(active, state_indices, SCRATCH_SLOT)
        return tuple(Begun(*fresh, starts, blocks, slots, active.int(), ids, context_lens, active))


class AcceptPacked(nn.Module):
    """Acceptance in a decode step with packed rows; a draft that has no row is not accepted."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`AcceptInputs` -> `Accepted`; `chosen` and `finite` hold W = K + 1 entries a request, of
        which those behind its rows repeat the last one."""
        given = AcceptInputs(*inputs)
        starts, num_tokens = given.query_start_loc.long(), given.ids.shape[0]
        num_reqs = given.active.shape[0]
        width = given.chosen.shape[0] // num_reqs
        column = torch.arange(width, device=starts.device)
        is_row = column < (starts[1:] - starts[:-1])[:, None]
        rows = (starts[:-1, None] + column).clamp(max=num_tokens - 1)
        ids = torch.where(is_row, given.ids[rows], NO_TOKEN).view(-1)
        spread = torch.arange(num_reqs + 1, device=starts.device) * width
        uniform = replace(given, ids=ids, query_start_loc=spread.int())
        last, remaining, lens = torch.ops.mtpc.accept(*uniform)
        anchors = (starts[:-1] + last - spread[:-1]).clamp(0, num_tokens - 1)
        request, place = rows_within(starts, num_tokens)
        next_ids = given.chosen[request * width + place.clamp(0, width - 1)]
        return tuple(Accepted(next_ids, anchors, remaining, lens, last))


class CountDrafts(nn.Module):
    """Count which drafts were judged and accepted, and say what chance the next ones have."""

    def forward(
        self,
        draft_counts: Tensor,
        token_ids: Tensor,
        state_slots: Tensor,
        active: Tensor,
        query_start_loc: Tensor,
        num_accepted: Tensor,
        is_decoding: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Update `draft_counts` in place.

        A draft is judged if all drafts before it were accepted.

        Args:
            draft_counts: float32 [S, K_max, 2].
            token_ids: int64 [S, K_max + 1], the last token and the drafts of each request.
            state_slots: int64 [R].
            active: bool [R].
            query_start_loc: int32 [R+1].
            num_accepted: int32 [R].
            is_decoding: int32 [R], 0 where the rows are a prompt's; None: all requests decode.

        Returns:
            How many drafts of each request were verified, int32 [R], and `chances` [R, K_max], 0 in
            the row of a request that is off.
        """
        decodes = active if is_decoding is None else active & (is_decoding != 0)
        lens = query_start_loc[1:] - query_start_loc[:-1]
        exist = leading(token_ids[state_slots][:, 1:] != NO_TOKEN)
        verified = torch.where(decodes, torch.minimum(lens - 1, exist), 0)
        column = torch.arange(draft_counts.shape[1], device=lens.device)
        accepted = torch.minimum(num_accepted, verified)[:, None]
        is_judged = (column < verified[:, None]) & (column <= accepted)
        fresh = torch.stack([is_judged, column < accepted], -1).float()
        counts = torch.where(active[:, None, None], draft_counts[state_slots] * FADE + fresh, 0)
        draft_counts.index_copy_(0, state_slots, counts)
        return verified.int(), torch.where(active[:, None], chances(counts), 0)


def count_drafts(step: Step, begun: Begun) -> None:
    """Call the piece `count_drafts` on what a step accepted, and report its results."""
    state, batch = step.state, step.batch
    rows = (begun.state_slots, begun.active, begun.query_start_loc, batch.num_accepted)
    held = (state.draft_counts, state.token_ids)
    results = step.pieces.count_drafts(*held, *rows, *step.is_decoding)
    aten.copy_.default(batch.num_verified, results[0])
    aten.copy_.default(batch.draft_chances, results[1])

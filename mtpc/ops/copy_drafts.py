"""Drafts that are copies of a request's own text."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpc.layout import NO_TOKEN
from mtpc.ops.ragged import request_of
from mtpc.ops.traits import Traits, operator

SHORTEST, LONGEST = 3, 32
"""Tokens at the end of a text that must occur earlier in it, and the most that are compared."""


@operator(
    Traits(
        "request",
        "elements",
        rows="ids next_ids",
        requests="query_start_loc context_lens anchors active state_slots",
        slots="text_ids",
        features=0,
    ),
    lambda context_lens, anchors, num_drafts: (
        anchors.new_empty(anchors.shape[0], num_drafts),
        context_lens.new_empty(anchors.shape[0]),
    ),
    mutates_args=("text_ids",),
)
def copy_drafts(
    text_ids: Tensor,
    ids: Tensor,
    next_ids: Tensor,
    query_start_loc: Tensor,
    context_lens: Tensor,
    anchors: Tensor,
    active: Tensor,
    state_slots: Tensor,
    num_drafts: int,
) -> tuple[Tensor, Tensor]:
    """Append a step's certain tokens to the texts, and propose what followed their ends before.

    Of the places where the last SHORTEST to LONGEST tokens of a text occur earlier in it, the one
    with the most equal tokens counts, and of equals the last one. Drafts are what follows there. A
    copy that reaches the end of the text goes on with itself.

    Args:
        text_ids: int32 [S, N], by request slot; gets the tokens of the certain rows, and the token
            after them. Earlier ones are there already.
        ids: int64 [T], the tokens of the rows.
        next_ids: int64 [T], the token after each certain row.
        query_start_loc: int32 [R+1].
        context_lens: int32 [R], the position of each request's first row.
        anchors: int64 [R], the last certain row.
        active: bool [R]; a request that is off changes no text, and matches nothing.
        state_slots: int64 [R], the row of each request in `text_ids`.
        num_drafts: N_d, at least 1.

    Returns:
        drafts int64 [R, N_d], NO_TOKEN where nothing matches;
        matched int32 [R], how many tokens before the copy are equal; 0 where nothing matches.
    """
    width, requests = text_ids.shape[1], context_lens.shape[0]
    ends = context_lens + (anchors - query_start_loc[:-1]) + 1
    row = torch.arange(ids.shape[0], device=ids.device)
    request = request_of(row, query_start_loc).clamp(max=requests - 1)
    position = context_lens[request] + row - query_start_loc[request]
    is_certain = active[request] & (row <= anchors[request])
    position, certain = torch.cat([position, ends]), torch.cat([is_certain, active])
    tokens = torch.cat([ids, next_ids[anchors]]).int()
    slots = torch.cat([state_slots[request], state_slots])
    certain = certain & (position < width)
    flat = text_ids.view(-1)
    # What is not certain writes the scratch row's first entry as it is.
    place = torch.where(certain, slots * width + position, 0)
    flat.index_copy_(0, place, torch.where(certain, tokens, flat[0]))
    return _continue(text_ids[state_slots], torch.where(active, ends + 1, 0), num_drafts)


def _continue(text: Tensor, lens: Tensor, num_drafts: int) -> tuple[Tensor, Tensor]:
    """The drafts for texts int32 [R, N] of lens [R] tokens, and how many tokens matched."""
    width, lens = text.shape[1], lens.clamp(max=text.shape[1]).long()[:, None]
    place = torch.arange(width, device=text.device)
    same = place[None] < lens
    matched = torch.zeros_like(text)
    for back in range(1, LONGEST + 1):
        before = text[:, (place - back).clamp(min=0)]
        same = same & (place >= back) & (before == text.gather(1, (lens - back).clamp(min=0)))
        matched = matched + same
    best = (matched.long() * width + place).amax(1, keepdim=True)
    begin, length = best % width, best // width
    columns = torch.arange(num_drafts, device=text.device)
    source = begin + columns % (lens - begin).clamp(min=1)
    drafts = text.gather(1, source.clamp(max=width - 1)).long()
    found = length >= SHORTEST
    return torch.where(found, drafts, NO_TOKEN), torch.where(found, length, 0).int().flatten()

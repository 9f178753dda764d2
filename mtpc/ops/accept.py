"""Acceptance of drafts, and stops: which of its choices a step emits."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpc.layout import RUNNING, STOPPED_BY_LENGTH, STOPPED_BY_NONFINITE, STOPPED_BY_TOKEN
from mtpc.ops.traits import Traits, operator

REPORTS = ("out_token_ids", "num_accepted", "num_emitted", "stop_reason")
"""The arguments that `accept` writes: what the host reads after a step."""


@operator(
    Traits(
        "request",
        "elements",
        rows="chosen finite ids",
        requests="out_token_ids num_accepted num_emitted stop_reason query_start_loc context_lens "
        "active state_indices is_prompt goes_on",
        slots="remaining_tokens stop_ids",
        features=None,
    ),
    lambda context_lens: empty_outcome(context_lens),
    mutates_args=REPORTS,
)
def accept(
    out_token_ids: Tensor,
    num_accepted: Tensor,
    num_emitted: Tensor,
    stop_reason: Tensor,
    chosen: Tensor,
    finite: Tensor,
    ids: Tensor,
    query_start_loc: Tensor,
    context_lens: Tensor,
    active: Tensor,
    remaining_tokens: Tensor,
    stop_ids: Tensor,
    state_indices: Tensor,
    is_prompt: Tensor | None = None,
    goes_on: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept the longest prefix of drafts that equals the target's choices, and apply the stops.

    R >= 1, W = K + 1. A decoding request has W rows, the last emitted token and its drafts, and one
    choice for each row. A request in prefill has no drafts, and the same choice W times.

    Args:
        out_token_ids: int64 [R, W'], W' >= W; gets the choices. The first num_emitted of them
            are emitted.
        num_accepted: int32 [R]; gets the number of accepted drafts.
        num_emitted: int32 [R]; gets the number of emitted choices, a stop token included.
        stop_reason: int32 [R]; gets the reason why the request stops, see `mtpc.layout`.
        chosen: int64 [R * W], the target's choices.
        finite: bool [R * W], whether the logits behind each choice are finite.
        ids: int64 [T], T >= 1, the tokens of the rows.
        query_start_loc: int32 [R+1], where the rows of each request begin in `ids`.
        context_lens: int32 [R], 0 for requests that are off.
        active: bool [R].
        remaining_tokens: int32 [S], how many more tokens each request may emit.
        stop_ids: int64 [S, E], -1 where unused.
        state_indices: int64 [R], the row of each request in `remaining_tokens` and `stop_ids`.
        is_prompt: bool [R], the active requests in prefill. None: there are none.
        goes_on: bool [R], the requests in prefill whose prompt has more rows after this step. They
            emit nothing. None: there are none.

    Returns:
        anchors int64 [R], in 0..T-1: the last accepted row, or the last row of a prompt; any row
        for a request that is off;
        remaining int32 [R], 0 for a finished request;
        new_lens int32 [R], the committed lengths after this step.
    """
    num_reqs = context_lens.shape[0]
    width = chosen.shape[0] // num_reqs
    choices, starts = chosen.view(num_reqs, width), query_start_loc.long()
    decodes = active if is_prompt is None else active & ~is_prompt
    emits = active if goes_on is None else active & ~goes_on
    columns = torch.arange(1, width, device=ids.device)
    drafts = ids[(starts[:-1, None] + columns).clamp(max=ids.shape[0] - 1)]
    matches = (drafts == choices[:, :-1]) & decodes[:, None]
    accepted = matches.long().cumprod(1).sum(1)
    before = remaining_tokens[state_indices]
    count, remaining, reason = stop(
        choices,
        torch.where(emits, accepted + 1, 0),
        emits,
        finite.view(num_reqs, width),
        before,
        stop_ids[state_indices],
    )
    remaining = torch.where(emits | ~active, remaining, before)
    anchors = torch.where(active & ~decodes, starts[1:] - 1, starts[:-1] + accepted)
    certain = torch.where(decodes, accepted + 1, starts[1:] - starts[:-1])
    new_lens = context_lens + torch.where(active, certain, 0)
    out_token_ids[:, :width] = choices
    num_accepted.copy_(accepted)
    num_emitted.copy_(count)
    stop_reason.copy_(reason)
    return anchors.clamp(0, ids.shape[0] - 1), remaining, new_lens.int()


def stop(
    choices: Tensor,
    num_candidates: Tensor,
    emits: Tensor,
    finite: Tensor,
    remaining: Tensor,
    stop_ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply length and stop-token limits to candidate tokens.

    Args:
        choices: int64 [R, W], candidates in order; the first `num_candidates` count.
        num_candidates: int [R].
        emits: bool [R].
        finite: bool [R, W], whether the logits behind each candidate are finite.
        remaining: int32 [R], new tokens the request may still emit.
        stop_ids: int64 [R, E], -1 where unused.

    Returns:
        num_emitted int32 [R] (through the stop token), remaining int32 [R] (0: finished),
        stop_reason int32 [R].
    """
    width = choices.shape[1]
    column = torch.arange(width, device=choices.device)
    is_stop = (choices[:, :, None] == stop_ids[:, None, :]).any(-1)
    first_stop = torch.where(is_stop, column, width).amin(1)
    first_bad = torch.where(finite, width, column).amin(1)
    wanted = torch.minimum(num_candidates.long(), remaining.long())
    num = torch.minimum(torch.minimum(wanted, first_stop + 1), first_bad)
    num = torch.where(emits, num, 0)
    by_token = emits & (first_stop < num)
    by_nonfinite = emits & ~by_token & (first_bad < wanted)
    by_length = emits & ~by_token & ~by_nonfinite & (num == remaining)
    reason = (
        by_length * STOPPED_BY_LENGTH
        + by_token * STOPPED_BY_TOKEN
        + by_nonfinite * STOPPED_BY_NONFINITE
    )
    left = torch.where(emits & (reason == RUNNING), remaining - num, 0)
    return num.int(), left.int(), reason.int()


def empty_outcome(context_lens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `accept`, uninitialised, for context_lens int32 [R]."""
    anchors = context_lens.new_empty(context_lens.shape, dtype=torch.int64)
    remaining, new_lens = (anchors.new_empty(anchors.shape, dtype=torch.int32) for _ in range(2))
    return anchors, remaining, new_lens

"""Which tokens a step emits: acceptance of drafts, and stops.

The longest prefix of drafts that equals the target's own choices, then the choice after it as
bonus token; `choose` has made them, greedily or at random. An accepted draft EQUALS the target's
choice, so the emitted tokens are the first a + 1 choices, and they are also the draft layer's
shifted inputs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from mtpc.layout import StepKey

RUNNING, STOPPED_BY_LENGTH, STOPPED_BY_TOKEN, STOPPED_BY_NONFINITE = range(4)
"""Values of `batch.stop_reason`."""
StopReason = Literal["length", "stop", "nonfinite"]
STOP_REASONS: dict[int, StopReason] = {
    STOPPED_BY_LENGTH: "length",
    STOPPED_BY_TOKEN: "stop",
    STOPPED_BY_NONFINITE: "nonfinite",
}
"""What the host calls them."""


def stop(emitted_ids, num_candidates, active, finite, remaining, stop_ids):  # type: ignore[no-untyped-def]
    """Apply length and stop-token limits to candidate tokens.

    Args:
        emitted_ids: int64 [R, W], candidates in order; the first `num_candidates` count.
        num_candidates: int [R].
        active: bool [R].
        finite: bool [R, W], whether the logits behind each candidate were finite.
        remaining: int32 [R], new tokens the request may still emit.
        stop_ids: int64 [R, E], -1 where unused.

    Returns:
        num_emitted int32 [R] (through the stop token), remaining int32 [R] (0: finished),
        stop_reason int32 [R].
    """
    width = emitted_ids.shape[1]
    column = torch.arange(width, device=emitted_ids.device)
    is_stop = (emitted_ids[:, :, None] == stop_ids[:, None, :]).any(-1)
    first_stop = torch.where(is_stop, column, width).amin(1)
    first_bad = torch.where(finite, width, column).amin(1)
    wanted = torch.minimum(num_candidates.long(), remaining.long())
    num = torch.minimum(torch.minimum(wanted, first_stop + 1), first_bad)
    num = torch.where(active, num, 0)
    by_token = active & (first_stop < num)
    by_nonfinite = active & ~by_token & (first_bad < wanted)
    by_length = active & ~by_token & ~by_nonfinite & (num == remaining)
    reason = (
        by_length * STOPPED_BY_LENGTH
        + by_token * STOPPED_BY_TOKEN
        + by_nonfinite * STOPPED_BY_NONFINITE
    )
    left = torch.where(active & (reason == RUNNING), remaining - num, 0)
    return num.int(), left.int(), reason.int()


class Accept(nn.Module):
    """Acceptance, stops, and the rows that go on.

    `chosen` and `finite` [T] are what `choose` said of the target's logits. Returns next_ids [T]
    (draft-layer inputs: ids shifted left by one), anchors [R] (flat row of the last accepted
    token), emitted_ids [R, W], num_accepted, num_emitted, stop_reason, remaining, new_lens (all
    [R]), and which row of `chosen` was the last one accepted [R].
    """

    def __init__(self, key: StepKey):
        super().__init__()
        self.key = key

    def forward(  # type: ignore[no-untyped-def]
        self,
        chosen,
        finite,
        ids,
        context_lens,
        active,
        remaining_tokens,
        stop_ids,
        state_indices,
    ):
        num_reqs, query_len = self.key.bucket.num_reqs, self.key.bucket.query_len
        target_ids = chosen.view(num_reqs, query_len)
        drafts = ids.view(num_reqs, query_len)[:, 1:]
        matches = (drafts == target_ids[:, :-1]).long()
        accepted = torch.where(active, matches.cumprod(1).sum(1), 0)
        num_emitted, remaining, reason = stop(
            target_ids,
            accepted + 1,
            active,
            finite.view(num_reqs, query_len),
            remaining_tokens[state_indices],
            stop_ids[state_indices],
        )
        anchors = torch.arange(num_reqs, device=ids.device) * query_len + accepted
        new_lens = torch.where(active, context_lens + accepted + 1, 0).int()
        return (
            target_ids.reshape(-1),
            anchors,
            target_ids,
            accepted.int(),
            num_emitted,
            reason,
            remaining,
            new_lens,
            anchors,
        )


class AcceptPrefill(nn.Module):
    """Prefill's acceptance: prompt tokens are certain; a request whose prompt ends here emits one.

    `next_prompt_id` [R] is the prompt token after this chunk, or -1 where the chunk is the last.
    `chosen` and `finite` [R*W], W = K + 1, are of each request's last row, W times; of who decodes,
    `is_decoding` [R], they are of all its rows, and its drafts are accepted as ever. Returns as
    `Accept`.
    """

    def __init__(self, key: StepKey):
        super().__init__()
        self.width = key.max_emitted

    def forward(  # type: ignore[no-untyped-def]
        self,
        chosen,
        finite,
        ids,
        next_prompt_id,
        is_decoding,
        context_lens,
        active,
        query_start_loc,
        remaining_tokens,
        stop_ids,
        state_indices,
    ):
        decodes, starts = active & (is_decoding != 0), query_start_loc.long()
        target_ids = chosen.view(-1, self.width)
        columns = torch.arange(self.width, device=ids.device)
        rows = (starts[:-1, None] + columns).clamp(max=ids.shape[0] - 1)
        matches = (ids[rows[:, 1:]] == target_ids[:, :-1]) & decodes[:, None]
        accepted = matches.long().cumprod(1).sum(1)
        goes_on = active & ~decodes & (next_prompt_id >= 0)
        emits = active & ~goes_on
        remaining_before = remaining_tokens[state_indices]
        num_emitted, remaining, reason = stop(
            target_ids,
            torch.where(emits, accepted + 1, 0),
            emits,
            finite.view(-1, self.width),
            remaining_before,
            stop_ids[state_indices],
        )
        remaining = torch.where(goes_on, remaining_before, remaining)
        last = torch.arange(accepted.shape[0], device=ids.device) * self.width + accepted
        following = torch.where(goes_on, next_prompt_id, chosen[last])
        anchors = torch.where(decodes, starts[:-1] + accepted, starts[1:] - 1)
        anchors = anchors.clamp(0, ids.shape[0] - 1)
        next_ids = move_up(ids, anchors, active, following)
        num_certain = torch.where(decodes, accepted + 1, starts[1:] - starts[:-1])
        new_lens = torch.where(active, context_lens + num_certain, context_lens).int()
        counts = (accepted.int(), num_emitted, reason, remaining, new_lens)
        return next_ids, anchors, target_ids, *counts, last


def move_up(
    ids: torch.Tensor, anchors: torch.Tensor, active: torch.Tensor, following: torch.Tensor
) -> torch.Tensor:
    """ids [T] shifted left by one; each active request's anchor row takes its following token [R].

    A comparison, not a scatter: a padded request's anchor may coincide with a live one's.
    """
    row = torch.arange(ids.shape[0], device=ids.device)
    is_anchor = (row[:, None] == anchors[None, :]) & active[None, :]
    chosen = (is_anchor * following[None, :]).sum(1)
    return torch.where(is_anchor.any(1), chosen, torch.cat([ids[1:], ids[:1]]))

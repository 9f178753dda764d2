"""Which tokens a step emits: acceptance of drafts, and stops.

The longest prefix of drafts that equals the target's own choices, then the choice after it as
bonus token; `choose` has made them, greedily or at random. An accepted draft EQUALS the target's
choice, so the emitted tokens are the first a + 1 choices, and they are also the draft layer's
shifted inputs. `mtpc::accept` does it for both phases.
"""

from __future__ import annotations

import torch
from torch import nn

import mtpc.ops.accept  # noqa: F401  (registers the op)


class Accept(nn.Module):
    """Acceptance, stops, and the rows that go on: `mtpc::accept` by its own arguments.

    Returns next_ids [T] (draft-layer inputs: ids shifted left by one), anchors [R] (flat row of the
    last accepted token), remaining and new_lens [R], and which row of `chosen` was the last one
    accepted [R].
    """

    def forward(  # type: ignore[no-untyped-def]
        self, out_token_ids, num_accepted, num_emitted, stop_reason, chosen, *rows
    ):
        reports = (out_token_ids, num_accepted, num_emitted, stop_reason)
        anchors, *lens = torch.ops.mtpc.accept(*reports, chosen, *rows)
        return chosen, anchors, *lens, anchors


class AcceptPrefill(nn.Module):
    """Prefill's acceptance: prompt tokens are certain; a request whose prompt ends here emits one.

    `next_prompt_id` [R] is the prompt token after this chunk, or -1 where the chunk is the last.
    `chosen` and `finite` [R*W], W = K + 1, are of each request's last row, W times; of who decodes,
    `is_decoding` [R], they are of all its rows, and its drafts are accepted as ever. Returns as
    `Accept`.
    """

    def forward(  # type: ignore[no-untyped-def]
        self, out_token_ids, num_accepted, num_emitted, stop_reason, chosen, finite, ids,
        query_start_loc, context_lens, active, remaining_tokens, stop_ids, state_indices,
        next_prompt_id, is_decoding,
    ):  # fmt: skip
        is_prompt = active & (is_decoding == 0)
        goes_on = is_prompt & (next_prompt_id >= 0)
        reports = (out_token_ids, num_accepted, num_emitted, stop_reason)
        rows = (chosen, finite, ids, query_start_loc, context_lens, active)
        limits = (remaining_tokens, stop_ids, state_indices)
        anchors, *lens = torch.ops.mtpc.accept(*reports, *rows, *limits, is_prompt, goes_on)
        num_reqs = active.shape[0]
        firsts = torch.arange(num_reqs, device=ids.device) * (chosen.shape[0] // num_reqs)
        last = firsts + num_accepted  # As the operator has just written it.
        following = torch.where(goes_on, next_prompt_id, chosen[last])
        return move_up(ids, anchors, active, following), anchors, *lens, last


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

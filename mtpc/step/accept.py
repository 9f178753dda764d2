"""Which tokens a step emits: acceptance of drafts, and stops.

A step accepts the longest prefix of drafts that equals the target's own choices, and emits the
choice after it as a bonus token. `choose` has made the choices, greedily or at random. An accepted
draft EQUALS the target's choice. So the emitted tokens are the first a + 1 choices, and they are
also the draft layer's inputs, shifted by one. The operator `mtpc::accept` serves both phases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import mtpc.ops.accept  # noqa: F401  (registers the op)
from mtpc.step.records import Accepted, TensorRecord


@dataclass(frozen=True)
class AcceptInputs(TensorRecord):
    """The arguments of `mtpc::accept` that both phases have, in its order; see there."""

    out_token_ids: Tensor
    num_accepted: Tensor
    num_emitted: Tensor
    stop_reason: Tensor
    chosen: Tensor
    finite: Tensor
    ids: Tensor
    query_start_loc: Tensor
    context_lens: Tensor
    active: Tensor
    remaining_tokens: Tensor
    stop_ids: Tensor
    state_indices: Tensor


class Accept(nn.Module):
    """Acceptance in a decode step."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`AcceptInputs` -> `Accepted`."""
        given = AcceptInputs(*inputs)
        anchors, remaining, lens = torch.ops.mtpc.accept(*given)
        return tuple(Accepted(given.chosen, anchors, remaining, lens, anchors))


class AcceptPrefill(nn.Module):
    """Acceptance in a prefill step.

    The tokens of a prompt are certain, and a request whose prompt ends in this step emits one
    token. A request that decodes in this step has its drafts accepted as in a decode step.
    """

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`AcceptInputs`, then `next_prompt_id` and `is_decoding` -> `Accepted`.

        `chosen` and `finite` hold W = K + 1 entries a request. Those of a prompt are all of its
        last row. `next_prompt_id` [R] is the prompt's token after this chunk; -1 after the last
        chunk. `is_decoding` [R] is 0 where the rows are a prompt's.
        """
        *common, next_prompt_id, is_decoding = inputs
        given = AcceptInputs(*common)
        is_prompt = given.active & (is_decoding == 0)
        goes_on = is_prompt & (next_prompt_id >= 0)
        anchors, remaining, lens = torch.ops.mtpc.accept(*given, is_prompt, goes_on)
        ids, chosen, num_reqs = given.ids, given.chosen, given.active.shape[0]
        firsts = torch.arange(num_reqs, device=ids.device) * (chosen.shape[0] // num_reqs)
        last = firsts + given.num_accepted  # As the operator has just written it.
        following = torch.where(goes_on, next_prompt_id, chosen[last])
        next_ids = move_up(ids, anchors, given.active, following)
        return tuple(Accepted(next_ids, anchors, remaining, lens, last))


def move_up(ids: Tensor, anchors: Tensor, active: Tensor, following: Tensor) -> Tensor:
    """Shift ids to the left by one; the anchor row of each active request takes `following`.

    It compares rows and does not scatter, because the anchor of a request that is off may be the
    same row as the anchor of an active one.

    Args:
        ids: int64 [T].
        anchors: int64 [R], flat rows.
        active: bool [R].
        following: int64 [R], the token after each anchor.
    """
    row = torch.arange(ids.shape[0], device=ids.device)
    is_anchor = (row[:, None] == anchors[None, :]) & active[None, :]
    chosen = (is_anchor * following[None, :]).sum(1)
    return torch.where(is_anchor.any(1), chosen, torch.cat([ids[1:], ids[:1]]))

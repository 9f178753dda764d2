"""Synthetic acceptance: the host says how many drafts a step accepts, whatever the drafts are.

It measures what K is worth at a given acceptance, at the full cost of a step. The text is then made
of drafts, and is not the model's. The host fills a table of draws. A request's committed length
alone selects a draw from it. The same graphs serve all rates.

The tokens are changed before `mtpc::accept`, which works as usual: a choice becomes the draft that
is to be accepted, and the draft after it becomes another token than the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mtpc.ops.philox import uniform
from mtpc.ops.ragged import request_of
from mtpc.step.choose import Verdict
from mtpc.step.records import Begun, Chosen, Metadata

if TYPE_CHECKING:
    from mtpc.step.step import Step

_SEED = 0


def draws(rates: Sequence[float], period: int) -> Tensor:
    """The number of drafts that a step accepts, by committed length modulo `period`.

    Args:
        rates: for each position, the share of steps that accept this draft and all before it.
        period: P.

    Returns:
        int64 [P], each 0..len(rates).
    """
    positions = torch.arange(period)
    random = uniform(torch.full_like(positions, _SEED), positions, 1)
    return (random < torch.tensor(rates, dtype=torch.float64)).sum(1)


class Dictate(nn.Module):
    """Rewrites choices and drafts, so that acceptance finds what the draws say.

    Args:
        width: W = K + 1.
    """

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(
        self,
        chosen: Tensor,
        ids: Tensor,
        query_start_loc: Tensor,
        context_lens: Tensor,
        active: Tensor,
        state_indices: Tensor,
        token_ids: Tensor,
        table: Tensor,
        is_decoding: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rewrite the requests that decode; a prompt's tokens stay.

        Args:
            chosen: int64 [R * W], the target's choices.
            ids: int64 [T], the tokens of the rows.
            query_start_loc: int32 [R+1].
            context_lens: int32 [R], committed tokens.
            active: bool [R].
            state_indices: int64 [R].
            token_ids: int64 [S, K_max + 1]; NO_TOKEN where a request has no draft.
            table: int64 [P], see `draws`.
            is_decoding: int32 [R], 0 where the rows are a prompt's; None: all requests decode.

        Returns:
            `chosen` and `ids`, rewritten.
        """
        decodes = active if is_decoding is None else active & (is_decoding != 0)
        num_reqs, drafts = active.shape[0], token_ids[state_indices][:, 1 : self.width]
        known = (drafts >= 0).long().cumprod(1).sum(1)
        rows = (query_start_loc[1:] - query_start_loc[:-1]).long()
        known = torch.minimum(known, (rows - 1).clamp(min=0))  # No other draft is verified.
        wanted = torch.minimum(table[context_lens.long() % table.shape[0]], known)
        column = torch.arange(self.width - 1, device=ids.device)
        is_accepted = (column < wanted[:, None]) & decodes[:, None]
        choices = chosen.view(num_reqs, self.width)
        rewritten = torch.where(is_accepted, drafts, choices[:, :-1])
        # |n - 1| is a token other than n, and one of the vocabulary.
        others = torch.where(is_accepted, drafts, (rewritten - 1).abs())
        row = torch.arange(ids.shape[0], device=ids.device)
        request = request_of(row, query_start_loc)
        in_batch = request < num_reqs
        request = request.clamp(max=num_reqs - 1)
        place = row - query_start_loc[request].long() - 1
        is_draft = in_batch & decodes[request] & (place >= 0)
        place = place.clamp(0, self.width - 2)
        placed = torch.where(is_draft, others[request, place], ids)
        return torch.cat([rewritten, choices[:, -1:]], 1).view(-1), placed


def dictate(step: Step, verdict: Verdict, begun: Begun, metadata: Metadata) -> Verdict:
    """The verdict of which acceptance takes as many drafts as the table says."""
    state, batch = step.state, step.batch
    rows = (metadata.query_start_loc, begun.context_lens, begun.active, batch.state_indices)
    drafts = (state.token_ids, state.synthetic_draws)
    given = (verdict.chosen.tokens, verdict.ids, *rows, *drafts, *step.is_decoding)
    results = step.pieces.dictate(*given)
    chosen = Chosen(results[0], verdict.chosen.finite)
    return replace(verdict, chosen=chosen, ids=results[1])

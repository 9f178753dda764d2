"""The last piece of a step: it writes the state that the next step starts from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtpc.layout import NO_TOKEN


class Advance(nn.Module):
    """Write each request's new state to its slot; a request that is off writes the scratch slot.

    Args:
        marks_unused: whether columns of `token_ids` for which this step has no draft get NO_TOKEN.
            Otherwise they keep their values, and a later step with more drafts verifies these.
    """

    def __init__(self, marks_unused: bool):
        super().__init__()
        self.marks_unused = marks_unused

    def forward(
        self,
        committed_lens: Tensor,
        token_ids: Tensor,
        remaining_tokens: Tensor,
        state_slots: Tensor,
        new_lens: Tensor,
        next_token_ids: Tensor,
        remaining: Tensor,
    ) -> None:
        """Update the first three arguments in place.

        Args:
            committed_lens: int32 [S].
            token_ids: int64 [S, K_max + 1].
            remaining_tokens: int32 [S].
            state_slots: int64 [R].
            new_lens: int32 [R], written to `committed_lens`.
            next_token_ids: int64 [R, K + 1], the last token and the drafts, written to `token_ids`.
            remaining: int32 [R], written to `remaining_tokens`.
        """
        committed_lens.index_copy_(0, state_slots, new_lens)
        remaining_tokens.index_copy_(0, state_slots, remaining)
        unused = token_ids[state_slots][:, next_token_ids.shape[1] :]
        if self.marks_unused:
            unused = torch.full_like(unused, NO_TOKEN)
        token_ids.index_copy_(0, state_slots, torch.cat([next_token_ids, unused], 1))

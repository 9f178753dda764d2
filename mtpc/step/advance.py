"""What a step leaves behind for the next one."""

from __future__ import annotations

import torch
from torch import nn


class Advance(nn.Module):
    """Write the new state rows back; rows that are off write the scratch slot instead."""

    def forward(  # type: ignore[no-untyped-def]
        self,
        committed_lens,
        token_ids,
        remaining_tokens,
        state_slots,
        new_lens,
        next_token_ids,
        remaining,
    ):
        committed_lens.index_copy_(0, state_slots, new_lens)
        remaining_tokens.index_copy_(0, state_slots, remaining)
        unused = token_ids[state_slots][:, next_token_ids.shape[1] :]
        token_ids.index_copy_(0, state_slots, torch.cat([next_token_ids, unused], 1))

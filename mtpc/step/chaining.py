"""True chaining of several MTP layers: the rows a round computes, and what it leaves to the next.

MTP layer i pairs, in row t, what layer i - 1 gave there (layer 0: the target's features) with token
t + i + 1. After a step all tokens up to position L' are certain, so layer i's rows from L' - i on
rest on drafts: the next round computes them again. It does so for all n layers from row L - (n-1)
on, for which the target's last n - 1 features and their next tokens are kept by request slot. All
layers run over the same rows; from one to the next the tokens move up by one, and the row of the
last certain token takes the draft. docs/design.md derives this.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtpc.layout import StepKey
from mtpc.ops.ragged import request_of
from mtpc.step.accept import move_up
from mtpc.step.metadata import flat_metadata


class Widen(nn.Module):
    """The rows of a round: up to `window` earlier ones of each request, then this step's.

    A request with fewer than `window` committed tokens has that many earlier rows: a slot's rows
    from the request before are never read. Rows beyond a bucket's last are padding, as always.
    """

    def __init__(self, key: StepKey, window: int, page_size: int):
        super().__init__()
        self.window, self.page_size = window, page_size
        self.num_tokens = key.bucket.num_tokens + key.bucket.num_reqs * window

    def forward(  # type: ignore[no-untyped-def]
        self,
        next_ids,
        features,
        anchors,
        context_lens,
        active,
        block_table,
        state_slots,
        query_start_loc,
        last_ids,
        last_features,
    ):
        """Widened next ids [T'], features [T', ...], anchors [R], and metadata of the rows.

        Args:
            next_ids: int64 [T], the token after each of this step's rows.
            features: [T, ...], the target's.
            anchors: int64 [R], flat row of each request's last certain token.
            context_lens: int32 [R], committed tokens before this step.
            active: bool [R].
            block_table: int32 [R, M].
            state_slots: int64 [R].
            query_start_loc: int32 [R+1].
            last_ids: int64 [S, window], by request slot, the newest last.
            last_features: [S, window, ...].

        Returns:
            next_ids, features, anchors, positions [T'], slot_mapping [T'], seq_lens [R],
            query_start_loc [R+1].
        """
        earlier = torch.where(active, context_lens.clamp(max=self.window), 0).long()
        before = torch.cat([earlier.new_zeros(1), earlier.cumsum(0)])
        starts = query_start_loc.long() + before
        token = torch.arange(self.num_tokens, device=anchors.device)
        request = request_of(token, starts).clamp(max=earlier.shape[0] - 1)
        row = token - starts[request]
        is_earlier = row < earlier[request]
        kept = (self.window - earlier[request] + row).clamp(0, self.window - 1)
        slot = state_slots[request]
        fresh = (token - before[request + 1]).clamp(0, next_ids.shape[0] - 1)
        ids = torch.where(is_earlier, last_ids[slot, kept], next_ids[fresh])
        mask = is_earlier.view(-1, *([1] * (features.dim() - 1)))
        rows = torch.where(mask, last_features[slot, kept], features[fresh])
        first = (context_lens - earlier).int()
        positions, slots, seq_lens = flat_metadata(
            first, active, block_table, starts.int(), self.num_tokens, self.page_size
        )
        return ids, rows, anchors + before[1:], positions, slots, seq_lens, starts.int()


class MoveUp(nn.Module):
    """Ids of the next layer: each row takes the one after it, the anchors' rows the draft."""

    def forward(self, ids: Tensor, anchors: Tensor, active: Tensor, drafts: Tensor) -> Tensor:
        return move_up(ids, anchors, active, drafts)


class KeepLast(nn.Module):
    """Write each request's last `window` certain rows to its slot, up to the anchor's."""

    def __init__(self, window: int):
        super().__init__()
        self.window = window

    def forward(  # type: ignore[no-untyped-def]
        self, ids, features, anchors, query_start_loc, state_slots, last_ids, last_features
    ):
        back = torch.arange(self.window - 1, -1, -1, device=anchors.device)
        rows = anchors[:, None] - back[None]
        # Earlier rows than there are: any will do, lengths say that they do not exist.
        rows = torch.maximum(rows, query_start_loc[:-1, None].long())
        last_ids.index_copy_(0, state_slots, ids[rows])
        last_features.index_copy_(0, state_slots, features[rows])

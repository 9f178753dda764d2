"""True chaining of several MTP layers: which rows a step computes, and what it keeps for the next.

In row t, MTP layer i takes the features of layer i - 1 in row t (layer 0: the target's features)
and token t + i + 1. After a step, all tokens up to position L' are certain. So layer i's rows from
L' - i on depend on drafts, and the next step computes them again. The last layer's come from all
layers below it, whose outputs no step keeps. So all n layers run over the same rows, from row
L - (n-1) on. For that, a step keeps the target's last n - 1 features and their next tokens by
request slot. From one layer to the next, the tokens move up by one row, and the row of the last
certain token takes the draft. docs/design.md derives this.

If every layer is fed the target's features (`TrueChaining.feeds_target`), layer i's rows depend on
the same drafts through their tokens, and nothing else differs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mtpc.layout import StepKey
from mtpc.ops.ragged import request_of
from mtpc.step.accept import move_up
from mtpc.step.drafting import Drafting, DraftInputs
from mtpc.step.metadata import flat_metadata
from mtpc.step.records import Widened, unpack

if TYPE_CHECKING:
    from mtpc.step.step import Step

aten = torch.ops.aten


class Widen(nn.Module):
    """The rows of all MTP layers: up to `window` earlier ones of each request, then this step's.

    A request with fewer than `window` committed tokens has only as many earlier rows. So nothing
    reads rows that an earlier request left in the slot. Rows after the last request's are padding.
    """

    def __init__(self, key: StepKey, window: int, page_size: int):
        super().__init__()
        self.window, self.page_size = window, page_size
        self.num_tokens = key.bucket.num_tokens + key.bucket.num_reqs * window

    def forward(
        self,
        next_ids: Tensor,
        features: Tensor,
        anchors: Tensor,
        context_lens: Tensor,
        active: Tensor,
        block_table: Tensor,
        state_slots: Tensor,
        query_start_loc: Tensor,
        last_ids: Tensor,
        last_features: Tensor,
    ) -> tuple[Tensor, ...]:
        """This step's rows, and the rows kept from before -> `Widened`.

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
        anchors = anchors + before[1:]
        return tuple(Widened(positions, slots, seq_lens, starts.int(), ids, rows, anchors))


class MoveUp(nn.Module):
    """The ids of the next layer: each row takes the id of the row after it, anchors the draft."""

    def forward(self, ids: Tensor, anchors: Tensor, active: Tensor, drafts: Tensor) -> Tensor:
        return move_up(ids, anchors, active, drafts)


class KeepLast(nn.Module):
    """Write each request's last `window` certain rows, up to the anchor's, to its slot.

    In a prefill step with images, ids from the vocabulary's end on name rows of embeddings, which
    the next step overwrites. The slot keeps copies of these rows, and ids that name the copies.
    """

    def __init__(self, window: int, vocab_size: int):
        super().__init__()
        self.window, self.vocab_size = window, vocab_size

    def forward(
        self,
        ids: Tensor,
        features: Tensor,
        anchors: Tensor,
        query_start_loc: Tensor,
        state_slots: Tensor,
        last_ids: Tensor,
        last_features: Tensor,
        embeds: Tensor | None = None,
        last_embeds: Tensor | None = None,
    ) -> None:
        """Update `last_ids`, `last_features` and `last_embeds` in place.

        Args:
            ids: int64 [T'], as in `Widened`, like the next three arguments.
            features: [T', ...].
            anchors: int64 [R].
            query_start_loc: int32 [R+1].
            state_slots: int64 [R].
            last_ids: int64 [S, window].
            last_features: [S, window, ...].
            embeds: [N, H], the rows of the ids V to V + N - 1, V the vocabulary size; None without
                images.
            last_embeds: [S, window, H], by request slot, the rows of the ids after these.
        """
        back = torch.arange(self.window - 1, -1, -1, device=anchors.device)
        rows = anchors[:, None] - back[None]
        # A request may have fewer rows. The others may be any, because its length excludes them.
        rows = torch.maximum(rows, query_start_loc[:-1, None].long())
        kept = ids[rows]
        if embeds is not None and last_embeds is not None:
            count = embeds.shape[0]
            place = kept - self.vocab_size
            fresh = embeds[place.clamp(0, count - 1)]
            old = last_embeds[state_slots[:, None], (place - count).clamp(0, self.window - 1)]
            moved = torch.where((place >= count)[:, :, None], old, fresh)
            last_embeds.index_copy_(0, state_slots, moved)
            names = torch.arange(self.window, device=anchors.device) + self.vocab_size + count
            kept = torch.where(place >= 0, names, kept)
        last_ids.index_copy_(0, state_slots, kept)
        last_features.index_copy_(0, state_slots, features[rows])


@dataclass(frozen=True)
class TrueChaining(Drafting):
    """Drafts by several MTP layers, each over the same widened rows.

    Attributes:
        feeds_target: whether each layer is fed the target's features, not those of the layer
            before it.
        has_images: whether ids may name rows of `state.prompt_embeds`.
    """

    feeds_target: bool = False
    has_images: bool = False

    @property
    def declared(self) -> dict[str, str]:
        window, fed = self.num_layers - 1, "the target" if self.feeds_target else "the one before"
        return {
            **super().declared,
            "keeps": f"what each layer keeps of a row; features and tokens of {window} row(s)",
            "drafts": f"{self.num_layers} layers over all rows, each fed by {fed}; the last again "
            "over single rows",
        }

    def pieces(self, key: StepKey, page_size: int, vocab_size: int) -> dict[str, nn.Module]:
        window = self.num_layers - 1
        return {
            **super().pieces(key, page_size, vocab_size),
            "widen": Widen(key, window, page_size),
            "move_up": MoveUp(),
            "keep_last": KeepLast(window, vocab_size),
        }

    def over_rows(
        self, step: Step, inputs: DraftInputs
    ) -> tuple[DraftInputs, tuple[Tensor, ...], list[Tensor]]:
        """Draft with each MTP layer in turn.

        Where K changes between steps, it may be less than the number of layers. All layers run
        nevertheless, because a later step with more drafts needs their KV in every row. Dead-code
        elimination removes what only the unused drafts need.
        """
        inputs = widened = self._widen(step, inputs)
        keeps_embeds = step.key.phase == "prefill" and self.has_images
        if not keeps_embeds:
            _keep_last(step, widened)
        given, draft = self.run_layer(step, 0, inputs)
        drafts = [draft]
        for index in range(1, self.num_layers):
            ids = step.pieces.move_up(inputs.ids, inputs.anchors, inputs.begun.active, drafts[-1])
            inputs = replace(inputs, ids=ids)
            if not self.feeds_target:
                inputs = replace(inputs, features=given[0])
            given, draft = self.run_layer(step, index, inputs)
            drafts.append(draft)
        if keeps_embeds:  # Now every layer has read the embeddings that the step before kept.
            _keep_last(step, widened, step.state.prompt_embeds, step.state.chain_embeds)
        return widened, given, drafts

    def _widen(self, step: Step, inputs: DraftInputs) -> DraftInputs:
        """Add the earlier rows, which depended on drafts."""
        bucket, begun, state = step.key.bucket, inputs.begun, step.state
        fresh = (inputs.ids, inputs.features, inputs.anchors, begun.context_lens, begun.active)
        requests = (begun.block_table, begun.state_slots, inputs.metadata.query_start_loc)
        kept = (state.chain_ids, state.chain_features)
        wide = unpack(Widened, step.pieces.widen(*fresh, *requests, *kept))
        num_tokens = bucket.num_tokens + bucket.num_reqs * (self.num_layers - 1)
        metadata = step.publish(wide, begun, num_tokens)
        ids, features, anchors = wide.ids, wide.features, wide.anchors
        return replace(inputs, metadata=metadata, ids=ids, features=features, anchors=anchors)


def _keep_last(step: Step, inputs: DraftInputs, *embeds: Tensor) -> None:
    """Keep the last of the widened rows for the next step."""
    rows = (inputs.ids, inputs.features, inputs.anchors, inputs.metadata.query_start_loc)
    kept = (step.state.chain_ids, step.state.chain_features)
    step.pieces.keep_last(*rows, inputs.begun.state_slots, *kept, *embeds)

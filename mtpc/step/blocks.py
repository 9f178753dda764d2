"""Drafts of one pass over a block: rows that hold a mask's token in place of drafts.

A block stands at the positions after a request's last accepted token's features, L' and on. What
the drafter keeps of committed rows comes from the target's features: a pass over all rows of the
step writes it. The block's own rows write to the same caches, behind them. So the next step, whose
rows stand where the block stood, overwrites every one of them before anything attends to it.

Whether rows of a block see each other both ways or in order is the drafter's own matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mtpc.layout import StepKey
from mtpc.step.drafting import Drafting, DraftInputs
from mtpc.step.metadata import flat_metadata
from mtpc.step.records import Blocked, unpack

if TYPE_CHECKING:
    from mtpc.step.step import Step

aten = torch.ops.aten


class BlockRows(nn.Module):
    """Metadata and tokens of the blocks, each of `rows` rows.

    Args:
        rows: of a block, at least 1.
        mask_id: the token of a row that is to be drafted.
        opens: whether a block's first row is the last token instead.
        page_size: tokens per page.
    """

    def __init__(self, rows: int, mask_id: int, opens: bool, page_size: int):
        super().__init__()
        self.rows, self.mask_id, self.opens, self.page_size = rows, mask_id, opens, page_size

    def forward(
        self, last: Tensor, lens: Tensor, active: Tensor, block_table: Tensor
    ) -> tuple[Tensor, ...]:
        """last [R], the last token; lens and active [R], block_table [R, M] -> `Blocked`."""
        num_reqs = lens.shape[0]
        starts = torch.arange(num_reqs + 1, device=lens.device, dtype=torch.int32) * self.rows
        positions, slots, seq_lens = flat_metadata(
            lens, active, block_table, starts, num_reqs * self.rows, self.page_size
        )
        masks = last.new_full((num_reqs, self.rows), self.mask_id)
        ids = torch.cat([last[:, None], masks[:, 1:]], 1) if self.opens else masks
        return tuple(Blocked(positions, slots, seq_lens, starts, ids.reshape(-1)))


@dataclass(frozen=True, kw_only=True)
class Blocks(Drafting):
    """K drafts of one pass over a block.

    Attributes:
        mask_id: the mask's token.
        opens: whether the first row of a block is the last token, and the pass over all rows gives
            no draft. Otherwise that pass gives the first one, and a block has masks alone.
        skips: whether the first row of a block gives no draft.
        both_ways: whether rows of a block see later ones, for the declaration.
        has_bias: whether the piece `draft_bias` adds to each draft's logits what follows from the
            draft before it.
        has_confidence: whether a head says how sure a draft is, for the declaration.
    """

    mask_id: int = 0
    opens: bool = True
    skips: bool = True
    both_ways: bool = True
    has_bias: bool = False
    has_confidence: bool = False

    def rows(self, spec_tokens: int) -> int:
        """Rows of a block that gives K drafts."""
        return spec_tokens + self.skips - (not self.opens)

    @property
    def declared(self) -> dict[str, str]:
        seen = "rows see each other both ways" if self.both_ways else "rows see earlier ones"
        first = "the last token and masks" if self.opens else "masks"
        count = f"K{self.rows(0):+d}" if self.rows(0) else "K"
        bias = "; each follows from the one before by a bias" if self.has_bias else ""
        sure = {"confidence": "of a head, which no step reads"} if self.has_confidence else {}
        return {
            **super().declared,
            "drafts": f"one pass over {count} rows ({first}, token {self.mask_id}); {seen}{bias}",
            **sure,
        }

    def pieces(self, key: StepKey, page_size: int, vocab_size: int) -> dict[str, nn.Module]:
        rows = max(self.rows(key.spec_tokens), 1)
        return {"block_rows": BlockRows(rows, self.mask_id, self.opens, page_size)}

    def drafts(self, step: Step, inputs: DraftInputs) -> list[Tensor]:
        """K drafts [R]; the pass over all rows runs in any case, for what it keeps."""
        found: list[Tensor] = []
        if self.opens:
            step.pieces.drafts[0](inputs.ids, inputs.features, *inputs.metadata)
        else:
            found = [self.run_layer(step, 0, inputs)[1]][: step.key.spec_tokens]
        count = step.key.spec_tokens - len(found)
        return [*found, *self._block(step, inputs, len(found), count)] if count else found

    def _block(self, step: Step, inputs: DraftInputs, first: int, count: int) -> list[Tensor]:
        """Drafts `first` to `first` + `count` - 1 of each request, [R] each."""
        pieces, begun, num_reqs = step.pieces, inputs.begun, step.key.bucket.num_reqs
        last = aten.index_select.default(inputs.ids, 0, inputs.anchors)
        requests = (inputs.accepted.lens, begun.active, begun.block_table)
        block = unpack(Blocked, pieces.block_rows(last, *requests))
        rows = count + self.skips
        metadata = step.publish(block, inputs.metadata, num_reqs * rows)
        features = aten.view.default(pieces.later_draft(block.ids, *metadata), [num_reqs, rows, -1])
        if self.skips:
            features = aten.slice.Tensor(features, 1, 1, rows)
        logits = pieces.draft_heads[0](aten.reshape.default(features, [num_reqs * count, -1]))
        if not self.has_bias:
            return step.choice.pick_rows(step, first, count, logits, inputs)
        logits, found = aten.view.default(logits, [num_reqs, count, -1]), [last]
        for place in range(count):
            row = (aten.select.int(logits, 1, place), aten.select.int(features, 1, place))
            biased = pieces.draft_bias(*row, found[-1])
            found.append(step.choice.pick(step, first + place, biased, inputs))
        return found[1:]

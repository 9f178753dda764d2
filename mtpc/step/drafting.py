"""Drafts of MTP layers: how K drafts come about, as a value that a step is made of.

`Drafting` is one MTP layer, over all rows and then on single rows. `mtpc.step.chaining` has several
truly chained layers, `mtpc.step.blocks` drafters that make all drafts in one pass, and
`mtpc.step.single_position` a drafter that keeps no state. A value of these classes is all that a
step knows of a drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from mtpc.layout import StepKey
from mtpc.step.metadata import ChainMetadata
from mtpc.step.records import Accepted, Begun, Chained, Metadata, unpack

if TYPE_CHECKING:
    from mtpc.step.step import Step

aten = torch.ops.aten


@dataclass(frozen=True)
class DraftInputs:
    """What the MTP layers draft from.

    Attributes:
        begun: the step's inputs.
        accepted: the outcome of acceptance.
        masks: int32 [R, K, W], the tokens that each draft may be; None: all.
        metadata: of the rows below.
        ids: int64 [T], the token after each row.
        features: [T, ...], of each row.
        anchors: int64 [R], the row of each request's last accepted token.
    """

    begun: Begun
    accepted: Accepted
    masks: Tensor | None
    metadata: Metadata
    ids: Tensor
    features: Tensor
    anchors: Tensor


@dataclass(frozen=True)
class Drafting:
    """Drafts by one MTP layer, which is recycled; or none.

    Attributes:
        num_layers: MTP layers; 0 decodes plainly.
        has_entry: whether the target gives a second result, of which the piece `draft_entry` makes
            what the first draft is fed.
        has_vocabulary: whether drafts come from a head with rows for some tokens only (the pieces
            `draft_tokens` and `draft_logits`).
        hands_on: whether a layer gives a second value for each row, which the piece `later_draft`
            takes in place of the layer.
        head_reads: which result of a layer its head takes.
    """

    head_reads: ClassVar[int] = 0
    num_layers: int
    has_entry: bool = False
    has_vocabulary: bool = False
    hands_on: bool = False

    @property
    def declared(self) -> dict[str, str]:
        """What the drafter reads and keeps, and how K drafts come about, in words."""
        if self.num_layers == 0:
            return {"drafts": "none"}
        entry = "hidden states of some of the target's layers" if self.has_entry else "its features"
        vocabulary = "a part of the vocabulary" if self.has_vocabulary else "the whole vocabulary"
        return {
            "reads": f"of the target: {entry}; the token after each row",
            "keeps": "keys and values, or another state, of each row",
            "drafts": "a pass over all rows, then K - 1 passes over single rows",
            "head": vocabulary,
        }

    def pieces(self, key: StepKey, page_size: int, vocab_size: int) -> dict[str, nn.Module]:
        """The pieces of a step that are not the model's, by their names in `StepPieces`."""
        return {"chain_metadata": ChainMetadata(key, page_size)}

    def enter(self, step: Step, results: Any) -> tuple[Tensor, Tensor]:
        """The target's results -> its features [T, ...], and what the first draft is fed."""
        if not self.has_entry:
            return results, results
        return results[0], step.pieces.draft_entry(results[1])

    def drafts(self, step: Step, inputs: DraftInputs) -> list[Tensor]:
        """K drafts [R]: the MTP layers over all rows, then single-row steps of the last layer."""
        if self.num_layers == 0:
            return []
        inputs, given, drafts = self.over_rows(step, inputs)
        metadata, lens, last = inputs.metadata, inputs.accepted.lens, self.num_layers - 1
        features, *handed = (aten.index_select.default(x, 0, inputs.anchors) for x in given)
        for index in range(self.num_layers, step.key.spec_tokens):
            begun = inputs.begun
            results = step.pieces.chain_metadata(lens, begun.active, begun.block_table)
            chained = unpack(Chained, results)
            metadata, lens = step.publish(chained, metadata, step.key.bucket.num_reqs), chained.lens
            run = step.pieces.later_draft if handed else step.pieces.drafts[last]
            features = run(drafts[-1], features, *metadata, *handed)
            logits = step.pieces.draft_heads[last](features)
            drafts.append(step.choice.pick(step, index, logits, inputs))
        return drafts[: step.key.spec_tokens]

    def over_rows(
        self, step: Step, inputs: DraftInputs
    ) -> tuple[DraftInputs, tuple[Tensor, ...], list[Tensor]]:
        """The drafts of layers that run over all rows.

        Returns:
            The inputs with the rows that the layers ran over, the results of the last layer
            [T, ...], and the drafts, [R] each.
        """
        given, draft = self.run_layer(step, 0, inputs)
        return inputs, given, [draft]

    def run_layer(
        self, step: Step, layer: int, inputs: DraftInputs
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """One draft by one MTP layer over all rows, which also writes their KV.

        Returns:
            A tuple of the layer's features [T, ...] and, if the layer hands something on, that
            value; and the draft [R]. Where K changes between steps, a step with fewer drafts than
            layers runs this layer for its KV alone. Then the token after each anchor is returned.
        """
        results = step.pieces.drafts[layer](inputs.ids, inputs.features, *inputs.metadata)
        given = (results[0], results[1]) if self.hands_on else (results,)
        following = aten.index_select.default(inputs.ids, 0, inputs.anchors)
        if layer < step.key.spec_tokens:
            logits = step.pieces.draft_heads[layer](given[0])
            logits = aten.index_select.default(logits, 0, inputs.anchors)
            following = step.choice.pick(step, layer, logits, inputs)
        return given, following

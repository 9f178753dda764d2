"""One MTP iteration as a program over explicit buffers: read this file first.

begin -> target -> choose -> accept -> drafts[0] over all rows -> K - 1 chained steps -> advance

`Step.forward` reads its inputs from buffers, calls *pieces*, and writes its results to buffers. It
is traced symbolically with the pieces as leaves. A piece of the model (target, heads, MTP layers)
is exported once for all buckets and all K. The other pieces are in the modules beside this one,
each with what it computes in closed form.

This file is the greedy step with one MTP layer. `sampling` has what differs when tokens are
sampled, and `chaining` what differs with several MTP layers.

L is the committed length, the tokens whose KV is final. After a step that accepts a drafts it is
L' = L + a + 1, and the chained draft step i >= 1 works on the single row at position L' + i - 1.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from mtpc.layout import StepKey
from mtpc.step import chaining, sampling, single_position
from mtpc.step.accept import AcceptInputs
from mtpc.step.model import Chaining
from mtpc.step.records import (
    Accepted,
    Begun,
    Chained,
    Chosen,
    LogitsIndices,
    Metadata,
    Rows,
    unpack,
)

aten = torch.ops.aten


class StepPieces(nn.Module):
    """The leaves of a step, as modules or as traces of them. `Step.forward` connects them."""

    begin: nn.Module
    target: nn.Module
    target_head: nn.Module
    logits_rows: nn.Module
    choose: nn.Module
    accept: nn.Module
    dictate: nn.Module  # Only with synthetic acceptance.
    record: nn.Module
    drafts: nn.ModuleList
    later_draft: nn.Module  # Only where a draft hands something on.
    draft_heads: nn.ModuleList
    draft_entry: nn.Module  # This piece and the next two: only of a drafter of its own.
    draft_tokens: nn.Module
    draft_logits: nn.Module
    chain_metadata: nn.Module
    pick: nn.Module
    widen: nn.Module  # This piece and the next two: only with several MTP layers.
    move_up: nn.Module
    keep_last: nn.Module
    advance: nn.Module


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


class Step(nn.Module):
    """The iteration of one bucket over bound buffers; `forward` takes and returns nothing.

    Args:
        key: phase, bucket and K.
        pieces: the leaf modules.
        buffers: module whose submodules `state` and `batch` hold the step's tensors.
        draft_index: MTP layer of each draft step.
        chaining: how one draft follows from another.
    """

    def __init__(
        self,
        key: StepKey,
        pieces: StepPieces,
        buffers: nn.Module,
        draft_index: tuple[int, ...],
        chaining: Chaining,
    ):
        super().__init__()
        self.key, self.pieces = key, pieces
        self.draft_index, self.chaining = draft_index, chaining
        self.state: Any = buffers.state
        self.batch: Any = buffers.batch
        self.samples = hasattr(self.state, "sampling_ints")
        self.num_layers = len(pieces.drafts)

    def forward(self) -> None:
        begun = self._begin()
        metadata = self.publish(begun, begun, self.key.bucket.num_tokens)
        features, fed = self._run_target(begun, metadata)
        accepted = self._accept(features, begun, metadata)
        masks = sampling.draft_masks(self, accepted) if self.samples else None
        rows = (metadata, accepted.next_ids, fed, accepted.anchors)
        drafts = self._propose(DraftInputs(begun, accepted, masks, *rows))
        last_token = aten.index_select.default(accepted.next_ids, 0, accepted.anchors)
        next_token_ids = aten.stack.default([last_token, *drafts], 1)
        self._advance(begun, accepted, next_token_ids)

    def _run_target(self, begun: Begun, metadata: Metadata) -> tuple[Tensor, Tensor]:
        """The target's features [T, ...], and what the first draft is fed."""
        features = self.pieces.target(begun.ids, *metadata)
        if not hasattr(self.pieces, "draft_entry"):
            return features, features
        return features[0], self.pieces.draft_entry(features[1])

    def _begin(self) -> Begun:
        """Gather the batch's requests, and the tokens to verify."""
        state, batch = self.state, self.batch
        inputs = [batch.state_indices, state.committed_lens]
        inputs += [state.remaining_tokens, state.token_ids]
        if self.key.phase == "prefill":
            inputs += [batch.prompt_ids, batch.num_input, batch.is_decoding]
        return unpack(Begun, self.pieces.begin(*inputs, state.block_table))

    def publish(self, rows: Rows, requests: Metadata, num_tokens: int) -> Metadata:
        """Write `rows` to the batch's buffers; return views of their used parts as metadata.

        Args:
            rows: the rows of the next forward.
            requests: gives the other fields, which are the same for all forwards of a step.
            num_tokens: T of the next forward.
        """
        num_reqs = self.key.bucket.num_reqs
        names = [field.name for field in fields(Rows)]
        buffers = [getattr(self.batch, name) for name in names]
        counts = (num_tokens, num_tokens, num_reqs, num_reqs + 1)
        views = {}
        for name, buffer, count in zip(names, buffers, counts, strict=True):
            aten.copy_.default(aten.slice.Tensor(buffer, 0, 0, count), getattr(rows, name))
            views[name] = aten.slice.Tensor(buffer, 0, 0, count)
        return Metadata(
            **views,
            block_table=requests.block_table,
            state_slots=requests.state_slots,
            certain_lens=requests.certain_lens,
        )

    def _accept(self, features: Tensor, begun: Begun, metadata: Metadata) -> Accepted:
        """Choose the target's tokens, and accept the drafts that equal them."""
        state, batch = self.state, self.batch
        logits = self.pieces.target_head(features)
        limits = (state.remaining_tokens, state.stop_ids, batch.state_indices)
        if self.samples:
            chosen, logits = sampling.choose(self, logits, begun)
        else:
            chosen = self._choose(logits)
        prompts: tuple[Tensor, ...] = ()
        if self.key.phase == "prefill":
            prompts = (batch.next_prompt_id, batch.is_decoding)
        ids = begun.ids
        if hasattr(state, "synthetic_draws") and self.key.spec_tokens:
            tokens, ids = self._dictate(chosen.tokens, begun, metadata.query_start_loc)
            chosen = Chosen(tokens, chosen.finite)
        reports = (batch.out_token_ids, batch.num_accepted, batch.num_emitted, batch.stop_reason)
        choices = (chosen.tokens, chosen.finite)
        rows = (ids, metadata.query_start_loc, begun.context_lens, begun.active)
        results = self.pieces.accept(*AcceptInputs(*reports, *choices, *rows, *limits), *prompts)
        if self.samples:
            sampling.record(self, logits, chosen, begun)
        return unpack(Accepted, results)

    def _dictate(self, tokens: Tensor, begun: Begun, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Rewrite choices and ids: acceptance then accepts as many drafts as the table says."""
        state, batch = self.state, self.batch
        given = (tokens, begun.ids, starts, begun.context_lens, begun.active, batch.state_indices)
        decodes = (batch.is_decoding,) if self.key.phase == "prefill" else ()
        results = self.pieces.dictate(*given, state.token_ids, state.synthetic_draws, *decodes)
        return results[0], results[1]

    def _choose(self, logits: Tensor) -> Chosen:
        """The target's token for K + 1 rows of each request.

        A prefill step packs the rows that get logits, so that kernels can leave out the rows after
        the last one. It then spreads the chosen tokens to K + 1 for each request.
        """
        if self.key.phase == "decode":
            return unpack(Chosen, self.pieces.choose(logits))
        found = self.logits_rows()
        packed = self.pieces.choose(aten.index_select.default(logits, 0, found.indices))
        chosen = unpack(Chosen, packed)
        return Chosen(*(aten.index_select.default(each, 0, found.places) for each in chosen))

    def logits_rows(self) -> LogitsIndices:
        """The rows of a prefill step that get logits; writes where each request's begin."""
        batch = self.batch
        results = self.pieces.logits_rows(batch.query_start_loc, batch.is_decoding)
        found = unpack(LogitsIndices, results)
        aten.copy_.default(batch.logits_start_loc, found.start_loc)
        return found

    def _propose(self, inputs: DraftInputs) -> list[Tensor]:
        """K drafts [R]: the MTP layer over all rows, then single-row steps of the last layer."""
        if self.num_layers == 0:
            return []
        if self.chaining == "position":
            return single_position.drafts(self, inputs)
        if self.num_layers == 1:
            given, draft = self.draft_rows(0, inputs)
            drafts = [draft]
        else:
            inputs, given, drafts = chaining.draft_rows(self, inputs)
        metadata, lens = inputs.metadata, inputs.accepted.lens
        features, *handed = (aten.index_select.default(x, 0, inputs.anchors) for x in given)
        for step in range(self.num_layers, self.key.spec_tokens):
            layer, begun = self.draft_index[step], inputs.begun
            results = self.pieces.chain_metadata(lens, begun.active, begun.block_table)
            chained = unpack(Chained, results)
            metadata, lens = self.publish(chained, metadata, self.key.bucket.num_reqs), chained.lens
            run = self.pieces.later_draft if handed else self.pieces.drafts[layer]
            features = run(drafts[-1], features, *metadata, *handed)
            drafts.append(self.pick(step, self.pieces.draft_heads[layer](features), inputs))
        return drafts[: self.key.spec_tokens]

    def draft_rows(self, step: int, inputs: DraftInputs) -> tuple[tuple[Tensor, ...], Tensor]:
        """Draft `step` by one MTP layer over all rows, which also writes their KV.

        Returns:
            A tuple of the layer's features [T, ...] and, if the layer hands something on, that
            value; and the draft [R]. Where K changes between steps, a step with fewer drafts than
            layers runs this layer for its KV alone. Then the token after each anchor is returned.
        """
        layer = self.draft_index[step]
        results = self.pieces.drafts[layer](inputs.ids, inputs.features, *inputs.metadata)
        given = (results[0], results[1]) if hasattr(self.pieces, "later_draft") else (results,)
        following = aten.index_select.default(inputs.ids, 0, inputs.anchors)
        if step < self.key.spec_tokens:
            logits = self.pieces.draft_heads[layer](given[0])
            logits = aten.index_select.default(logits, 0, inputs.anchors)
            following = self.pick(step, logits, inputs)
        return given, following

    def pick(self, step: int, logits: Tensor, inputs: DraftInputs) -> Tensor:
        """Choose draft `step` of each request: logits [R, V] or [R, V_d] -> token ids [R]."""
        has_own = hasattr(self.pieces, "draft_tokens")
        if self.samples:
            logits = self.pieces.draft_logits(logits) if has_own else logits
            return sampling.pick(self, step, logits, inputs)
        token = self.pieces.pick(logits)
        return self.pieces.draft_tokens(token) if has_own else token

    def _advance(self, begun: Begun, accepted: Accepted, next_token_ids: Tensor) -> None:
        """Write the state that the next step starts from."""
        state, slots = self.state, begun.state_slots
        rows = (state.committed_lens, state.token_ids, state.remaining_tokens)
        self.pieces.advance(*rows, slots, accepted.lens, next_token_ids, accepted.remaining)

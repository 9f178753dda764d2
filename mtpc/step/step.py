"""One MTP iteration as a program over explicit buffers: read this file first.

verify (target forward on R*Q tokens) -> choose -> accept -> propose (the draft layer over the
verified rows, then K-1 chained single-row steps) -> advance. `Step.forward` is traced symbolically;
the modules it calls are leaves that `capture.trace` exports one by one, so that the target and the
draft layer are traced once for all buckets and all K. The leaves that are not the model's are in
the modules beside this one, with what they compute in closed form.

L is the committed length, the tokens whose KV is final; after a step that accepted a drafts it is
L' = L + a + 1, and draft step i >= 1 works on the single row at position L' + i - 1.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from mtpc.layout import StepKey
from mtpc.step.choose import NO_POSITION

aten = torch.ops.aten


class Metadata(Protocol):
    """What attention needs to know of a forward over flat tokens (all tensors on the device).

    positions int64 [T]; slot_mapping int64 [T] (NO_SLOT: write nowhere); block_table int32
    [R, M]; seq_lens int32 [R] (0: request off); query_start_loc int32 [R+1]; state_slots int64
    [R], rows of per-request state (SCRATCH_SLOT where off); certain_lens int32 [R], a request's
    first rows of the target's forward that no later step takes back: all of a prompt's, the first
    of a verify step's, 0 where off.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    state_slots: torch.Tensor
    certain_lens: torch.Tensor


class StepModel(Protocol):
    """What a model family provides to be stepped; each member is an nn.Module to be traced.

    `features` is whatever the family feeds from one forward to the next draft: the hidden state
    after or before the final norm, one stream or several. Only the head turns it into logits.
    """

    target: nn.Module  # (ids[T], *metadata) -> features [T, ...]
    target_head: nn.Module  # features [T, ...] -> logits [T, V]
    drafts: nn.ModuleList  # each (ids[T], features, *metadata) -> features [T, ...]
    draft_heads: nn.ModuleList  # each features -> logits [T, V]
    vocab_size: int

    def draft_index(self, step: int) -> int:
        """Which MTP layer draft step `step` (from 0) uses."""
        ...


class StepPieces(nn.Module):
    """The leaves of a step, as modules or as their traces; see `Step` for how they connect."""

    begin: nn.Module
    target: nn.Module
    target_head: nn.Module
    choose: nn.Module
    accept: nn.Module
    record: nn.Module
    logits_rows: nn.Module
    drafts: nn.ModuleList
    draft_heads: nn.ModuleList
    chain_metadata: nn.Module
    pick: nn.Module
    widen: nn.Module  # Where there are several MTP layers; so are the next two.
    move_up: nn.Module
    keep_last: nn.Module
    advance: nn.Module


class Step(nn.Module):
    """The iteration of one bucket over bound buffers; `forward` takes and returns nothing.

    Args:
        key: phase, bucket and K.
        pieces: the leaf modules.
        buffers: module whose submodules `state` and `batch` hold the step's tensors.
        draft_index: MTP layer of each draft step.
    """

    def __init__(
        self, key: StepKey, pieces: StepPieces, buffers: nn.Module, draft_index: tuple[int, ...]
    ):
        super().__init__()
        self.key, self.draft_index = key, draft_index
        self.pieces = pieces
        self.state: Any = buffers.state
        self.batch: Any = buffers.batch
        self.samples = hasattr(self.state, "sampling_ints")
        self.window = len(pieces.drafts) - 1

    def forward(self) -> None:
        ids, context_lens, active, block_table, state_slots, certain_lens, *fresh = self._begin()
        rows = (block_table, state_slots, certain_lens)
        metadata = self._publish(fresh, rows, self.key.bucket.num_tokens)
        features = self.pieces.target(ids, *metadata)
        next_ids, anchors, remaining, lens, chosen_rows = self._accept(
            features, ids, metadata[4], context_lens, active, state_slots
        )
        rounds = (next_ids, features, metadata, anchors)
        masks = self._draft_masks(chosen_rows)
        if self.window > 0:
            rounds = self._widen(rounds, context_lens, active)
        drafts = self._propose(*rounds, (lens, active, rows, masks))
        last_token = aten.index_select.default(next_ids, 0, anchors)
        next_token_ids = aten.stack.default([last_token, *drafts], 1)
        self.pieces.advance(
            self.state.committed_lens,
            self.state.token_ids,
            self.state.remaining_tokens,
            state_slots,
            lens,
            next_token_ids,
            remaining,
        )

    def _begin(self):  # type: ignore[no-untyped-def]
        state, batch = self.state, self.batch
        rows = (batch.state_indices, state.committed_lens, state.remaining_tokens, state.token_ids)
        prompts: tuple[Any, ...] = ()
        if self.key.phase == "prefill":
            prompts = (batch.prompt_ids, batch.num_input, batch.is_decoding)
        out = self.pieces.begin(*rows, *prompts, state.block_table)
        return [out[i] for i in range(10)]

    def _publish(self, fresh, rows, num_tokens):  # type: ignore[no-untyped-def]
        """Write fresh metadata into the static buffers and return views of what is in use."""
        positions, slot_mapping, seq_lens, query_start_loc = fresh
        num_reqs = self.key.bucket.num_reqs
        views = []
        for buffer, value, count in (
            (self.batch.positions, positions, num_tokens),
            (self.batch.slot_mapping, slot_mapping, num_tokens),
            (self.batch.seq_lens, seq_lens, num_reqs),
            (self.batch.query_start_loc, query_start_loc, num_reqs + 1),
        ):
            aten.copy_.default(aten.slice.Tensor(buffer, 0, 0, count), value)
            views.append(aten.slice.Tensor(buffer, 0, 0, count))
        block_table, *per_request = rows
        return views[0], views[1], block_table, views[2], views[3], *per_request

    def _accept(self, features, ids, starts, context_lens, active, slots):  # type: ignore[no-untyped-def]
        state, batch = self.state, self.batch
        logits = self.pieces.target_head(features)
        limits = (state.remaining_tokens, state.stop_ids, batch.state_indices)
        rows = (ids, starts, context_lens, active)
        prompts: tuple[Any, ...] = ()
        if self.key.phase == "decode":
            chosen = self._choose(logits, None, ids, slots)
        else:
            chosen, logits = self._choose_selected(logits, ids, slots)
            prompts = (batch.next_prompt_id, batch.is_decoding)
        reports = (batch.out_token_ids, batch.num_accepted, batch.num_emitted, batch.stop_reason)
        out = self.pieces.accept(*reports, *chosen, *rows, *limits, *prompts)
        if self.samples:
            self._record(logits, chosen[0], slots)
        return [out[i] for i in range(5)]

    def _choose_selected(self, logits, ids, slots):  # type: ignore[no-untyped-def]
        """Prefill's choices as a rectangle, K + 1 to a request, and their logits if it samples.

        The head's rows are packed, so that kernels can leave out what is behind the last one.
        """
        batch = self.batch
        out = self.pieces.logits_rows(batch.query_start_loc, batch.is_decoding)
        indices, places, is_first = out[0], out[2], out[3]
        aten.copy_.default(batch.logits_start_loc, out[1])
        logits = aten.index_select.default(logits, 0, indices)
        if self.samples:
            logits = aten.index_select.default(logits, 0, places)
            rows = aten.index_select.default(indices, 0, places)
            return self._choose(logits, rows, ids, slots, is_first), logits
        chosen = self._choose(logits, indices, ids, slots)
        return [aten.index_select.default(each, 0, places) for each in chosen], None

    def _choose(self, logits, anchors, ids, slots, wanted=None):  # type: ignore[no-untyped-def]
        """The target's token for each row of logits; `anchors` are the rows, None is all.

        Of rows that are not wanted none is sampled.
        """
        if not self.samples:
            out = self.pieces.choose(logits)
            return out[0], out[1]
        count = self.key.bucket.num_tokens
        positions = aten.slice.Tensor(self.batch.positions, 0, 0, count)
        if anchors is not None:
            ids = aten.index_select.default(ids, 0, anchors)
            positions = aten.index_select.default(positions, 0, anchors)
        if wanted is not None:
            positions = aten.where.ScalarOther(wanted, positions, NO_POSITION)
        rows = self._sampling_rows()
        if hasattr(self.batch, "token_mask"):
            rows = (*rows, self.batch.token_mask)
        out = self.pieces.choose(logits, ids, positions, slots, *rows)
        return out[0], out[1]

    def _sampling_rows(self):  # type: ignore[no-untyped-def]
        """The per-request rows that `mtpc::sample` takes, in its order."""
        state = self.state
        return (
            state.sampling_floats,
            state.sampling_ints,
            state.bias_ids,
            state.bias_values,
            state.allowed_tokens,
            state.prompt_tokens,
            state.output_counts,
            state.stop_ids,
        )

    def _record(self, logits, chosen, slots) -> None:  # type: ignore[no-untyped-def]
        state, batch = self.state, self.batch
        emitted_ids = aten.view.default(chosen, [self.key.bucket.num_reqs, self.key.max_emitted])
        reports = (batch.out_logprobs, batch.out_top_ids, batch.out_top_logprobs)
        rows = (state.sampling_ints, state.output_counts, *reports)
        self.pieces.record(logits, emitted_ids, batch.num_emitted, slots, *rows)

    def _draft_masks(self, rows):  # type: ignore[no-untyped-def]
        """The mask of each draft to be made, [R, K, W]: that of the row which was accepted last."""
        if not hasattr(self.batch, "draft_mask"):
            return None
        return aten.index_select.default(self.batch.draft_mask, 0, rows)

    def _pick(self, logits, step, chain):  # type: ignore[no-untyped-def]
        """The draft that follows `lens` + `step` + 1 tokens of each request."""
        if not self.samples:
            return self.pieces.pick(logits)
        lens, _, (_, slots, _), masks = chain
        before = aten.add.Tensor(lens, step) if step else lens
        rows = self._sampling_rows()
        if masks is not None:
            rows = (*rows, aten.select.int(masks, 1, step))
        return self.pieces.pick(logits, before, slots, *rows)

    def _widen(self, rounds, context_lens, active):  # type: ignore[no-untyped-def]
        """Rows that several MTP layers work on: some earlier ones too, which rested on drafts."""
        ids, features, metadata, anchors = rounds
        _, _, block_table, _, starts, slots, certain_lens = metadata
        kept = (self.state.chain_ids, self.state.chain_features)
        lens = (context_lens, active)
        out = self.pieces.widen(ids, features, anchors, *lens, block_table, slots, starts, *kept)
        ids, features, anchors, *fresh = [out[i] for i in range(7)]
        num_reqs, num_tokens = self.key.bucket.num_reqs, self.key.bucket.num_tokens
        rows = (block_table, slots, certain_lens)
        metadata = self._publish(fresh, rows, num_tokens + num_reqs * self.window)
        self.pieces.keep_last(ids, features, anchors, metadata[4], slots, *kept)
        return ids, features, metadata, anchors

    def _propose(self, ids, features, metadata, anchors, chain):  # type: ignore[no-untyped-def]
        """K drafts: the first MTP layers over all rows, then single-row steps of the last one.

        Where K changes between steps it may be less than the number of layers. All of them run
        nevertheless, for a step of more drafts needs their KV of every row; what only a draft
        would need is dead code.
        """
        row_lens, active, rows, _ = chain
        last, count = self.window, self.key.spec_tokens
        drafts = []
        for step in range(max(count, self.window + 1)):
            layer = self.draft_index[step]
            if step > last:
                out = self.pieces.chain_metadata(row_lens, active, rows[0])
                row_lens = out[4]
                fresh = [out[i] for i in range(4)]
                metadata = self._publish(fresh, rows, self.key.bucket.num_reqs)
            features = self.pieces.drafts[layer](ids, features, *metadata)
            following = aten.index_select.default(ids, 0, anchors) if step <= last else ids
            if step < count:
                logits = self.pieces.draft_heads[layer](features)
                if step <= last:  # Only the row of the last accepted token goes to the head.
                    logits = aten.index_select.default(logits, 0, anchors)
                following = self._pick(logits, step, chain)
                drafts.append(following)
            if step < last:
                ids = self.pieces.move_up(ids, anchors, active, following)
                continue
            ids = following
            if step == last:
                features = aten.index_select.default(features, 0, anchors)
        return drafts

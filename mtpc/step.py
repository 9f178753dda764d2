"""One MTP iteration as a program over explicit buffers: read this file first.

verify (target forward on R*Q tokens) -> accept -> propose (the draft layer over the verified
rows, then K-1 chained single-row steps) -> advance. `Step.forward` is traced symbolically; the
modules it calls are leaves that `capture.trace` exports one by one, so that the target and the
draft layer are traced once for all buckets and all K.

Closed forms (L = committed length, the tokens whose KV is final; a = accepted drafts):
positions = L + j; slot = block_table[pos // P] * P + pos % P; seq_lens = L + Q; after the step
L' = L + a + 1; draft step i >= 1 works on the single row at position L' + i - 1.

Greedy acceptance: the longest prefix of drafts that equals the target's argmax, then the argmax
after it as bonus token. An accepted draft EQUALS the target's argmax, so the emitted tokens are
the first a + 1 argmaxes, and they are also the draft layer's shifted inputs.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from mtpc.layout import NO_SLOT, NULL_PAGE, SCRATCH_SLOT, StepKey

aten = torch.ops.aten

RUNNING, STOPPED_BY_LENGTH, STOPPED_BY_TOKEN, STOPPED_BY_NONFINITE = range(4)
"""Values of `batch.stop_reason`."""


class Metadata(Protocol):
    """What attention needs to know of a forward over flat tokens (all tensors on the device).

    positions int64 [T]; slot_mapping int64 [T] (NO_SLOT: write nowhere); block_table int32
    [R, M]; seq_lens int32 [R] (0: request off); query_start_loc int32 [R+1].
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor


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


def flat_metadata(
    context_lens: torch.Tensor,
    active: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_tokens: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, slots and lengths of a flat batch, from lengths and block tables alone.

    Args:
        context_lens: int32 [R], committed tokens per request.
        active: bool [R]; an inactive request gets no slots and length 0.
        block_table: int32 [R, M].
        query_start_loc: int32 [R+1], ascending from 0.
        num_tokens: flat tokens of the bucket; those past query_start_loc[R] are padding.
        page_size: tokens per page.

    Returns:
        positions int64 [T] (0 where padded), slot_mapping int64 [T] (NO_SLOT where padded or
        where no page is reserved), seq_lens int32 [R].
    """
    token = torch.arange(num_tokens, device=context_lens.device)
    # Requests that end at or before a token: its request's index, without a device-side search.
    request = (token[:, None] >= query_start_loc[None, 1:]).sum(1)
    in_batch = request < context_lens.shape[0]
    request = request.clamp(max=context_lens.shape[0] - 1)
    position = context_lens[request].long() + token - query_start_loc[request].long()
    blocks = block_table.shape[1]
    live = active[request] & in_batch & (position < blocks * page_size)
    position = torch.where(live, position, 0)
    page = block_table[request, position // page_size].long()
    has_page = live & (page != NULL_PAGE)
    slot = torch.where(has_page, page * page_size + position % page_size, NO_SLOT)
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    seq_lens = torch.where(active, context_lens + query_lens, 0)
    return position, slot, seq_lens.int()


class BeginDecode(nn.Module):
    """Gather the rows of this batch and form the verify inputs.

    Returns ids [R*Q], context_lens [R], active [R], block_table [R, M], positions [R*Q],
    slot_mapping [R*Q], seq_lens [R], query_start_loc [R+1].
    """

    def __init__(self, key: StepKey, page_size: int, vocab_size: int):
        super().__init__()
        self.key, self.page_size, self.vocab_size = key, page_size, vocab_size

    def forward(self, state_indices, committed_lens, remaining_tokens, token_ids, block_table):  # type: ignore[no-untyped-def]
        num_reqs, query_len = self.key.bucket.num_reqs, self.key.bucket.query_len
        active = (state_indices != SCRATCH_SLOT) & (remaining_tokens[state_indices] > 0)
        context_lens = torch.where(active, committed_lens[state_indices], 0)
        blocks = block_table[state_indices]
        rows = token_ids[state_indices][:, :query_len]
        # A padded row may hold any garbage: never let it index the embedding.
        ids = torch.where(active[:, None], rows, 0).clamp(0, self.vocab_size - 1).reshape(-1)
        starts = torch.arange(num_reqs + 1, device=ids.device, dtype=torch.int32) * query_len
        positions, slots, seq_lens = flat_metadata(
            context_lens, active, blocks, starts, self.key.bucket.num_tokens, self.page_size
        )
        return ids, context_lens, active, blocks, positions, slots, seq_lens, starts


class BeginPrefill(nn.Module):
    """As `BeginDecode`, for prompt tokens that the host packed into `batch.prompt_ids` [T]."""

    def __init__(self, key: StepKey, page_size: int, vocab_size: int):
        super().__init__()
        self.key, self.page_size, self.vocab_size = key, page_size, vocab_size

    def forward(  # type: ignore[no-untyped-def]
        self,
        state_indices,
        committed_lens,
        remaining_tokens,
        prompt_ids,
        num_input,
        block_table,
    ):
        wanted = (state_indices != SCRATCH_SLOT) & (remaining_tokens[state_indices] > 0)
        num_input = torch.where(wanted, num_input.clamp(0, self.key.bucket.num_tokens), 0)
        active = num_input > 0
        context_lens = torch.where(active, committed_lens[state_indices], 0)
        blocks = block_table[state_indices]
        starts = torch.cat([num_input.new_zeros(1), num_input.cumsum(0).int()])
        ids = prompt_ids.clamp(0, self.vocab_size - 1)
        positions, slots, seq_lens = flat_metadata(
            context_lens, active, blocks, starts, self.key.bucket.num_tokens, self.page_size
        )
        return ids, context_lens, active, blocks, positions, slots, seq_lens, starts


def stop(emitted_ids, num_candidates, active, finite, remaining, stop_ids):  # type: ignore[no-untyped-def]
    """Apply length and stop-token limits to candidate tokens.

    Args:
        emitted_ids: int64 [R, W], candidates in order; the first `num_candidates` count.
        num_candidates: int [R].
        active: bool [R].
        finite: bool [R, W], whether the logits behind each candidate were finite.
        remaining: int32 [R], new tokens the request may still emit.
        stop_ids: int64 [R, E], -1 where unused.

    Returns:
        num_emitted int32 [R] (through the stop token), remaining int32 [R] (0: finished),
        stop_reason int32 [R].
    """
    width = emitted_ids.shape[1]
    column = torch.arange(width, device=emitted_ids.device)
    is_stop = (emitted_ids[:, :, None] == stop_ids[:, None, :]).any(-1)
    first_stop = torch.where(is_stop, column, width).amin(1)
    first_bad = torch.where(finite, width, column).amin(1)
    wanted = torch.minimum(num_candidates.long(), remaining.long())
    num = torch.minimum(torch.minimum(wanted, first_stop + 1), first_bad)
    num = torch.where(active, num, 0)
    by_token = active & (first_stop < num)
    by_nonfinite = active & ~by_token & (first_bad < wanted)
    by_length = active & ~by_token & ~by_nonfinite & (num == remaining)
    reason = (
        by_length * STOPPED_BY_LENGTH
        + by_token * STOPPED_BY_TOKEN
        + by_nonfinite * STOPPED_BY_NONFINITE
    )
    left = torch.where(active & (reason == RUNNING), remaining - num, 0)
    return num.int(), left.int(), reason.int()


class Accept(nn.Module):
    """Greedy acceptance, stops, and the rows that go on.

    Returns next_ids [T] (draft-layer inputs: ids shifted left by one), anchors [R] (flat row of
    the last accepted token), emitted_ids [R, W], num_accepted, num_emitted, stop_reason,
    remaining, new_lens (all [R]).
    """

    def __init__(self, key: StepKey):
        super().__init__()
        self.key = key

    def forward(self, logits, ids, context_lens, active, remaining_tokens, stop_ids, state_indices):  # type: ignore[no-untyped-def]
        num_reqs, query_len = self.key.bucket.num_reqs, self.key.bucket.query_len
        best, target_ids = logits.max(-1)
        target_ids = target_ids.view(num_reqs, query_len)
        finite = torch.isfinite(best).view(num_reqs, query_len)
        drafts = ids.view(num_reqs, query_len)[:, 1:]
        matches = (drafts == target_ids[:, :-1]).long()
        accepted = torch.where(active, matches.cumprod(1).sum(1), 0)
        num_emitted, remaining, reason = stop(
            target_ids,
            accepted + 1,
            active,
            finite,
            remaining_tokens[state_indices],
            stop_ids[state_indices],
        )
        anchors = torch.arange(num_reqs, device=ids.device) * query_len + accepted
        new_lens = torch.where(active, context_lens + accepted + 1, 0).int()
        return (
            target_ids.reshape(-1),
            anchors,
            target_ids,
            accepted.int(),
            num_emitted,
            reason,
            remaining,
            new_lens,
        )


class AcceptPrompt(nn.Module):
    """Prefill's acceptance: prompt tokens are certain; a request whose prompt ends here emits one.

    `next_prompt_id` [R] is the prompt token after this chunk, or -1 where the chunk is the last.
    `logits` [R, V] are those of each request's last row. Returns as `Accept`, with W = 1.
    """

    def forward(  # type: ignore[no-untyped-def]
        self,
        logits,
        ids,
        anchors,
        next_prompt_id,
        context_lens,
        active,
        query_start_loc,
        remaining_tokens,
        stop_ids,
        state_indices,
    ):
        best, picked = logits.max(-1)
        last_chunk = next_prompt_id < 0
        emits = active & last_chunk
        following = torch.where(last_chunk, picked, next_prompt_id)
        finite = torch.isfinite(best)[:, None]
        remaining_before = remaining_tokens[state_indices]
        num_emitted, remaining, reason = stop(
            picked[:, None],
            emits.long(),
            emits,
            finite,
            remaining_before,
            stop_ids[state_indices],
        )
        remaining = torch.where(active & ~last_chunk, remaining_before, remaining)
        next_ids = self._shift(ids, anchors, active, following)
        num_input = query_start_loc[1:] - query_start_loc[:-1]
        new_lens = torch.where(active, context_lens + num_input, context_lens).int()
        accepted = torch.zeros_like(num_emitted)
        emitted = following[:, None]
        return next_ids, anchors, emitted, accepted, num_emitted, reason, remaining, new_lens

    @staticmethod
    def _shift(ids, anchors, active, following):  # type: ignore[no-untyped-def]
        """ids shifted left by one; each active request's last row takes its following token.

        A comparison, not a scatter: a padded request's anchor may coincide with a live one's.
        """
        row = torch.arange(ids.shape[0], device=ids.device)
        is_anchor = (row[:, None] == anchors[None, :]) & active[None, :]
        chosen = (is_anchor * following[None, :]).sum(1)
        return torch.where(is_anchor.any(1), chosen, torch.cat([ids[1:], ids[:1]]))


class PromptAnchors(nn.Module):
    """Flat row of each request's last prompt token [R]; row 0 for a request without tokens."""

    def forward(self, query_start_loc: torch.Tensor) -> torch.Tensor:
        return (query_start_loc[1:].long() - 1).clamp(min=0)


class ChainMetadata(nn.Module):
    """Metadata of one chained draft step: a single row a request at position `lens`.

    Returns positions [R], slot_mapping [R], seq_lens [R], query_start_loc [R+1], lens + 1.
    """

    def __init__(self, key: StepKey, page_size: int):
        super().__init__()
        self.num_reqs, self.page_size = key.bucket.num_reqs, page_size

    def forward(self, lens: torch.Tensor, active: torch.Tensor, block_table: torch.Tensor):  # type: ignore[no-untyped-def]
        starts = torch.arange(self.num_reqs + 1, device=lens.device, dtype=torch.int32)
        positions, slots, seq_lens = flat_metadata(
            lens, active, block_table, starts, self.num_reqs, self.page_size
        )
        return positions, slots, seq_lens, starts, lens + 1


class Pick(nn.Module):
    """Greedy choice: argmax over the vocabulary, [R, V] -> [R]."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)


class Advance(nn.Module):
    """Write the new state rows back; rows that are off write the scratch slot instead."""

    def forward(  # type: ignore[no-untyped-def]
        self,
        committed_lens,
        token_ids,
        remaining_tokens,
        state_indices,
        active,
        new_lens,
        next_token_ids,
        remaining,
    ):
        slots = torch.where(active, state_indices, SCRATCH_SLOT)
        committed_lens.index_copy_(0, slots, new_lens)
        remaining_tokens.index_copy_(0, slots, remaining)
        unused = token_ids[slots][:, next_token_ids.shape[1] :]
        token_ids.index_copy_(0, slots, torch.cat([next_token_ids, unused], 1))


class StepPieces(nn.Module):
    """The leaves of a step, as modules or as their traces; see `Step` for how they connect."""

    begin: nn.Module
    target: nn.Module
    target_head: nn.Module
    accept: nn.Module
    prompt_anchors: nn.Module
    drafts: nn.ModuleList
    draft_heads: nn.ModuleList
    chain_metadata: nn.Module
    pick: nn.Module
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

    def forward(self) -> None:
        ids, context_lens, active, block_table, *fresh = self._begin()
        metadata = self._publish(fresh, block_table, self.key.bucket.num_tokens)
        features = self.pieces.target(ids, *metadata)
        next_ids, anchors, *report, remaining, lens = self._accept(
            features, ids, context_lens, active
        )
        drafts = self._propose(next_ids, features, metadata, anchors, (lens, active, block_table))
        self._report(*report)
        last_token = aten.index_select.default(next_ids, 0, anchors)
        next_token_ids = aten.stack.default([last_token, *drafts], 1)
        self.pieces.advance(
            self.state.committed_lens,
            self.state.token_ids,
            self.state.remaining_tokens,
            self.batch.state_indices,
            active,
            lens,
            next_token_ids,
            remaining,
        )

    def _begin(self):  # type: ignore[no-untyped-def]
        state, batch = self.state, self.batch
        rows = (batch.state_indices, state.committed_lens, state.remaining_tokens)
        if self.key.phase == "decode":
            out = self.pieces.begin(*rows, state.token_ids, state.block_table)
        else:
            out = self.pieces.begin(*rows, batch.prompt_ids, batch.num_input, state.block_table)
        return [out[i] for i in range(8)]

    def _publish(self, fresh, block_table, num_tokens):  # type: ignore[no-untyped-def]
        """Write fresh metadata into the static buffers and return views of what is in use."""
        positions, slot_mapping, seq_lens, query_start_loc = fresh
        num_reqs = self.key.bucket.num_reqs
        views = []
        for buffer, value, rows in (
            (self.batch.positions, positions, num_tokens),
            (self.batch.slot_mapping, slot_mapping, num_tokens),
            (self.batch.seq_lens, seq_lens, num_reqs),
            (self.batch.query_start_loc, query_start_loc, num_reqs + 1),
        ):
            aten.copy_.default(aten.slice.Tensor(buffer, 0, 0, rows), value)
            views.append(aten.slice.Tensor(buffer, 0, 0, rows))
        return views[0], views[1], block_table, views[2], views[3]

    def _accept(self, features, ids, context_lens, active):  # type: ignore[no-untyped-def]
        state, batch = self.state, self.batch
        logits = self.pieces.target_head(features)
        tail = (state.remaining_tokens, state.stop_ids, batch.state_indices)
        if self.key.phase == "decode":
            out = self.pieces.accept(logits, ids, context_lens, active, *tail)
        else:
            starts = batch.query_start_loc
            anchors = self.pieces.prompt_anchors(starts)
            logits = aten.index_select.default(logits, 0, anchors)
            out = self.pieces.accept(
                logits, ids, anchors, batch.next_prompt_id, context_lens, active, starts, *tail
            )
        return [out[i] for i in range(8)]

    def _propose(self, ids, features, metadata, anchors, chain):  # type: ignore[no-untyped-def]
        """K drafts: the draft layer over all verified rows, then K-1 single-row steps."""
        lens, active, block_table = chain
        drafts = []
        for step in range(self.key.spec_tokens):
            layer = self.draft_index[step]
            if step > 0:
                out = self.pieces.chain_metadata(lens, active, block_table)
                lens = out[4]
                fresh = [out[i] for i in range(4)]
                metadata = self._publish(fresh, block_table, self.key.bucket.num_reqs)
            features = self.pieces.drafts[layer](ids, features, *metadata)
            logits = self.pieces.draft_heads[layer](features)
            if step == 0:  # Only the row of the last accepted token goes on.
                logits = aten.index_select.default(logits, 0, anchors)
                features = aten.index_select.default(features, 0, anchors)
            ids = self.pieces.pick(logits)
            drafts.append(ids)
        return drafts

    def _report(self, emitted_ids, num_accepted, num_emitted, reason) -> None:  # type: ignore[no-untyped-def]
        """Leave the results where the host reads them."""
        width = 1 if self.key.phase == "prefill" else self.key.bucket.query_len
        out = aten.slice.Tensor(self.batch.out_token_ids, 1, 0, width)
        aten.copy_.default(out, emitted_ids)
        aten.copy_.default(self.batch.num_accepted, num_accepted)
        aten.copy_.default(self.batch.num_emitted, num_emitted)
        aten.copy_.default(self.batch.stop_reason, reason)

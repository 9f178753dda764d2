"""One MTP iteration as a program over explicit buffers: read this file first.

begin -> target -> choose -> accept -> drafts over all rows -> single-row drafts -> advance

`Step.forward` reads its inputs from buffers, calls *pieces*, and writes its results to buffers. It
is traced symbolically with the pieces as leaves. Those of the model are exported once for all
buckets and all K. The others are in the modules beside this one. Values make the variants of a
step: `Step.choice` (`choose`, `sampling`), `Step.drafting` (`drafting`, `chaining`, `blocks`,
`single_position`, `copying`), `Step.dictates` (`synthetic`), and `Step.has_budget` (`budget`).

L is the committed length, the tokens whose KV is final. After a step that accepts a drafts it is
L' = L + a + 1, and a single-row draft step i >= 1 works on the row at position L' + i - 1.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from mtpc.layout import StepKey
from mtpc.step.accept import AcceptInputs
from mtpc.step.choose import Choice
from mtpc.step.drafting import Drafting, DraftInputs
from mtpc.step.records import Accepted, Begun, LogitsIndices, Metadata, Rows, unpack

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
    count_drafts: nn.Module  # Only with a budget of rows.
    record: nn.Module
    drafts: nn.ModuleList
    draft_heads: nn.ModuleList
    pick: nn.Module
    advance: nn.Module
    later_draft: nn.Module  # This piece and what follows: if `Step.drafting` asks for it.
    draft_entry: nn.Module
    draft_tokens: nn.Module
    draft_logits: nn.Module
    draft_bias: nn.Module
    chain_metadata: nn.Module
    block_rows: nn.Module
    copy_text: nn.Module
    weigh_copies: nn.Module
    widen: nn.Module
    move_up: nn.Module
    keep_last: nn.Module


class Step(nn.Module):
    """The iteration of one bucket over bound buffers; `forward` takes and returns nothing.

    Args:
        key: phase, bucket and K.
        pieces: the leaf modules.
        buffers: module whose submodules `state` and `batch` hold the step's tensors.
        choice: how tokens are chosen.
        drafting: how drafts come about.
        dictates: whether a table says how many drafts are accepted.
        has_budget: whether requests share a budget of rows.
        is_ragged: whether they may have different numbers of rows.
    """

    def __init__(
        self,
        key: StepKey,
        pieces: StepPieces,
        buffers: nn.Module,
        choice: Choice,
        drafting: Drafting,
        dictates: bool = False,
        has_budget: bool = False,
        is_ragged: bool = False,
    ):
        super().__init__()
        self.key, self.pieces = key, pieces
        self.choice, self.drafting = choice, drafting
        self.dictates, self.has_budget, self.is_ragged = dictates, has_budget, is_ragged
        self.state: Any = buffers.state
        self.batch: Any = buffers.batch

    def forward(self) -> None:
        begun = self._begin()
        metadata = self.publish(begun, begun, self.key.bucket.num_tokens)
        results = self.pieces.target(begun.ids, *metadata)
        features, fed = self.drafting.enter(self, results)
        accepted = self._accept(features, begun, metadata)
        masks = self.choice.draft_masks(self, accepted)
        rows = (metadata, accepted.next_ids, fed, accepted.anchors)
        drafts = self.drafting.drafts(self, DraftInputs(begun, accepted, masks, *rows))
        last_token = aten.index_select.default(accepted.next_ids, 0, accepted.anchors)
        next_token_ids = aten.stack.default([last_token, *drafts], 1)
        self._advance(begun, accepted, next_token_ids)

    def _begin(self) -> Begun:
        """Gather the batch's requests, and the tokens to verify."""
        state, batch = self.state, self.batch
        held = [state.committed_lens, state.remaining_tokens, state.token_ids]
        if self.key.phase == "prefill":
            held += [batch.prompt_ids, batch.num_input, batch.is_decoding]
        elif self.is_ragged and self.has_budget:
            held.append(state.draft_counts)
        return unpack(Begun, self.pieces.begin(batch.state_indices, *held, state.block_table))

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
        verdict = self.choice.verify(self, logits, begun, metadata)
        if self.dictates:
            from mtpc.step.synthetic import dictate  # Here, and below: few steps have it.

            verdict = dictate(self, verdict, begun, metadata)
        prompts = (batch.next_prompt_id,) if self.key.phase == "prefill" else ()
        reports = (batch.out_token_ids, batch.num_accepted, batch.num_emitted, batch.stop_reason)
        rows = (verdict.ids, metadata.query_start_loc, begun.context_lens, begun.active)
        limits = (state.remaining_tokens, state.stop_ids, batch.state_indices)
        choices = (verdict.chosen.tokens, verdict.chosen.finite)
        given = AcceptInputs(*reports, *choices, *rows, *limits)
        results = self.pieces.accept(*given, *prompts, *self.is_decoding)
        self.choice.record(self, verdict, begun)
        if self.has_budget:
            from mtpc.step.budget import count_drafts

            count_drafts(self, begun)
        return unpack(Accepted, results)

    def logits_rows(self, begun: Begun) -> LogitsIndices:
        """The rows of a ragged step that get logits; writes where each request's begin."""
        batch = self.batch
        (decodes,) = self.is_decoding or (begun.active,)
        results = self.pieces.logits_rows(batch.query_start_loc, decodes)
        found = unpack(LogitsIndices, results)
        aten.copy_.default(batch.logits_start_loc, found.start_loc)
        return found

    @property
    def is_decoding(self) -> tuple[Tensor, ...]:
        """The buffer that says which requests of a prefill step decode; () where all do."""
        return (self.batch.is_decoding,) if self.key.phase == "prefill" else ()

    def _advance(self, begun: Begun, accepted: Accepted, next_token_ids: Tensor) -> None:
        """Write the state that the next step starts from."""
        state, slots = self.state, begun.state_slots
        rows = (state.committed_lens, state.token_ids, state.remaining_tokens)
        self.pieces.advance(*rows, slots, accepted.lens, next_token_ids, accepted.remaining)

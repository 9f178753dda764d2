"""Sampling: how a step's tokens are chosen at random, by each request's parameters.

A draft is sampled from its own logits with the random numbers that the target will use at that
position. The closer both distributions are, the more often both choose the same token, and the
draft is accepted: Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant
speculative decoding" (2024). The target's choice does not depend on drafts; see docs/sampling.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import mtpc.ops.sampling  # noqa: F401  (registers the ops)
from mtpc.step.choose import Choice, Verdict
from mtpc.step.records import Accepted, Begun, Chosen, Metadata, unpack

if TYPE_CHECKING:
    from mtpc.step.drafting import DraftInputs
    from mtpc.step.step import Step

aten = torch.ops.aten

NO_POSITION = -2
"""The position of a row that is not sampled: the position after it, -1, holds no token."""


class SampleChoice(nn.Module):
    """The target's choice, by each request's parameters."""

    def forward(
        self, logits: Tensor, ids: Tensor, positions: Tensor, *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The arguments of `mtpc::sample` -> `Chosen` [N].

        A chosen token stands at the position after its row's. A row without a choice counts as not
        finite.
        """
        tokens = torch.ops.mtpc.sample(logits, ids, positions + 1, *given)
        return tuple(Chosen(tokens.clamp(min=0), tokens >= 0))


class SampleDraft(nn.Module):
    """The draft's choice, by each request's parameters."""

    def forward(self, logits: Tensor, lens: Tensor, state_slots: Tensor, *rows: Tensor) -> Tensor:
        """Logits [R, V] -> token ids, int64 [R], for the position `lens` + 1 of each request."""
        position = lens.long() + 1
        # Each request has one row here. The first row of a request counts no drafts as output.
        ids = torch.zeros_like(position)
        tokens = torch.ops.mtpc.sample(logits, ids, position, state_slots, *rows)
        return tokens.clamp(min=0)


class Record(nn.Module):
    """Count the emitted tokens, and report log-probabilities to requests that asked for them."""

    def forward(
        self,
        logits: Tensor,
        places: Tensor | None,
        emitted_ids: Tensor,
        num_emitted: Tensor,
        state_slots: Tensor,
        ints: Tensor,
        output_counts: Tensor,
        *reports: Tensor,
    ) -> None:
        """Arguments as `mtpc::count_tokens` and `mtpc::write_logprobs` have them."""
        torch.ops.mtpc.count_tokens(output_counts, emitted_ids, num_emitted, state_slots)
        emitted = (emitted_ids, num_emitted, state_slots)
        torch.ops.mtpc.write_logprobs(*reports, logits, *emitted, ints, places)


@dataclass(frozen=True)
class SampledChoice(Choice):
    """The choice by each request's parameters.

    Attributes:
        masks_tokens: whether the host writes `batch.token_mask`.
        masks_drafts: whether the host writes `batch.draft_mask`.
    """

    masks_tokens: bool = False
    masks_drafts: bool = False

    def verify(self, step: Step, logits: Tensor, begun: Begun, metadata: Metadata) -> Verdict:
        """Sample for K + 1 rows of each request.

        In a ragged step a prompt has one row that chooses, the first of its K + 1, and a request
        may have fewer; no token is sampled for the others.
        """
        ids, positions, places = begun.ids, metadata.positions, None
        if step.is_ragged:
            found = step.logits_rows(begun)
            places = found.places
            logits = aten.index_select.default(logits, 0, found.indices)
            rows = aten.index_select.default(found.indices, 0, places)
            ids = aten.index_select.default(ids, 0, rows)
            positions = aten.index_select.default(positions, 0, rows)
            positions = aten.where.ScalarOther(found.is_first, positions, NO_POSITION)
        mask = step.batch.token_mask if self.masks_tokens else None
        rows_given = (ids, positions, begun.state_slots, *sampling_rows(step), mask, places)
        results = step.pieces.choose(logits, *rows_given)
        return Verdict(unpack(Chosen, results), begun.ids, logits, places)

    def record(self, step: Step, verdict: Verdict, begun: Begun) -> None:
        """Call the piece `record` on what the step emits."""
        state, batch, key = step.state, step.batch, step.key
        shape = [key.bucket.num_reqs, key.max_emitted]
        emitted_ids = aten.view.default(verdict.chosen.tokens, shape)
        reports = (batch.out_logprobs, batch.out_top_ids, batch.out_top_logprobs)
        rows = (state.sampling_ints, state.output_counts, *reports)
        emitted = (emitted_ids, batch.num_emitted, begun.state_slots)
        step.pieces.record(verdict.logits, verdict.places, *emitted, *rows)

    def draft_masks(self, step: Step, accepted: Accepted) -> Tensor | None:
        """The masks of each request's drafts: those of its last accepted row."""
        if not self.masks_drafts:
            return None
        return aten.index_select.default(step.batch.draft_mask, 0, accepted.chosen_rows)

    def pick(self, step: Step, index: int, logits: Tensor, inputs: DraftInputs) -> Tensor:
        """Sample draft `index`. `lens` + `index` + 1 tokens precede it."""
        if step.drafting.has_vocabulary:
            logits = step.pieces.draft_logits(logits)
        lens, slots = inputs.accepted.lens, inputs.begun.state_slots
        before = aten.add.Tensor(lens, index) if index else lens
        rows = sampling_rows(step)
        if inputs.masks is not None:
            rows = (*rows, aten.select.int(inputs.masks, 1, index))
        token: Tensor = step.pieces.pick(logits, before, slots, *rows)
        return token

    def pick_rows(
        self, step: Step, first: int, count: int, logits: Tensor, inputs: DraftInputs
    ) -> list[Tensor]:
        """As `Choice.pick_rows`; each draft has random numbers and a mask of its own."""
        rows = aten.view.default(logits, [step.key.bucket.num_reqs, count, -1])
        places = range(count)
        each = [(first + place, aten.select.int(rows, 1, place)) for place in places]
        return [self.pick(step, index, row, inputs) for index, row in each]


def sampling_rows(step: Step) -> tuple[Tensor, ...]:
    """The rows by request slot that `mtpc::sample` takes, in its order."""
    state = step.state
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

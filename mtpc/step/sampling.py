"""Sampling: how a step's tokens are chosen at random, by each request's parameters.

A draft is sampled from its own logits with the random numbers that the target will use at that
position. The closer both distributions are, the more often both choose the same token, and the
draft is accepted: Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant
speculative decoding" (2024). The target's choice does not depend on drafts; see docs/sampling.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import mtpc.ops.sampling  # noqa: F401  (registers the ops)
from mtpc.step.records import Accepted, Begun, Chosen, unpack

if TYPE_CHECKING:
    from mtpc.step.step import DraftInputs, Step

aten = torch.ops.aten

NO_POSITION = -2
"""The position of a row that is not sampled: the position after it, -1, holds no token."""


class SampleChoice(nn.Module):
    """The target's choice, by each request's parameters."""

    def forward(
        self, logits: Tensor, ids: Tensor, positions: Tensor, state_slots: Tensor, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        """Logits [N, V], ids and positions [N], and the rows of `sampling_rows` -> `Chosen` [N].

        A chosen token stands at the position after its row's. A row without a choice counts as not
        finite.
        """
        tokens = torch.ops.mtpc.sample(logits, ids, positions + 1, state_slots, *rows)
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
        emitted_ids: Tensor,
        num_emitted: Tensor,
        state_slots: Tensor,
        ints: Tensor,
        output_counts: Tensor,
        *reports: Tensor,
    ) -> None:
        """Arguments as `mtpc::count_tokens` and `mtpc::write_logprobs` have them."""
        torch.ops.mtpc.count_tokens(output_counts, emitted_ids, num_emitted, state_slots)
        torch.ops.mtpc.write_logprobs(*reports, logits, emitted_ids, num_emitted, state_slots, ints)


def choose(step: Step, logits: Tensor, begun: Begun) -> tuple[Chosen, Tensor]:
    """The target's token for K + 1 rows of each request, and the logits it was chosen from.

    In a prefill step a prompt has one row that chooses, the first of its K + 1; no token is sampled
    for the others.
    """
    if step.key.phase == "decode":
        positions = _positions(step)
        return _choose(step, logits, begun.ids, positions, begun.state_slots), logits
    found = step.logits_rows()
    for index in (found.indices, found.places):
        logits = aten.index_select.default(logits, 0, index)
    rows = aten.index_select.default(found.indices, 0, found.places)
    positions = _positions(step)
    ids = aten.index_select.default(begun.ids, 0, rows)
    positions = aten.index_select.default(positions, 0, rows)
    positions = aten.where.ScalarOther(found.is_first, positions, NO_POSITION)
    return _choose(step, logits, ids, positions, begun.state_slots), logits


def _positions(step: Step) -> Tensor:
    """The positions of all rows of the target's forward, int64 [T]."""
    return aten.slice.Tensor(step.batch.positions, 0, 0, step.key.bucket.num_tokens)


def _choose(step: Step, logits: Tensor, ids: Tensor, positions: Tensor, slots: Tensor) -> Chosen:
    rows = sampling_rows(step)
    if hasattr(step.batch, "token_mask"):
        rows = (*rows, step.batch.token_mask)
    return unpack(Chosen, step.pieces.choose(logits, ids, positions, slots, *rows))


def pick(step: Step, index: int, logits: Tensor, inputs: DraftInputs) -> Tensor:
    """Sample draft `index` of each request. `lens` + `index` + 1 tokens precede it."""
    lens, slots = inputs.accepted.lens, inputs.begun.state_slots
    before = aten.add.Tensor(lens, index) if index else lens
    rows = sampling_rows(step)
    if inputs.masks is not None:
        rows = (*rows, aten.select.int(inputs.masks, 1, index))
    return step.pieces.pick(logits, before, slots, *rows)


def draft_masks(step: Step, accepted: Accepted) -> Tensor | None:
    """The masks of each request's drafts [R, K, W]: those of its last accepted row, or None."""
    if not hasattr(step.batch, "draft_mask"):
        return None
    return aten.index_select.default(step.batch.draft_mask, 0, accepted.chosen_rows)


def record(step: Step, logits: Tensor, chosen: Chosen, begun: Begun) -> None:
    """Call the piece `record` on what the step emits."""
    state, batch, key = step.state, step.batch, step.key
    emitted_ids = aten.view.default(chosen.tokens, [key.bucket.num_reqs, key.max_emitted])
    reports = (batch.out_logprobs, batch.out_top_ids, batch.out_top_logprobs)
    rows = (state.sampling_ints, state.output_counts, *reports)
    step.pieces.record(logits, emitted_ids, batch.num_emitted, begun.state_slots, *rows)


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

"""The choice of a token from logits: the target's, which is emitted, and the draft's.

A draft asks the same question of its own logits, with the random numbers that the target will use
at that position. Where both distributions are alike, so is the outcome, which is when the draft is
accepted: Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant speculative
decoding" (2024). The target's choice knows nothing of drafts, see docs/sampling.md.
"""

from __future__ import annotations

import torch
from torch import nn

import mtpc.ops.sampling  # noqa: F401  (registers the ops)

NO_POSITION = -2
"""Of a row that is not to be sampled: what it chose would not stand in a sequence."""


class Choose(nn.Module):
    """Greedy: argmax over the vocabulary. Returns tokens [N], and whether logits were finite."""

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best, tokens = logits.max(-1)
        return tokens, torch.isfinite(best)


class Pick(nn.Module):
    """Greedy draft: argmax over the vocabulary, [R, V] -> [R]."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)


class SampleChoice(nn.Module):
    """As `Choose`, by each request's parameters; a row without a choice is not finite.

    `positions` [N] are of the rows; what they choose stands at the next one.
    """

    def forward(self, logits, ids, positions, state_slots, *rows):  # type: ignore[no-untyped-def]
        tokens = torch.ops.mtpc.sample(logits, ids, positions + 1, state_slots, *rows)
        return tokens.clamp(min=0), tokens >= 0


class SampleDraft(nn.Module):
    """As `Pick`, by each request's parameters, for the token at position `lens` + 1 [R]."""

    def forward(self, logits, lens, state_slots, *rows):  # type: ignore[no-untyped-def]
        position = lens.long() + 1
        # One row a request, which is the first and so has seen no further drafts.
        ids = torch.zeros_like(position)
        tokens = torch.ops.mtpc.sample(logits, ids, position, state_slots, *rows)
        return tokens.clamp(min=0)


class Record(nn.Module):
    """Count what was emitted, and report its log-probabilities to those who asked."""

    def forward(  # type: ignore[no-untyped-def]
        self, logits, emitted_ids, num_emitted, state_slots, ints, output_counts, *reports
    ):
        torch.ops.mtpc.count_tokens(output_counts, emitted_ids, num_emitted, state_slots)
        torch.ops.mtpc.write_logprobs(*reports, logits, emitted_ids, num_emitted, state_slots, ints)

"""What a model provides to be stepped."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from mtpc.step.drafting import Drafting


class StepModel(Protocol):
    """A model's modules, each of which is traced; `metadata` are the fields of `Metadata`.

    `features` are what the family feeds from one forward to the next draft: the hidden state
    before or after the final norm, one stream or several. Only a head turns them into logits.
    """

    target: nn.Module  # (ids [T], *metadata) -> features [T, ...], and what `draft_entry` takes
    target_head: nn.Module  # features [T, ...] -> logits [T, V]
    drafts: nn.ModuleList  # each (ids [T], features, *metadata) -> features [T, ...]; see below
    later_draft: nn.Module | None  # For drafts after those of `drafts`; see below.
    draft_heads: nn.ModuleList  # each features -> logits [T, V], or [T, V_d] of `draft_tokens`
    draft_entry: nn.Module | None  # The target's second result -> what the first draft is fed.
    draft_bias: nn.Module | None  # (Logits, features, tokens [R]) -> logits; of a block drafter.
    draft_tokens: nn.Module | None  # Rows of a draft's head, int64 [R] -> token ids [R].
    draft_logits: nn.Module | None  # Logits of these rows [R, V_d] -> of all tokens [R, V].
    # Where a draft hands something on, `drafts` return features and a second value for each row,
    # [T, ...], and `later_draft` is (ids, features, *metadata, second value) -> features. In a
    # block drafter it is (ids, *metadata) -> features. At one position, `drafts` return features
    # and the rows that the head takes.
    drafting: Drafting  # How drafts come about.
    vocab_size: int

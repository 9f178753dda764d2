"""Drafts that are copies: what followed the end of a request's text where it occurred earlier.

`state.text_ids` holds the text of every request: a prefill step writes its chunks, and a decode
step what it emits. The host writes the tokens whose pages are reused. A copy costs next to nothing,
so every step proposes as many drafts as a later step may verify, whatever its own K. It says how
many in `batch.num_drafts`: none where no end of the text occurs earlier.

Copies may stand beside another drafter, which drafts in every step, too. A request takes the copy
where copies with as long a match are expected to have as many drafts accepted as the other
drafter's. The expectation is the mean of what the request has counted and of `EXPECTED`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mtpc.layout import StepKey
from mtpc.ops.copy_drafts import LONGEST, SHORTEST
from mtpc.step.drafting import Drafting, DraftInputs

if TYPE_CHECKING:
    from mtpc.step.step import Step

aten = torch.ops.aten


EXPECTED = (3, 2, 4, 8, 12)
"""Drafts that are accepted in two steps, before any are counted: the other drafter's, and those of
copies with a match of 3, 5, 9 and 17 tokens or more; never more than two steps have."""
_MATCHES = (5, 9, 17)


class Weigh(nn.Module):
    """Counts what became of the last drafts, and chooses the source of the next.

    Args:
        key: of the step.
        most: the largest K of the program.
    """

    def __init__(self, key: StepKey, most: int):
        super().__init__()
        self.key, self.most = key, most

    def forward(
        self,
        matched: Tensor,
        active: Tensor,
        state_slots: Tensor,
        num_accepted: Tensor,
        counts: Tensor,
        source: Tensor,
        is_decoding: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Update `counts` and `source` in place.

        Args:
            matched: int32 [R], tokens that match before a copy; 0: there is none.
            active: bool [R].
            state_slots: int64 [R].
            num_accepted: int32 [R], drafts that this step has accepted.
            counts: int32 [S, NUM_SOURCES, 2], see `layout.buffers.copy_specs`.
            source: int32 [S].
            is_decoding: int32 [R], 0 where rows are a prompt's; None: all requests decode.

        Returns:
            bool [R], whether a request takes the copy; int32 [R], its number of drafts.
        """
        verified = active if is_decoding is None else active & (is_decoding != 0)
        kinds = torch.arange(counts.shape[1], device=counts.device)
        is_kind = (kinds == source[state_slots][:, None]) & verified[:, None]
        if not self.key.spec_tokens:
            is_kind = torch.zeros_like(is_kind)
        gained = torch.stack([is_kind * num_accepted[:, None], is_kind.int()], -1)
        held = counts[state_slots] + gained.int()
        kind = 1 + torch.stack([matched >= least for least in _MATCHES]).sum(0)
        prior = torch.stack([torch.full_like(kind, min(n, 2 * self.most)) for n in EXPECTED], 1)
        accepted, steps = held[:, :, 0].long() + prior, held[:, :, 1].long() + 2
        right, times = accepted.gather(1, kind[:, None])[:, 0], steps.gather(1, kind[:, None])[:, 0]
        takes = active & (matched > 0) & (right * steps[:, 0] >= accepted[:, 0] * times)
        counts.index_copy_(0, state_slots, held)
        source.index_copy_(0, state_slots, torch.where(takes, kind, 0).int())
        return takes, torch.where(takes, self.most, self.key.spec_tokens).int()


class CopyText(nn.Module):
    """Extends the texts by a step's certain tokens, and copies from them.

    Args:
        num_drafts: the largest K of the program.
    """

    def __init__(self, num_drafts: int):
        super().__init__()
        self.num_drafts = num_drafts

    def forward(self, text_ids: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """The tensors of `mtpc::copy_drafts` -> how many tokens match before the copy [R], the
        number of its drafts [R], and these, [R] each."""
        drafts, matched = torch.ops.mtpc.copy_drafts(text_ids, *given, self.num_drafts)
        num_drafts = torch.where(matched > 0, self.num_drafts, 0).int()
        return (matched, num_drafts, *drafts.unbind(1))


@dataclass(frozen=True, kw_only=True)
class Copying(Drafting):
    """Copies, alone or beside another drafter.

    Attributes:
        most: the largest K of the program.
        other: the drafter beside them; one without layers drafts nothing.
    """

    most: int
    other: Drafting

    @classmethod
    def beside(cls, other: Drafting, most: int) -> Copying:
        """Copies beside a drafter, or alone if it has no layers."""
        says = (other.num_layers, other.has_entry, other.has_vocabulary, other.hands_on)
        return cls(*says, most=most, other=other)

    @property
    def declared(self) -> dict[str, str]:
        own = {
            "reads": "the request's own text",
            "keeps": "the tokens of the text",
            "drafts": f"what followed the last {SHORTEST} to {LONGEST} tokens where they occurred "
            "earlier; none elsewhere",
            "head": "none",
        }
        if not self.num_layers:
            return own
        found = {name: f"{text}; {self.other.declared[name]}" for name, text in own.items()}
        return {**found, "rule": "a copy where copies of its length had as many drafts accepted"}

    def pieces(self, key: StepKey, page_size: int, vocab_size: int) -> dict[str, nn.Module]:
        copies = {"copy_text": CopyText(self.most), "weigh_copies": Weigh(key, self.most)}
        return {**self.other.pieces(key, page_size, vocab_size), **copies}

    def drafts(self, step: Step, inputs: DraftInputs) -> list[Tensor]:
        """The program's largest number of drafts [R], also where the step's own K is less."""
        begun, state, batch = inputs.begun, step.state, step.batch
        rows = (begun.ids, inputs.ids, inputs.metadata.query_start_loc)
        requests = (begun.context_lens, inputs.anchors, begun.active, begun.state_slots)
        found = step.pieces.copy_text(state.text_ids, *rows, *requests)
        drafts = [found[2 + place] for place in range(self.most)]
        if not self.num_layers:
            aten.copy_.default(batch.num_drafts, found[1])
            return drafts
        counts = (batch.num_accepted, state.copy_counts, state.draft_source)
        given = (found[0], begun.active, begun.state_slots, *counts, *step.is_decoding)
        weighed = step.pieces.weigh_copies(*given)
        aten.copy_.default(batch.num_drafts, weighed[1])
        others = self.other.drafts(step, inputs)
        pairs = zip(drafts, others, strict=False)
        taken = [aten.where.self(weighed[0], copied, other) for copied, other in pairs]
        return [*taken, *drafts[len(others) :]]

"""A traced draft with the face of an SGLang draft model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from torch import Tensor, nn

from mtpc.integrations.draft import DraftOptions, TracedDraft
from mtpc.integrations.sglang.attention import DraftRun, make_attention
from mtpc.integrations.sglang.refusals import check_served


class HostedDraft(nn.Module):
    """What SGLang asks of a draft model, over one traced MTP layer.

    The host's EAGLE worker runs it in all its phases: over a prompt's rows, over the verified
    rows (DRAFT_EXTEND_V2), and over single rows to chain drafts. Which rows are stored where and
    who attends to what is the host's attention backend's doing. TARGET_VERIFY runs the target.

    Args:
        config: the host's draft config, whose architecture it has renamed.
        quant_config: must be None.
        prefix: unused; names come from the checkpoint.

    Attributes:
        target: architecture of the target, under which mtpc knows the family.
    """

    target: ClassVar[str]

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        super().__init__()
        check_served(type(self).__name__, config, quant_config)
        self.config, self.quant_config = config, quant_config
        self.run = DraftRun()
        self.draft = TracedDraft(
            config,
            # The draft's KV pool is its own, and begins at layer 0.
            lambda site: make_attention(site, site.index, self.run),
            DraftOptions(
                dtype=torch.get_default_dtype(),
                device=torch.get_default_device(),
                architecture=self.target_architecture(config),
            ),
        )
        text = self.draft.config.get_text_config(decoder=True)
        self.draft.embedding = VocabParallelEmbedding(text.vocab_size, text.hidden_size)
        self.lm_head = ParallelLMHead(text.vocab_size, text.hidden_size)
        self.logits_processor = LogitsProcessor(config)

    @classmethod
    def target_architecture(cls, config: Any) -> str:
        """The target's architecture, where several share a draft class of the host."""
        return cls.target

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> Any:
        """The host's forward: rows are those of `forward_batch`, features its `spec_info`'s.

        Returns:
            The host's `LogitsProcessorOutput`; its hidden states, after the final norm, come back
            as features of the next draft step.
        """
        features = forward_batch.spec_info.hidden_states
        if forward_batch.forward_mode.is_idle():
            # No rows, and no other rank that waits for a collective of this one.
            hidden = features[:0]
        else:
            self.run.forward_batch = forward_batch
            try:
                embeddings = self._embeddings(input_ids, forward_batch)
                hidden = self.draft(input_ids, positions, features, embeddings)
            finally:
                self.run.forward_batch = None
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)

    def _embeddings(self, input_ids: Tensor, forward_batch: Any) -> Tensor | None:
        """The target's embeddings of a prompt with images, whose ids are no tokens; else None.

        The host has moved them up by a row as it moves ids; each request's last row is a token.
        """
        given: Tensor | None = forward_batch.mm_input_embeds
        if given is None or not forward_batch.contains_mm_inputs():
            return given
        last = (forward_batch.extend_start_loc + forward_batch.extend_seq_lens - 1).long()
        return given.index_copy(0, last, self.draft.embedding(input_ids[last]).to(given.dtype))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take the MTP layer's tensors out of the target's checkpoint; returns their names.

        Raises:
            CheckpointError: see `TracedDraft.load_weights`; no tensors of the layer's at all is
                one case of it.
        """
        return self.draft.load_weights(weights)

    def get_embed_and_head(self) -> tuple[Tensor, Tensor]:
        """Weights of embedding and head."""
        return self.draft.embedding.weight, self.lm_head.weight

    def set_embed_and_head(self, embed: Tensor, head: Tensor) -> None:
        """Share the target's; the draft's own are let go."""
        for module, weight in ((self.draft.embedding, embed), (self.lm_head, head)):
            del module.weight
            module.weight = weight

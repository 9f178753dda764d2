"""A traced draft with the interface of an SGLang draft model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.runtime_context import get_parallel, get_server_args
from torch import Tensor, nn

from mtpc.errors import UnsupportedModelError
from mtpc.integrations.draft import DraftOptions, TracedDraft
from mtpc.integrations.sglang.algorithm import NAME
from mtpc.integrations.sglang.attention import DraftRun, make_attention
from mtpc.integrations.sglang.layers import OWN_DRAFT, SGLangLayers

_WIDTHS = {
    "pp_size": "pipeline parallelism",
    "attn_dp_size": "data-parallel attention",
    "attn_cp_size": "context parallelism",
    "moe_ep_size": "expert parallelism",
}


def is_chained() -> bool:
    """Whether the draft is part of a draft chain."""
    return str(get_server_args().speculative_algorithm).upper() == NAME


def layers_for(quant_config: Any, quantises_joint: bool) -> SGLangLayers | None:
    """SGLang's layers for a draft. None: it has plain ones of its own, which a chain rewrites."""
    if is_chained() and quant_config is None and get_parallel().tp_size == 1:
        return None
    return SGLangLayers(quant_config, quantises_joint)


def check_served(draft: type[HostedDraft], config: Any) -> None:
    """Check that a traced draft supports SGLang's configuration.

    Args:
        draft: the draft class.
        config: SGLang's draft config.

    Raises:
        UnsupportedModelError: SGLang's ranks share something other than layers; the draft has a
            sparse attention index; or its draft chain would have a pool of its own kind.
    """
    parallel = get_parallel()
    found = [
        f"{kind} over {getattr(parallel, width)} ranks"
        for width, kind in _WIDTHS.items()
        if getattr(parallel, width) > 1
    ]
    if getattr(config, "index_topk", None) and not draft.has_window_alone:
        found.append("a sparse attention index (index_topk)")
    if is_chained() and draft.has_window_alone:
        found.append(f"{NAME} over DeepSeek-V4's pool")
    if found:
        raise UnsupportedModelError(
            f"mtpc's {draft.__name__} in SGLang: found {found[0]}; a traced draft has no index and "
            f"ranks of tensor parallelism only, and {NAME} has a plain pool. Use NEXTN instead of "
            f"{NAME}, or {OWN_DRAFT}"
        )


class HostedDraft(nn.Module):
    """SGLang's interface of a draft model, over one traced MTP layer.

    SGLang's EAGLE worker runs it in all phases of drafting: over a prompt's rows, over the verified
    rows (DRAFT_EXTEND_V2), and over single rows to chain drafts. SGLang's attention backend decides
    where rows are stored and what each row attends to. The phase TARGET_VERIFY runs the target.

    Args:
        config: SGLang's draft config, with the architecture renamed by SGLang.
        quant_config: SGLang's quantisation config, or None.
        draft_model_idx: the MTP layer, from 0. SGLang gives it with multi-layer EAGLE, where each
            draft of an iteration has a model and a KV pool of its own.
        prefix: unused; names come from the checkpoint.

    Attributes:
        target: the target's architecture, by which mtpc finds the family.
        has_window_alone: whether the layer attends to a window in a pool of its own kind, whatever
            the target's layers attend to.
        quantises_joint: see `ParallelLayers`.

    Raises:
        UnsupportedModelError: see `check_served` and `TracedDraft`.
    """

    target: ClassVar[str]
    has_window_alone: ClassVar[bool] = False
    quantises_joint: ClassVar[bool] = False

    def __init__(
        self,
        config: Any,
        quant_config: Any = None,
        draft_model_idx: int | None = None,
        prefix: str = "",
    ):
        super().__init__()
        check_served(type(self), config)
        self.config, self.quant_config = config, quant_config
        self.run = DraftRun()
        self.draft = TracedDraft(
            config,
            # The draft has its own KV pool, which begins at layer 0.
            lambda site: make_attention(site, site.index, self.run),
            DraftOptions(
                index=draft_model_idx or 0,
                dtype=torch.get_default_dtype(),
                device=torch.get_default_device(),
                architecture=self.target_architecture(config),
            ),
            layers_for(quant_config, self.quantises_joint),
        )
        text = self.draft.config.get_text_config(decoder=True)
        self.draft.embedding = VocabParallelEmbedding(text.vocab_size, text.hidden_size)
        self.lm_head = ParallelLMHead(text.vocab_size, text.hidden_size)
        self.logits_processor = LogitsProcessor(config)

    @classmethod
    def target_architecture(cls, config: Any) -> str:
        """The target's architecture. A subclass overrides this if several targets share it."""
        return cls.target

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> Any:
        """Run one forward of SGLang's worker.

        Args:
            input_ids: int64 [T].
            positions: int64 [T].
            forward_batch: SGLang's `ForwardBatch`; its `spec_info` has the hidden states [T, W],
                see `TracedDraft`.

        Returns:
            SGLang's `LogitsProcessorOutput`. SGLang passes its hidden states, before or after the
            final norm as the model's wiring has it, to the next draft step.
        """
        features = forward_batch.spec_info.hidden_states
        before: Tensor | None = None
        if forward_batch.forward_mode.is_idle():
            # All ranks of tensor parallelism are idle together, so none waits for a collective.
            hidden = features[:0]
        else:
            self.run.forward_batch = forward_batch
            try:
                embeddings = self._embeddings(input_ids, forward_batch)
                hidden = self.draft(input_ids, positions, features, embeddings)
            finally:
                self.run.forward_batch = None
        if not self.draft.returns_normed:
            before, hidden = hidden, self.draft.final_norm(hidden)
        return self.logits_processor(
            input_ids, hidden, self.lm_head, forward_batch, hidden_states_before_norm=before
        )

    def _embeddings(self, input_ids: Tensor, forward_batch: Any) -> Tensor | None:
        """The target's embeddings [T, H] of a prompt with images, else SGLang's or None.

        The ids of images are not tokens. SGLang shifts the embeddings by one row, as it shifts ids.
        The last row of each request is a token, whose embedding is computed here.
        """
        given: Tensor | None = forward_batch.mm_input_embeds
        if given is None or not forward_batch.contains_mm_inputs():
            return given
        last = (forward_batch.extend_start_loc + forward_batch.extend_seq_lens - 1).long()
        return given.index_copy(0, last, self.draft.embedding(input_ids[last]).to(given.dtype))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the MTP layer's tensors from the target's checkpoint, and return their names.

        Raises:
            CheckpointError: see `TracedDraft.load_weights`.
        """
        names = self.draft.load_weights(weights)
        ends = {"embedding": self.draft.embedding, "head": self.lm_head}
        for role, weight in self.draft.own.items():
            ends[role].weight_loader(ends[role].weight, weight)
        return names

    def get_embed_and_head(self) -> tuple[Tensor, Tensor]:
        """The weights of the embedding and the head, [V, H] each."""
        return self.draft.embedding.weight, self.lm_head.weight

    def set_embed_and_head(self, embed: Tensor, head: Tensor) -> None:
        """Use the target's weights, [V, H] each, but for those that the layer has of its own."""
        self.set_embed(embed)
        if "head" not in self.draft.own:
            del self.lm_head.weight
            self.lm_head.weight = head

    def set_embed(self, embed: Tensor) -> None:
        """Use the target's embedding [V, H], unless the layer has its own; the head stays."""
        if "embedding" not in self.draft.own:
            del self.draft.embedding.weight
            self.draft.embedding.weight = embed

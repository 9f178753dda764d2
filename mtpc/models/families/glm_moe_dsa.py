"""GLM-5 (GLM-5, 5.1, 5.2): DeepSeek-V3.2 with an indexer for several layers at once.

A layer of indexer type "shared" has no indexer: it attends to what the layer before it attended to.
The MTP layer always has an indexer of its own. With `index_share_for_mtp_iteration` it runs for the
first draft of a step; later drafts attend to what that chose. Indexers rotate neighbouring
features, where those of DeepSeek-V3.2 rotate halves.

Source: transformers' GlmMoeDsa (5.17 to 5.24) for the target; vLLM's deepseek_v2.py and
deepseek_mtp.py, which read the MTP layer and its indexer, and llm_base_proposer.py, which chains
its drafts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mtpc.errors import UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.models.caches import paged_latent_specs
from mtpc.models.families.deepseek_v32 import (
    DEEPSEEK_V32,
    SparseLatentAttention,
    cache_specs,
    rotate_neighbours,
)


def _rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first `rope` features of x [T, n, D], neighbours in pairs."""
    turned, plain = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    return torch.cat([rotate_neighbours(turned, cos, sin), plain], -1)


class SharedChoiceAttention(SparseLatentAttention):
    """Sparse latent attention that hands on its choice, or takes one.

    It comes from the layer before, or from the draft before (`ModelFamily.hands_on`).
    """

    rotate_index = staticmethod(_rotate_first)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        mtpc_context: Any,
        prev_topk_indices: Tensor | None = None,
        mtpc_handed: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None, Tensor]:
        """hidden_states [1, T, H] -> [1, T, H], None, and the cache slots attended to, [T, k].

        Raises:
            UnsupportedModelError: no layer before this one has an indexer.
        """
        if self.indexer is None and prev_topk_indices is None:
            raise UnsupportedModelError(
                f"layer {self.layer_idx} is 'shared' in indexer_types, and no layer before it is "
                "'full'; expected the first layer to be 'full'"
            )
        chosen = prev_topk_indices if self.indexer is None else mtpc_handed
        rows = (hidden_states[0], position_embeddings, mtpc_context)
        out, slots = self.attend(*rows, chosen)
        return out[None], None, slots


def _cache_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """Page pools of the latent and, of a layer with an indexer, of the indexer keys."""
    if layer < config.num_hidden_layers and config.indexer_types[layer] == "shared":
        return paged_latent_specs(config, layer, dtype)
    return cache_specs(config, layer, dtype)


GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    name="glm_moe_dsa",
    architectures=("GlmMoeDsaForCausalLM",),
    cache_specs=_cache_specs,
    # Whether later drafts of a step attend to what the indexer chose for the first one.
    hands_on=lambda config: bool(getattr(config, "index_share_for_mtp_iteration", False)),
    canonical={"GlmMoeDsaAttention": SharedChoiceAttention},
)

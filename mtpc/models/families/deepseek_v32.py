"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention to positions that an indexer chooses.

Each attention layer has an indexer. It keeps one key per token, in pages beside the latent. A few
query heads score the keys that a row may see, and the row attends to the `index_topk` positions
with the highest scores (DeepSeek Sparse Attention). MTP layers, experts and tensor names are those
of DeepSeek-V3.

Source: transformers' DeepseekV32 (5.17 to 5.24). Like it, this module leaves out two things of the
released code: the Hadamard rotation, which changes no product of query and key, and the rounding of
keys to FP8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mtpc import ops
from mtpc.layout import BufferSpec
from mtpc.layout.buffers import P
from mtpc.models.caches import paged_latent_specs, paged_spec
from mtpc.models.families.nextn import DEEPSEEK_V3
from mtpc.models.family import layers_after
from mtpc.models.seams import StandIn
from mtpc.ops.choose_slots import choose_slots
from mtpc.ops.fused import rotate_halves


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, n, rope] by cos and sin [T, rope].

    Feature 2i pairs with feature 2i + 1. The result holds the first features of all pairs, then
    the second ones.
    """
    cos, sin = (angle.chunk(2, -1)[0][:, None] for angle in (cos, sin))
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@dataclass(frozen=True)
class IndexedLatent:
    """Page pools of latents, [N, P, rank + rope], and of indexer keys, [N, P, D]."""

    latent: Tensor
    index: Tensor


class SparseLatentAttention(StandIn):
    """Multi-head latent attention over the positions that the indexer chooses.

    A row reads all indexer keys of its context, and at most `index_topk` latents. The latent and
    the key of a rejected row are overwritten before any row may see their position. `indexer` is
    None if the layer attends to what the layer before it chose.
    """

    rotate_index = staticmethod(rotate_halves)
    """(x [T, n, D], cos, sin) -> the same: the rotary embedding of indexer queries and keys."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, mtpc_context: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [1, T, H] -> [1, T, H], as transformers' module computes it."""
        return self.attend(hidden_states[0], position_embeddings, mtpc_context)[0][None], None

    def attend(
        self, hidden: Tensor, position_embeddings: Any, context: Any, slots: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, H] -> the output [T, H], and the cache slots that were attended to [T, k].

        `slots` are those to attend to, and no indexer key is written then; None: what the indexer
        chooses.
        """
        cos, sin = (angle[0] for angle in position_embeddings)
        low = self.q_a_layernorm(self.q_a_proj(hidden))
        state = context.layers[self.layer_idx]
        self._write(hidden, cos, sin, state, context)
        if slots is None:
            self._write_keys(hidden, cos, sin, state.index, context)
            slots = self._choose(hidden, low, (cos, sin), state.index, context)
        query, widths = self.q_b_proj(low), [self.qk_nope_head_dim, self.qk_rope_head_dim]
        plain, turned = query.unflatten(-1, (self.num_heads, -1)).split(widths, -1)
        query = torch.cat([plain, rotate_neighbours(turned, cos, sin)], -1)
        # To the attention op each row is a request of one row; its context is what it chose, in
        # pages of one token.
        rows = torch.arange(slots.shape[0] + 1, device=slots.device, dtype=torch.int32)
        seen = (slots >= 0).sum(1, dtype=torch.int32)
        out = ops.expanded_latent_attention(
            query,
            state.latent.view(-1, 1, state.latent.shape[-1]),
            self.kv_b_proj.weight,
            slots,
            seen,
            rows,
            self.scaling,
            self.qk_nope_head_dim,
        )
        return self.o_proj(out.flatten(1)), slots

    def _write(self, hidden: Tensor, cos: Tensor, sin: Tensor, state: Any, context: Any) -> None:
        """Write the rows' latents, each followed by its rotated key."""
        widths = [self.kv_lora_rank, self.qk_rope_head_dim]
        latent, key = self.kv_a_proj_with_mqa(hidden).split(widths, -1)
        key = rotate_neighbours(key[:, None], cos, sin)[:, 0]
        rows = torch.cat([self.kv_a_layernorm(latent), key], -1)
        ops.write_cache(state.latent, rows, context.slot_mapping, None)

    def _write_keys(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, context: Any
    ) -> None:
        """Write the rows' indexer keys to pages `keys` [N, P, D]."""
        key = self.indexer.k_norm(self.indexer.wk(hidden))[:, None]
        rows = self.rotate_index(key, cos, sin)[:, 0]
        ops.write_cache(keys, rows, context.slot_mapping, None)

    def _choose(
        self, hidden: Tensor, low: Tensor, angles: tuple[Tensor, Tensor], keys: Tensor, context: Any
    ) -> Tensor:
        """Cache slots that each row attends to, int32 [T, k], chosen by float32 scores: of hidden
        [T, H], the low-rank query `low` [T, q_lora_rank], cos and sin [T, rope], and indexer keys
        [N, P, D]."""
        indexer = self.indexer
        query = indexer.wq_b(low).unflatten(-1, (indexer.n_heads, indexer.head_dim))
        query = self.rotate_index(query, *angles)
        weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
        weights = weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)
        indices = (context.block_table, context.seq_lens, context.query_start_loc)
        return choose_slots(query, weights, keys, *indices, indexer.index_topk)


def cache_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """Page pools of the latent, [N, P, rank + rope], and of the indexer keys, [N, P, D]."""
    meaning = "DeepSeek-V3.2: indexer keys by page"
    index = paged_spec(f"kv.{layer}.index", (P, config.index_head_dim), dtype, meaning)
    return (*paged_latent_specs(config, layer, dtype), index)


def block_config(config: Any) -> Any:
    """A copy of the config with the MTP layers after the decoder's; they have routed experts.

    Each has an indexer of its own, which is not so of all layers of GLM-5's decoder.
    """
    last = config.layer_types[-1]
    return layers_after(config, layer_types=last, mlp_layer_types="sparse", indexer_types="full")


DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    architectures=("DeepseekV32ForCausalLM",),
    cache_specs=cache_specs,
    cache_kinds=(IndexedLatent,),
    block_config=block_config,
    canonical={"DeepseekV32Attention": SparseLatentAttention},
)

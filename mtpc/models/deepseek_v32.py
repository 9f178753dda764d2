"""DeepSeek-V3.2: DeepSeek-V3 whose rows attend to the positions that an indexer chooses for them.

Each attention layer has an indexer: a key for every token, kept in pages beside the latent, and a
few query heads that score all keys a row may see; attention is over the `index_topk` best of them
(DeepSeek Sparse Attention). MTP layers, experts and names are DeepSeek-V3's.

Source: transformers' DeepseekV32 (5.17 to 5.23), which, as here, leaves out the released code's
Hadamard rotation (it changes no product of query and key) and its FP8 rounding of keys.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtpc import ops
from mtpc.buffers import N, P
from mtpc.layout import NO_SLOT, BufferSpec
from mtpc.models.caches import paged_latent_specs
from mtpc.models.deepseek_v3 import DEEPSEEK_V3
from mtpc.models.glm4_moe import nextn_layers
from mtpc.ops.ragged import request_of


def _halves_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first features of x [T, n, D], halves as pairs; cos and sin are [T, rope]."""
    turned, plain = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    across = torch.cat([-second, first], -1)
    return torch.cat([turned * cos[:, None] + across * sin[:, None], plain], -1)


def _neighbours_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, n, rope], neighbours as pairs; gives first members, then second ones."""
    cos, sin = (angle.chunk(2, -1)[0][:, None] for angle in (cos, sin))
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class SparseLatentAttention(nn.Module):
    """Multi-head latent attention over chosen positions, in absorbed form.

    Chosen latents are gathered, so a row reads `index_topk` of them whatever its context; of
    indexer keys it reads those of `max_len` positions. A rejected row's latent and key are
    overwritten before a row may see their position.

    Args:
        source: transformers' `DeepseekV32Attention`; its parameters are shared.
    """

    def __init__(self, source: Any):
        super().__init__()
        self.layer_idx, self.scaling = source.layer_idx, source.scaling
        self.rank, self.rope = source.kv_lora_rank, source.qk_rope_head_dim
        self.nope, self.heads = source.qk_nope_head_dim, source.num_heads
        self.q_a_proj, self.q_a_layernorm = source.q_a_proj, source.q_a_layernorm
        self.q_b_proj, self.indexer = source.q_b_proj, source.indexer
        self.kv_a_proj_with_mqa = source.kv_a_proj_with_mqa
        self.kv_a_layernorm, self.kv_b_proj = source.kv_a_layernorm, source.kv_b_proj
        self.o_proj = source.o_proj

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, mtpc_context: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [1, T, H] -> [1, T, H], as transformers' module; its cache is ours."""
        hidden, context = hidden_states[0], mtpc_context
        cos, sin = (angle[0] for angle in position_embeddings)
        low = self.q_a_layernorm(self.q_a_proj(hidden))
        state = context.layers[self.layer_idx]
        self._write(hidden, cos, sin, state, context)
        token = torch.arange(hidden.shape[0], device=hidden.device)
        request = request_of(token, context.query_start_loc)
        table = context.block_table[request.clamp(max=context.block_table.shape[0] - 1)].long()
        # A padded row's table may hold anything; what it reads is masked.
        table = table.clamp(0, state.latent.shape[0] - 1)
        chosen, seen = self._choose(hidden, low, (cos, sin), table, (state.index, context))
        place = state.latent.shape[1]
        slots = table.gather(1, chosen // place) * place + chosen % place
        latents = torch.where(seen[..., None], state.latent.flatten(0, 1)[slots], 0)
        plain, turned = (
            self.q_b_proj(low).unflatten(-1, (self.heads, -1)).split([self.nope, self.rope], -1)
        )
        turned = _neighbours_rotated(turned, cos, sin)
        out = self._attend(plain, turned, latents, seen)
        return self.o_proj(out.flatten(1).to(hidden.dtype))[None], None

    def _write(self, hidden: Tensor, cos: Tensor, sin: Tensor, state: Any, context: Any) -> None:
        """Keep the rows' latents, rotated keys behind them, and indexer keys."""
        latent, key = self.kv_a_proj_with_mqa(hidden).split([self.rank, self.rope], -1)
        key = _neighbours_rotated(key[:, None], cos, sin)[:, 0]
        rows = torch.cat([self.kv_a_layernorm(latent), key], -1)
        ops.write_cache(state.latent, rows, context.slot_mapping)
        key = self.indexer.k_norm(self.indexer.wk(hidden))[:, None]
        rows = _halves_rotated(key, cos, sin)[:, 0]
        ops.write_cache(state.index, rows, context.slot_mapping)

    def _choose(
        self,
        hidden: Tensor,
        low: Tensor,
        angles: tuple[Tensor, Tensor],
        table: Tensor,
        held: tuple[Tensor, Any],
    ) -> tuple[Tensor, Tensor]:
        """The positions of highest score for each row, int64 [T, k], and which of them it sees."""
        indexer, (cache, context) = self.indexer, held
        keys = cache[table].flatten(1, 2)
        position = torch.arange(keys.shape[1], device=keys.device)
        live = (context.slot_mapping != NO_SLOT)[:, None]
        visible = (position[None] <= context.positions[:, None]) & live
        keys = torch.where(visible[..., None], keys, 0)
        query = indexer.wq_b(low).unflatten(-1, (indexer.n_heads, indexer.head_dim))
        query = _halves_rotated(query, *angles)
        scores = torch.einsum("thd,tcd->tch", query.float(), keys.float()) * indexer.softmax_scale
        weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
        weights = weights * indexer.n_heads**-0.5
        total = (F.relu(scores) * weights[:, None]).sum(-1)
        total = torch.where(visible, total, float("-inf"))
        chosen = total.topk(min(indexer.index_topk, keys.shape[1]), -1).indices
        return chosen, visible.gather(1, chosen)

    def _attend(self, plain: Tensor, turned: Tensor, latents: Tensor, seen: Tensor) -> Tensor:
        """[T, heads, v_head_dim] from chosen latents [T, k, rank + rope]; float32 at least."""
        wide = torch.promote_types(plain.dtype, torch.float32)
        up = self.kv_b_proj.weight.view(self.heads, -1, self.rank).to(wide)
        absorbed = torch.einsum("tnd,ndr->tnr", plain.to(wide), up[:, : self.nope])
        query, latents = torch.cat([absorbed, turned.to(wide)], -1), latents.to(wide)
        scores = torch.einsum("tnr,tkr->tnk", query, latents) * self.scaling
        scores = torch.where(seen[:, None], scores, float("-inf"))
        # A padded row sees nothing: its softmax is not a number, and is dropped.
        weights = torch.where(seen.any(1)[:, None, None], scores.softmax(-1), 0)
        out = torch.einsum("tnk,tkr->tnr", weights, latents[..., : self.rank])
        return torch.einsum("tnr,nvr->tnv", out, up[:, self.nope :])


def cache_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """Page pools of the latent, [N, P, rank + rope], and of the indexer's keys."""
    index = BufferSpec(f"kv.{layer}.index", (N, P, config.index_head_dim), dtype)
    return (*paged_latent_specs(config, layer, dtype), index)


def block_config(config: Any) -> Any:
    """A config in which MTP layers, of experts, follow the target's."""
    extended, count = copy.deepcopy(config), nextn_layers(config)
    extended.layer_types = [*config.layer_types, *(config.layer_types[-1:] * count)]
    extended.mlp_layer_types = [*config.mlp_layer_types, *(["sparse"] * count)]
    return extended


DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    architectures=("DeepseekV32ForCausalLM",),
    hf_class="DeepseekV32ForCausalLM",
    hf_config_class="DeepseekV32Config",
    cache_specs=cache_specs,
    block_config=block_config,
    canonical={"DeepseekV32Attention": SparseLatentAttention},
)

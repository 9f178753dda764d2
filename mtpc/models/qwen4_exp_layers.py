"""Qwen4-Exp's layers on explicit buffers: attention to chosen blocks, and embeddings of n-grams.

Both are canonical modules in place of transformers' (5.24).

Nothing is rolled back. Keys, values and indexer keys are in pages, where the next row at the same
position overwrites a rejected one. Token ids and inputs of a convolution are in rings by request
slot, see `slot_rings`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtpc import ops
from mtpc.errors import OptionError
from mtpc.layout import NO_SLOT
from mtpc.models.caches import PagedKV
from mtpc.models.hf import TextRotary
from mtpc.models.recurrent import RecurrentState
from mtpc.models.seams import CACHE, StandIn, StepContext
from mtpc.models.slot_rings import Rows, SlotRing
from mtpc.ops.choose_slots import choose_slots
from mtpc.ops.fused import rotate_halves
from mtpc.ops.ragged import request_of


@dataclass(frozen=True, kw_only=True)
class IndexedKV(PagedKV):
    """K and V pools, and indexer keys by page, [N, P, I].

    The last token of a block has the key of the block in place of its own: nothing reads that one
    after the block is closed.
    """

    index: Tensor

    def by_block(self, ratio: int) -> PagedKV:
        """The pools of K and V, in pages of `ratio` tokens."""

        def parted(pool: Tensor) -> Tensor:
            return pool.view(-1, ratio, *pool.shape[2:])

        k_scale, v_scale = (s if s is None else parted(s) for s in (self.k_scale, self.v_scale))
        return PagedKV(parted(self.k), parted(self.v), k_scale, v_scale)


@dataclass(frozen=True)
class LinearState(RecurrentState):
    """State of a Gated DeltaNet layer; with n-gram embeddings, the rings that these read: token
    ids, int64 [S, places, 1], and inputs of the convolution, [S, places, streams * H]."""

    ple_ids: Tensor | None = None
    ple_rows: Tensor | None = None


class BlockRotary(nn.Module):
    """The rotary embedding of rows, and of the first positions of their blocks of `ratio` tokens.

    (tensor of the wanted dtype and device, positions [T]) -> two pairs of cos and sin, [1, T, D].
    """

    def __init__(self, rotary: TextRotary, ratio: int):
        super().__init__()
        self.rotary, self.ratio = rotary, ratio

    def forward(self, like: Tensor, positions: Tensor) -> Any:
        first = positions - positions % self.ratio
        return self.rotary(like, positions), self.rotary(like, first)


class BlockAttention(StandIn):
    """Attention to the tokens of chosen blocks, and to those of the open block.

    A block is `ratio` tokens of a text. A row sees those that end at its position or before; its
    open block is the tokens after them. The indexer scores the blocks with a few query heads of its
    own, by the mean of their tokens' keys. Attention is that of a row whose context is what it
    attends to, in pages of a block.
    """

    def __init__(self, source: Any):
        super().__init__(source)
        self.ratio: int = source.indexer.compress_ratio

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [1, T, H] -> [1, T, H], as transformers' module computes it.

        `position_embeddings` are those of `BlockRotary`.
        """
        hidden, context = hidden_states[0], options[CACHE]
        (cos, sin), firsts = (tuple(a[0] for a in pair) for pair in position_embeddings)
        state: IndexedKV = context.layers[self.layer_idx]
        query, gate = self._heads(self.q_proj(hidden), 2 * self.head_dim).chunk(2, -1)
        query = rotate_halves(self.q_norm(query), cos, sin)
        key = self.k_norm(self._heads(self.k_proj(hidden), self.head_dim))
        value = self._heads(self.v_proj(hidden), self.head_dim)
        key = rotate_halves(key, cos, sin)
        state.write(key.transpose(0, 1)[None], value.transpose(0, 1)[None], context)
        asked = self._index(hidden, firsts, state.index, context)
        asked = rotate_halves(asked, cos, sin)
        # Each row is a request of one row there: its block table has its chosen blocks, positions
        # ascending, then its open block.
        row = torch.arange(asked.shape[0] + 1, device=asked.device, dtype=torch.int32)
        request = request_of(row[:-1], context.query_start_loc)
        request = request.clamp(max=context.block_table.shape[0] - 1)
        is_live = context.slot_mapping != NO_SLOT
        seen = torch.where(is_live, context.positions + 1, 0)
        closed, left = (seen // self.ratio).int(), seen % self.ratio
        # To the operator, blocks are positions; a page holds P // ratio of them.
        keys = state.index
        blocks = choose_slots(
            asked,
            torch.ones_like(asked[..., 0]),
            keys.view(-1, keys.shape[1] // self.ratio, self.ratio, keys.shape[2])[:, :, -1],
            context.block_table[request],
            closed,
            row,
            self.indexer.block_topk,
        )
        taken, own = closed.clamp(max=blocks.shape[1]), self._block_of(context).int()[:, None]
        column = torch.arange(blocks.shape[1] + 1, device=asked.device)
        table = torch.where(column == taken[:, None], own, torch.cat([blocks, own], 1))
        lens = taken * self.ratio + left.int()
        chosen = replace(context, block_table=table, seq_lens=lens, query_start_loc=row)
        pools = state.by_block(self.ratio)
        out = pools.attend(self, query.transpose(0, 1)[None], self.scaling, chosen)[0]
        return self.o_proj(out.flatten(1) * torch.sigmoid(gate.flatten(1)))[None], None

    def _heads(self, rows: Tensor, width: int) -> Tensor:
        return rows.unflatten(-1, (-1, width))

    def _index(
        self, hidden: Tensor, firsts: tuple[Tensor, ...], keys: Tensor, context: StepContext
    ) -> Tensor:
        """Write the indexer keys of rows [T, H] to pages [N, P, I], and those of the blocks that
        they close. `firsts` are cos and sin of the first position of each row's block, [T, rope].
        Returns the indexer's queries, normed, [T, heads, I]. Raises OptionError: a page does not
        hold whole blocks."""
        if keys.shape[1] % self.ratio:
            raise OptionError(
                f"page_size={keys.shape[1]}; expected a multiple of {self.ratio}, the model's "
                "indexer_compress_ratio, so that a page holds whole blocks"
            )
        indexer = self.indexer
        rows = self._heads(indexer.index_qk_proj(hidden), indexer.index_head_dim)
        asked, key = rows.split([indexer.index_n_heads, 1], 1)
        ops.write_cache(keys, key[:, 0], context.slot_mapping, None)
        # Complete where the row closes its block, and not used elsewhere.
        tokens = keys.view(-1, self.ratio, keys.shape[2])[self._block_of(context).clamp(min=0)]
        mean = tokens.float().mean(1).to(key.dtype)
        block = rotate_halves(indexer.k_layernorm(mean)[:, None], *firsts)[:, 0]
        closes = context.positions % self.ratio == self.ratio - 1
        ops.write_cache(keys, block, torch.where(closes, context.slot_mapping, NO_SLOT), None)
        return indexer.q_layernorm(asked)

    def _block_of(self, context: StepContext) -> Tensor:
        """The block of each row in all pages, int64 [T]; -1 where a row has no slot."""
        return context.slot_mapping // self.ratio


class NGramLayer(StandIn):
    """Per-layer embedding: adds embeddings of the last n-grams of token ids to every stream.

    Ids of n tokens are hashed to rows of a table. An n-gram does not reach over an end-of-sequence
    token, nor before the text's beginning: such places count as that token. A convolution with
    gaps over the last rows follows.
    """

    def forward(
        self, hidden_states: Tensor, input_ids: Tensor, context: StepContext, **options: Any
    ) -> Tensor:
        """hidden_states [1, T, streams * H], input_ids [1, T] -> [1, T, streams * H]."""
        state: LinearState = context.layers[self.layer_idx]
        assert state.ple_ids is not None
        assert state.ple_rows is not None
        rows, shape = Rows.of(context), (self.hc_count, -1)
        embedding = self._embed(input_ids[0], rows, SlotRing(state.ple_ids))
        key = self.norm_key(self.key_proj(embedding)).unflatten(-1, shape)
        query = self.norm_query(hidden_states[0]).unflatten(-1, shape)
        gate = (key * query).sum(-1, keepdim=True) / self.hidden_size**0.5
        gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
        value = torch.sigmoid(gate) * self.value_proj(embedding).unsqueeze(-2)
        value = value.flatten(-2)
        mixed = self._convolve(self.norm_conv(value), rows, SlotRing(state.ple_rows))
        return (value + F.silu(mixed))[None]

    def _embed(self, ids: Tensor, rows: Rows, ring: SlotRing) -> Tensor:
        """Embeddings of the n-grams that end in each row, side by side: [T, E]."""
        table = self.ple_embedding
        tokens = self._before(ids[:, None], table.ngram_size, 1, rows, ring, table.eos_token_id)
        ring.write(ids[:, None], rows)
        mixed = ids * table.layer_multipliers[0]
        found, last = [], ids.new_full((), -1)
        for back in range(1, table.ngram_size):
            token = tokens[:, back, 0]
            token = torch.where(last == table.eos_token_id, table.eos_token_id, token)
            last, mixed = token, mixed ^ (token * table.layer_multipliers[back])
            heads = slice((back - 1) * table.heads_per_ngram, back * table.heads_per_ngram)
            places = torch.remainder(mixed[:, None], table.ngram_heads_vocab_sizes[heads])
            found.append(places + table.ngram_heads_offsets[heads])
        return table.ngram_embedding(torch.cat(found, -1)).flatten(-2)

    def _convolve(self, inputs: Tensor, rows: Rows, ring: SlotRing) -> Tensor:
        """The convolution of inputs [T, C] over each row and earlier ones: [T, C]."""
        conv = self.conv1d
        taps = self._before(inputs, conv.kernel_size[0], conv.dilation[0], rows, ring, 0)
        ring.write(inputs, rows)
        wide = torch.promote_types(inputs.dtype, torch.float32)
        weight = conv.weight[:, 0].flip(-1).t()
        return (taps.to(wide) * weight.to(wide)).sum(1).to(inputs.dtype)

    def _before(
        self, fresh: Tensor, count: int, gap: int, rows: Rows, ring: SlotRing, missing: int
    ) -> Tensor:
        """Of each row, itself and what lies 1, 2, ... gaps before it: [T, count, D]. This forward's
        rows are `fresh` [T, D], and earlier ones in the ring; `missing` stands before the text."""
        back = torch.arange(count, device=fresh.device) * gap
        position = rows.position[:, None] - back
        found = ring.at(rows.request, position, fresh, rows)
        return torch.where((position >= 0)[..., None], found, missing)

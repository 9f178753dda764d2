"""DeepSeek-V4's attention on explicit buffers: a sliding window, and compressed entries beyond it.

A canonical module in place of transformers' `DeepseekV4Attention` (5.17 to 5.24). It reads keys
from rings and entries by request slot, where transformers keeps tensors that grow.

Rejected drafts need no rollback. A compressed entry w depends only on the tokens of window w (and
of window w - 1 if windows overlap). Position p sees entry w only if w < (p + 1) // ratio. So a
forward that closes a window writes the entry, over anything that a rejected draft left there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtpc import ops
from mtpc.layout import NO_SLOT
from mtpc.models.seams import StandIn
from mtpc.models.slot_rings import ClosedWindows, Rows, SlotRing, WindowMasks
from mtpc.ops.choose_slots import choose_slots


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the last 2n features of x by cos and sin [..., n], in float32.

    Neighbouring features are a pair. Source: this model's `apply_rotary_pos_emb` in transformers.
    """
    cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    plain, turned = x.split([x.shape[-1] - cos.shape[-1], cos.shape[-1]], -1)
    turned = turned.float()
    across = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
    return torch.cat([plain, (turned * cos + across * sin).to(x.dtype)], -1)


def compress(part: Any, hidden: Tensor, rows: Rows, ring: SlotRing, entries: Tensor) -> None:
    """Write the entries of the windows that a forward closes, and keep the forward's inputs, [T,
    H].

    For the compressor of HCA, and for those of CSA and its indexer, where an entry reads the window
    before its own, too. There the first half of a token's features is for the next window and the
    second half for its own. `ring` has inputs [S, places, 2C], where C is the head size, or twice
    that if windows overlap; entries are [S, E, D]. `part`, transformers' module, gives the
    parameters.
    """
    ratio, overlaps = part.compress_rate, part.kv_proj.out_features == 2 * part.head_dim
    fresh = torch.cat([part.kv_proj(hidden), part.gate_proj(hidden)], -1)
    windows = ClosedWindows.of(rows, ratio)
    first = windows.index * ratio
    offset = torch.arange(-ratio if overlaps else 0, ratio, device=hidden.device)
    position = first[:, None] + offset[None]
    alive = (windows.valid[:, None] & (position >= 0))[..., None]
    inputs = torch.where(alive, ring.at(windows.request, position, fresh, rows), 0)
    kv, gate = inputs.chunk(2, -1)
    bias = part.position_bias
    if overlaps:
        kv, gate = _halves(kv, ratio), _halves(gate, ratio)
        bias = torch.cat(bias.chunk(2, -1), 0)
    # Tokens before the first window have no weight. Entries that are not valid keep finite gates,
    # because a softmax over -inf alone is NaN.
    gate = torch.where(alive | ~windows.valid[:, None, None], gate + bias, float("-inf"))
    weights = gate.softmax(1, dtype=torch.float32).to(kv.dtype)
    made = part.kv_norm((kv * weights).sum(1))
    made = rotate(made, *angles(part, made, first))
    count = entries.shape[1]
    slot = rows.request_slot[windows.request] * count + windows.index
    slot = torch.where(windows.valid & (windows.index < count), slot, NO_SLOT)
    ops.write_cache(entries, made, slot, None)
    ring.write(fresh, rows)


def _halves(x: Tensor, ratio: int) -> Tensor:
    """Select [J, 2 * ratio, D] from [J, 2 * ratio, 2D]: the first half of the features for the
    window before, the second half for the window itself."""
    before, own = x.split([ratio, ratio], 1)
    return torch.cat([before.chunk(2, -1)[0], own.chunk(2, -1)[1]], 1)


def angles(part: Any, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary cos and sin, each [n, rotary / 2], of a compressor or indexer at positions [n]."""
    cos, sin = part.rotary_emb(like, position_ids=positions[None], layer_type="compress")
    return cos[0], sin[0]


def choose_entries(indexer: Any, hidden: Tensor, query: Tensor, rows: Rows, keys: Tensor) -> Tensor:
    """Choose for each row, in a CSA layer, the visible entries with the highest scores.

    Takes hidden [T, H], the attention's low-rank query [T, q_lora_rank], and the indexer's entries
    `keys` [S, E, D], those of this forward included. transformers' `DeepseekV4Indexer` gives the
    parameters.

    Returns:
        int32 [T, min(index_topk, E)]: places in the entries of all request slots, slot * E + entry,
        ascending; then -1, where a row sees fewer.
    """
    cos, sin = angles(indexer, hidden, rows.position)
    heads = indexer.q_b_proj(query).unflatten(-1, (-1, indexer.head_dim))
    heads = rotate(heads, cos[:, None], sin[:, None])
    scorer = indexer.scorer
    weights = scorer.weights_proj(hidden).float() * (scorer.weights_scaling * scorer.softmax_scale)
    # To the operator each row is a request of one row, whose entries are one page.
    seen = closed_windows(rows, indexer.compress_rate).clamp(max=keys.shape[1]).int()
    starts = torch.arange(seen.shape[0] + 1, device=seen.device, dtype=torch.int32)
    table = rows.slot[:, None].int()
    return choose_slots(heads, weights, keys, table, seen, starts, indexer.index_topk)


def closed_windows(rows: Rows, ratio: int) -> Tensor:
    """How many compressed entries each row sees: int64 [T], 0 for padding."""
    return torch.where(rows.live, (rows.position + 1) // ratio, 0)


@dataclass(frozen=True)
class CompressedState:
    """State of one attention layer by request slot: the ring of the last keys, which are also the
    values, [S, places, D]; the ring of the compressor's inputs, `raw` [S, places, 2C]; and
    compressed entries, [S, E, D]. The indexer has the last two of its own."""

    window: Tensor
    raw: Tensor | None = None
    entries: Tensor | None = None
    index_raw: Tensor | None = None
    index_entries: Tensor | None = None

    def attend_window(
        self, attention: Any, query: Tensor, fresh: Tensor, masks: WindowMasks,
        *entries: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Attend to the window and to entries (`WindowedAttention._entries`), then keep the fresh
        keys, which are also the values, [T, D]. query and result are [T, N, D]."""
        out = ops.slot_attention(
            query,
            fresh,
            self.window,
            masks.rows.slot,
            masks.ring,
            masks.fresh,
            attention.sinks,
            attention.scaling,
            attention.sliding_window,
            *entries,
        )
        SlotRing(self.window).write(fresh, masks.rows)
        return out


class WindowedAttention(StandIn):
    """One softmax over the window's keys and the layer's compressed entries, if it has any.

    Keys are the values, too: one head that all query heads share. A sink is a logit that only takes
    part in the normalisation.
    """

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        mtpc_context: Any,
        masks: WindowMasks | None,
    ) -> tuple[Tensor, None]:
        """hidden_states [1, T, H] -> [1, T, H], as transformers' module computes it.

        Without masks a host attends to the window; such a layer has no compressed entries.
        """
        hidden = hidden_states[0]
        cos, sin = (angle[0] for angle in position_embeddings[self.rope_layer_type])
        low = self.q_a_norm(self.q_a_proj(hidden))
        query = self.q_b_norm(self.q_b_proj(low).unflatten(-1, (-1, self.head_dim)))
        query = rotate(query, cos[:, None], sin[:, None])
        fresh = rotate(self.kv_norm(self.kv_proj(hidden)), cos, sin)
        state = mtpc_context.layers[self.layer_idx]
        entries = self._entries(hidden, low, masks, state)
        out = state.attend_window(self, query, fresh, masks, *entries)
        out = rotate(out, cos[:, None], -sin[:, None])
        grouped = self.o_a_proj(out.reshape(out.shape[0], self.config.o_groups, -1))
        return self.o_b_proj(grouped.flatten(1))[None], None

    def _entries(
        self, hidden: Tensor, low: Tensor, masks: WindowMasks | None, state: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Entries, how many each row sees, and which, as `mtpc::slot_attention` takes them."""
        if self.compressor is None:
            return None, None, None
        assert masks is not None
        rows = masks.rows
        compress(self.compressor, hidden, rows, SlotRing(state.raw), state.entries)
        closed = closed_windows(rows, self.compressor.compress_rate)
        closed = closed.clamp(max=state.entries.shape[1])
        indexer = getattr(self.compressor, "indexer", None)
        if indexer is None:
            return state.entries, closed, None
        compress(indexer, hidden, rows, SlotRing(state.index_raw), state.index_entries)
        chosen = choose_entries(indexer, hidden, low, rows, state.index_entries)
        return state.entries, closed.clamp(max=chosen.shape[1]), chosen

"""DeepSeek-V4's attention on explicit buffers: a sliding window, and compressed entries beyond it.

A canonical module, made of transformers' own (`DeepseekV4Attention`, 5.17 to 5.23) and holding its
parameters under its names. What differs is where keys come from: rings and entries by state slot
instead of tensors that grow. A compressed entry w depends on the tokens of window w (and of w - 1,
where windows overlap) alone, and position p sees it only if w < (p + 1) // ratio; so a forward that
closes a window writes its entry, over whatever rejected drafts had left there, and nothing is ever
rolled back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtpc import ops
from mtpc.layout import NO_SLOT
from mtpc.models.slot_rings import ClosedWindows, Rows, SlotRing, WindowMasks


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last 2 * n features of x by angles [.., n], neighbours in pairs, in float32.

    transformers' `apply_rotary_pos_emb` of this model, without its head dimension.
    """
    cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    plain, turned = x.split([x.shape[-1] - cos.shape[-1], cos.shape[-1]], -1)
    turned = turned.float()
    across = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
    return torch.cat([plain, (turned * cos + across * sin).to(x.dtype)], -1)


def compress(part: Any, hidden: Tensor, rows: Rows, ring: SlotRing, entries: Tensor) -> None:
    """Write the entries of the windows that a forward closes, and keep its inputs.

    Serves HCA's compressor, and, with windows that overlap by one (a token has one half of its
    features for the next window and one for its own), CSA's and its indexer's.

    Args:
        part: transformers' compressor or indexer, for its parameters.
        hidden: [T, H].
        rows: of the forward.
        ring: of inputs, [S, places, 2C]; C is the head's size, twice that where windows overlap.
        entries: [S, E, D].
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
        kv, gate = _halves(kv, ratio, 1), _halves(gate, ratio, 1)
        bias = torch.cat(bias.chunk(2, -1), 0)
    # Before the first window there is nothing; entries that are not valid only must not be NaN.
    gate = torch.where(alive | ~windows.valid[:, None, None], gate + bias, float("-inf"))
    weights = gate.softmax(1, dtype=torch.float32).to(kv.dtype)
    made = part.kv_norm((kv * weights).sum(1))
    made = rotate(made, *angles(part, made, first))
    count = entries.shape[1]
    slot = rows.request_slot[windows.request] * count + windows.index
    slot = torch.where(windows.valid & (windows.index < count), slot, NO_SLOT)
    ops.write_cache(entries, made, slot)
    ring.write(fresh, rows)


def _halves(x: Tensor, ratio: int, dim: int) -> Tensor:
    """[J, 2 * ratio, 2D]: the first half of the window before, the second of the window itself."""
    before, own = x.split([ratio, ratio], dim)
    return torch.cat([before.chunk(2, -1)[0], own.chunk(2, -1)[1]], dim)


def angles(part: Any, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [n, rotary / 2] at positions [n], of a compressor or indexer."""
    cos, sin = part.rotary_emb(like, position_ids=positions[None], layer_type="compress")
    return cos[0], sin[0]


def choose_entries(indexer: Any, hidden: Tensor, query: Tensor, rows: Rows, keys: Tensor) -> Tensor:
    """CSA's choice for each row: the entries of highest score among those it sees.

    Args:
        indexer: transformers' `DeepseekV4Indexer`, for its parameters.
        hidden: [T, H].
        query: the attention's low-rank query, [T, q_lora_rank].
        rows: of the forward.
        keys: [S, E, D] entries of the indexer, this forward's written.

    Returns:
        int64 [T, min(index_topk, E)], distinct; a row that sees fewer gets some it does not see.
    """
    visible = visible_entries(rows, indexer.compress_rate, keys.shape[1])
    own = torch.where(visible[..., None], keys[rows.slot], 0)
    cos, sin = angles(indexer, hidden, rows.position)
    heads = indexer.q_b_proj(query).unflatten(-1, (-1, indexer.head_dim))
    heads = rotate(heads, cos[:, None], sin[:, None])
    scorer = indexer.scorer
    scores = F.relu(torch.einsum("thd,ted->teh", heads.float(), own.float()))
    weights = scorer.weights_proj(hidden).float() * scorer.weights_scaling
    total = (scores * scorer.softmax_scale * weights[:, None]).sum(-1)
    total = torch.where(visible, total, float("-inf"))
    return total.topk(min(indexer.index_topk, keys.shape[1]), -1).indices


def visible_entries(rows: Rows, ratio: int, count: int) -> Tensor:
    """bool [T, count]: which compressed entries each row sees."""
    entry = torch.arange(count, device=rows.position.device)
    closed = (rows.position + 1) // ratio
    return (entry[None] < closed[:, None]) & rows.live[:, None]


class WindowedAttention(nn.Module):
    """One softmax over the window's keys and, where the layer has them, compressed entries.

    Keys are values: one head of each, shared by all query heads. A sink is a logit that takes part
    in the normalisation only.

    Args:
        source: transformers' `DeepseekV4Attention`; its parameters are shared.
    """

    def __init__(self, source: Any):
        super().__init__()
        self.layer_idx, self.head_dim = source.layer_idx, source.head_dim
        self.scaling, self.window = source.scaling, source.sliding_window
        self.groups, self.rope_layer_type = source.config.o_groups, source.rope_layer_type
        self.q_a_proj, self.q_a_norm = source.q_a_proj, source.q_a_norm
        self.q_b_proj, self.q_b_norm = source.q_b_proj, source.q_b_norm
        self.kv_proj, self.kv_norm = source.kv_proj, source.kv_norm
        self.o_a_proj, self.o_b_proj = source.o_a_proj, source.o_b_proj
        self.sinks, self.compressor = source.sinks, source.compressor

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        mtpc_context: Any,
        masks: WindowMasks,
    ) -> tuple[Tensor, None]:
        """hidden_states [1, T, H] -> [1, T, H], as transformers' module; its cache is ours."""
        hidden = hidden_states[0]
        cos, sin = (angle[0] for angle in position_embeddings[self.rope_layer_type])
        low = self.q_a_norm(self.q_a_proj(hidden))
        query = self.q_b_norm(self.q_b_proj(low).unflatten(-1, (-1, self.head_dim)))
        query = rotate(query, cos[:, None], sin[:, None])
        fresh = rotate(self.kv_norm(self.kv_proj(hidden)), cos, sin)
        state = mtpc_context.layers[self.layer_idx]
        keys, seen = self._old_keys(hidden, low, masks, state)
        out = self._attend(query, keys, seen, fresh, masks)
        SlotRing(state.window).write(fresh, masks.rows)
        out = rotate(out.to(hidden.dtype), cos[:, None], -sin[:, None])
        grouped = self.o_a_proj(out.reshape(out.shape[0], self.groups, -1))
        return self.o_b_proj(grouped.flatten(1))[None], None

    def _old_keys(
        self, hidden: Tensor, low: Tensor, masks: WindowMasks, state: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys [T, n, D] of the ring, as it was before this forward, and entries; who is seen."""
        rows = masks.rows
        keys, seen = [state.window[rows.slot]], [masks.ring]
        if self.compressor is not None:
            compress(self.compressor, hidden, rows, SlotRing(state.raw), state.entries)
            count = state.entries.shape[1]
            visible = visible_entries(rows, self.compressor.compress_rate, count)
            indexer = getattr(self.compressor, "indexer", None)
            if indexer is None:
                keys.append(state.entries[rows.slot])
                seen.append(visible)
            else:
                compress(indexer, hidden, rows, SlotRing(state.index_raw), state.index_entries)
                chosen = choose_entries(indexer, hidden, low, rows, state.index_entries)
                keys.append(state.entries.flatten(0, 1)[rows.slot[:, None] * count + chosen])
                seen.append(visible.gather(1, chosen))
        return torch.cat(keys, 1), torch.cat(seen, 1)

    def _attend(
        self, query: Tensor, keys: Tensor, seen: Tensor, fresh: Tensor, masks: WindowMasks
    ) -> Tensor:
        """[T, N, D] from old keys [T, n, D] and this forward's [T, D], in float32 at least."""
        wide = torch.promote_types(query.dtype, torch.float32)
        old = torch.where(seen[..., None], keys, 0).to(wide)
        new = torch.where(masks.rows.live[:, None], fresh, 0).to(wide)
        query = query.to(wide) * self.scaling
        scores = torch.cat(
            [torch.einsum("tnd,tcd->tnc", query, old), torch.einsum("tnd,ud->tnu", query, new)], -1
        )
        scores = torch.where(torch.cat([seen, masks.fresh], 1)[:, None], scores, float("-inf"))
        sinks = self.sinks.to(wide)[None, :, None].expand(scores.shape[0], -1, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)
        before, own, _ = weights.split([old.shape[1], new.shape[0], 1], -1)
        return torch.einsum("tnc,tcd->tnd", before, old) + torch.einsum("tnu,ud->tnd", own, new)

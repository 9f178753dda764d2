"""Paged attention for several query rows per request, and its latent (MLA) forms.

Shared conventions: there are T flat query rows. Request r owns rows query_start_loc[r] to
query_start_loc[r+1]. Its row j stands at position seq_lens[r] - query_len[r] + j and attends to
all cache positions up to its own. Position p of request r lies in page block_table[r, p // P] at
offset p % P. The results of rows that belong to no request, and of rows of a request with
seq_lens 0, are zeros. Cache contents outside the attended positions may be anything, even NaN.

References compute in float32, or in float64 where the inputs are float64. They copy nothing from
the device to the host.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mtpc.ops.traits import Cut, Traits, operator, with_features


def _accumulate_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


HEADS = 2
"""The dimension of key/value heads: of caches [pages, P, H, D], and of their scales."""
_CACHES = "k_cache v_cache k_scale v_scale"
_BY_HEAD = {"q": 1, "sinks": 0} | dict.fromkeys(_CACHES.split(), HEADS)
"""What is cut where ranks have heads, and along which dimension."""
ATTENDS = Traits(
    "row", "sums", requests="block_table seq_lens query_start_loc", features=None, skips_idle=True
)
"""What operators that read pages have in common."""
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest magnitude of a code, by the dtype of a cache that holds codes."""


def spread(rows: Tensor) -> Tensor:
    """Hadamard transform of the last dimension, in blocks of the largest power of two in it.

    Each feature of a block becomes a sum of all of them with signs: where a few features of keys
    are far larger than the others, no step of codes is as large as these ask for. Products of
    spread rows are the block's size times those of the rows, so `unspread(spread(x))` is x. See
    QuaRot (https://arxiv.org/abs/2404.00456).

    Args:
        rows: [..., D], floating point.

    Returns:
        As rows. Pairs that are added are 1, 2, 4, ... apart.
    """
    block, apart = rows.shape[-1] & -rows.shape[-1], 1
    while apart < block:
        first, second = rows.unflatten(-1, (-1, 2, apart)).unbind(-2)
        rows = torch.stack([first + second, first - second], -2).flatten(-3)
        apart *= 2
    return rows


def unspread(rows: Tensor) -> Tensor:
    return spread(rows) / (rows.shape[-1] & -rows.shape[-1])


def quantise_rows(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of one byte for rows of heads, and a scale for each row and head.

    A scale depends on its own row and head alone. So a row has the same codes whatever rows are
    written beside it, before it or over it.

    Args:
        rows: [T, H, D], floating point. They are rounded to float32 first.
        dtype: of the codes: int8, or float8_e4m3fn.

    Returns:
        Codes [T, H, D]: the nearest to rows / scales, ties to even, where int8 takes the rows as
        `spread` gives them; and float32 scales [T, H]: the row's largest magnitude divided by the
        largest code. A row with NaN or infinity gets a scale of NaN or infinity and codes 0, so
        that its values read as NaN.
    """
    wide, largest = rows.float(), LARGEST_CODE[dtype]
    wide = spread(wide) if dtype == torch.int8 else wide
    scales = wide.abs().amax(-1) / largest
    is_finite = scales.isfinite()
    divisor = torch.where(is_finite & (scales > 0), scales, 1)
    codes = torch.where(is_finite[..., None], wide / divisor[..., None], 0)
    codes = codes.clamp(-largest, largest)  # Subnormal scales are imprecise.
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scales


@operator(
    Traits(
        "row",
        "elements",
        rows="rows slot_mapping",
        pages="cache scales",
        features=None,
        skips_idle=True,
        cuts=(Cut({"cache": HEADS, "rows": 1, "scales": HEADS}, None),),
    ),
    mutates_args=("cache", "scales"),
)
def write_cache(cache: Tensor, rows: Tensor, slot_mapping: Tensor, scales: Tensor | None) -> None:
    """Write each row at its slot; slot -1 writes nothing.

    Args:
        cache: [N, P, ...], pages. With scales: [N, P, H, D] of int8 or float8_e4m3fn.
        rows: [T, ...], any dtype (cast to the cache's).
        slot_mapping: int64 [T], page * P + offset, or -1. Slots of live rows are distinct.
        scales: float32 [N, P, H], or None. With it, `cache` gets the rows' codes and `scales` their
            scales; see `quantise_rows`.
    """
    if scales is None:
        return _write_rows(cache, rows, slot_mapping)
    codes, steps = quantise_rows(rows, cache.dtype)
    _write_rows(cache.view(torch.uint8), codes.view(torch.uint8), slot_mapping)
    _write_rows(scales, steps, slot_mapping)


def _write_rows(cache: Tensor, rows: Tensor, slot_mapping: Tensor) -> None:
    flat = cache.view(-1, *cache.shape[2:])
    # Rows without a slot write the value of slot 0 back to slot 0. Page 0 is the null page, which
    # no live row writes, so its contents stay, and the host need not filter rows.
    live = slot_mapping >= 0
    slots = torch.where(live, slot_mapping, 0)
    shape = (-1, *([1] * (rows.dim() - 1)))
    values = torch.where(live.view(shape), rows.to(cache.dtype), flat[0])
    flat.index_copy_(0, slots, values)


def visible_positions(
    num_tokens: int,
    context: int,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    request: int,
    sliding_window: int,
) -> Tensor:
    """bool [T, C]: the cache positions of one request that each flat row attends to."""
    token = torch.arange(num_tokens, device=seq_lens.device)
    start, end = query_start_loc[request], query_start_loc[request + 1]
    position = seq_lens[request] - (end - token)
    row_on = (token >= start) & (token < end) & (seq_lens[request] > 0)
    key = torch.arange(context, device=seq_lens.device)
    visible = row_on[:, None] & (key[None] <= position[:, None])
    if sliding_window > 0:
        visible &= key[None] > position[:, None] - sliding_window
    return visible


def _softmax_rows(scores: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
    """Masked softmax over the last dim of scores [T, N, C]; fully masked rows give zeros.

    A sink is a logit that takes part in the normalisation and has no value.
    """
    scores = torch.where(visible[:, None], scores, float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    if sinks is not None:
        peak = torch.maximum(peak, sinks.to(scores.dtype)[None, :, None])
    peak = torch.where(torch.isfinite(peak), peak, 0)
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.to(scores.dtype)[None, :, None] - peak).exp()
    return weights / torch.where(total > 0, total, 1)


def gather_pages(cache: Tensor, block_table: Tensor, request: int) -> Tensor:
    """[C, ...]: the pages of one request in order, C = M * P."""
    pages = block_table[request].long().clamp(0, cache.shape[0] - 1)
    return cache[pages].flatten(0, 1)


def _by_head(
    scales: Tensor, block_table: Tensor, request: int, attended: Tensor, groups: int
) -> Tensor:
    """[N, C]: one request's scales for each query head, zeros where no row attends."""
    own = gather_pages(scales, block_table, request)
    return torch.where(attended[..., 0], own, 0).repeat_interleave(groups, 1).T


@operator(
    replace(ATTENDS, rows="q", pages=_CACHES, cuts=(Cut(_BY_HEAD, 1),)),
    lambda q, v_cache: with_features(q, v_cache.shape[3]),
)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention over paged K and V.

    Args:
        q: [T, N, D].
        k_cache: [pages, P, H_kv, D], H_kv divides N.
        v_cache: [pages, P, H_kv, D_v].
        block_table: int32 [R, M].
        seq_lens: int32 [R].
        query_start_loc: int32 [R+1].
        scale: multiplies the scores.
        sliding_window: a row attends to this many last positions, its own included; 0 is all.
        softcap: s -> softcap * tanh(s / softcap) on the scores; 0 is off.
        sinks: [N] sink logits, or None.
        k_scale: float32 [pages, P, H_kv] where the caches hold codes (`quantise_rows`), or None.
            A key is its codes times its scale: scores are products with codes, times the scale.
            Codes of int8 are of spread rows: queries are spread, too, and the results unspread.
        v_scale: as k_scale, of the values. Weights are multiplied by it before they are applied.

    Returns:
        [T, N, D_v], dtype of q.
    """
    acc = _accumulate_dtype(q)
    is_spread = k_scale is not None and k_cache.dtype == torch.int8
    groups = q.shape[1] // k_cache.shape[2]
    out = q.new_zeros((*q.shape[:2], v_cache.shape[3]))
    queries = unspread(q.to(acc)) if is_spread else q.to(acc)
    context = block_table.shape[1] * k_cache.shape[1]
    for request in range(block_table.shape[0]):
        visible = visible_positions(
            q.shape[0], context, seq_lens, query_start_loc, request, sliding_window
        )
        attended = visible.any(0)[:, None, None]
        keys = gather_pages(k_cache, block_table, request).to(acc)
        values = gather_pages(v_cache, block_table, request).to(acc)
        keys = torch.where(attended, keys, 0).repeat_interleave(groups, 1)
        values = torch.where(attended, values, 0).repeat_interleave(groups, 1)
        scores = torch.einsum("tnd,cnd->tnc", queries, keys) * scale
        if k_scale is not None:
            scores = scores * _by_head(k_scale, block_table, request, attended, groups).to(acc)
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        weights = _softmax_rows(scores, visible, sinks)
        if v_scale is not None:
            weights = weights * _by_head(v_scale, block_table, request, attended, groups).to(acc)
        rows = torch.einsum("tnc,cnd->tnd", weights, values)
        rows = (unspread(rows) if is_spread else rows).to(q.dtype)
        out = torch.where(visible.any(1)[:, None, None], rows, out)
    return out.contiguous()  # As the fake says; where() follows the strides of einsum.


@operator(
    replace(ATTENDS, rows="q", pages="latent_cache", cuts=(Cut({"q": 1}, 1),)),
    lambda q, latent_rank: with_features(q, latent_rank),
)
def latent_attention(
    q: Tensor,
    latent_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    latent_rank: int,
) -> Tensor:
    """Multi-head latent attention in absorbed form: one shared key/value head, the latent itself.

    DeepSeek-V2, arXiv:2405.04434, section 2.1.2. Keys are the whole rows of `latent_cache` [pages,
    P, rank + rope], values their first `latent_rank` (kv_lora_rank) entries. Queries q [T, N, rank
    + rope] are already multiplied by the key up-projection. Other arguments are those of
    `paged_attention`. Returns [T, N, rank], to be multiplied by the value up-projection; dtype of
    q.
    """
    keys = latent_cache[:, :, None, :]
    values = keys[..., :latent_rank]
    return paged_attention(q, keys, values, block_table, seq_lens, query_start_loc, scale)


@operator(
    replace(ATTENDS, rows="q", pages="latent_cache", cuts=(Cut({"q": 1, "kv_up": 0}, 1),)),
    lambda q, kv_up, nope_dim: with_features(q, kv_up.shape[0] // q.shape[1] - nope_dim),
)
def expanded_latent_attention(
    q: Tensor,
    latent_cache: Tensor,
    kv_up: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    nope_dim: int,
) -> Tensor:
    """Multi-head latent attention as the model defines it: keys and values expanded, then attended.

    The traced form; the pass `absorb-latent` rewrites it to `latent_attention`, whose arguments it
    has, but for q [T, N, nope + rope] and the up-projection `kv_up` (kv_b_proj) [N * (nope + D_v),
    rank]. `nope_dim` is the width of queries and keys without rotary embedding. Returns [T, N,
    D_v], dtype of q.
    """
    heads, rank = q.shape[1], kv_up.shape[1]
    up = kv_up.view(heads, -1, rank)
    latent, rope = latent_cache[..., :rank], latent_cache[..., rank:]
    # Expanded in the accumulation dtype, which is where the model rounds.
    expanded = torch.einsum(
        "npr,hdr->nphd", latent.to(_accumulate_dtype(q)), up.to(_accumulate_dtype(q))
    )
    shared = rope[:, :, None, :].expand(-1, -1, heads, -1).to(expanded.dtype)
    keys = torch.cat([expanded[..., :nope_dim], shared], -1)
    values = expanded[..., nope_dim:]
    return paged_attention(q, keys, values, block_table, seq_lens, query_start_loc, scale)

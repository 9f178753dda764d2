"""Latent attention (MLA decode, absorbed): all heads attend to one latent row per position.

A block of latents is loaded once and serves as key and, its first `rank` entries, as value. The
rotary part is a dot product of its own, so that 512 + 64 is not padded to 1024. Splits as in
`paged_attention`. (DeepSeek-V2, arXiv:2405.04434, section 2.1.2.)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.combine import combine_launches, splits_for
from mtpc.backends.triton_kernels.launch import (
    Change,
    Choice,
    Launch,
    adjacent,
    await_launches,
    power_of_two,
    widen,
)
from mtpc.backends.triton_kernels.operator import Plan, attention_limit, operator
from mtpc.backends.triton_kernels.tiles import (
    attended,
    busy_tiles,
    dot,
    fade_in,
    join,
    leave_result,
    leave_split,
    locate,
    nothing,
    num_tiles,
    tile_range,
)

_TILE = 16
"""Rows times heads in a program's tile. Every tile reads the latents again."""

_WIDE = 4
"""The factor of heads that fills one instruction of Hopper (wgmma). On an H100, such tiles with 64
positions take a third of the time, and default tiles with 128 threads three quarters. On gfx942 all
of these spill."""
_FEW_HEADS = Choice((Change(threads=128), Change(num_stages=1)))
_MANY_HEADS = Choice(
    (
        *_FEW_HEADS.changes,
        Change(factors={"TILE_HEADS": _WIDE, "BLOCK_N": 2}),
        Change(factors={"TILE_HEADS": _WIDE}),
    ),
    {"TILE_HEADS": (1, "HEADS")},
)


@triton.jit
def latent_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, cache_ptr, table_ptr, lens_ptr, starts_ptr, acc_ptr, stats_ptr, out_ptr,
    num_reqs, num_tokens, table_width, q_token, q_head, cache_page, cache_row,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    SCALE: tl.constexpr, SPLITS: tl.constexpr, EACH: tl.constexpr, DIRECT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, R_PAD: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program with one of several splits writes acc and stats; if DIRECT, it has all splits (EACH
    of them), and writes out. Rows of no request are those of one more, which is off: zeros."""
    await_launches(EARLY)
    split, reqs = tl.program_id(2), tl.arange(0, R_PAD)
    begins = tl.load(starts_ptr + reqs, mask=reqs <= num_reqs, other=0)
    ends = tl.load(starts_ptr + 1 + reqs, mask=reqs < num_reqs, other=num_tokens)
    lens = tl.load(lens_ptr + reqs, mask=reqs < num_reqs, other=0)
    request, start, rows, length, first = locate(reqs, begins, ends, lens, num_reqs + 1, TILE_ROWS)
    if (first >= rows) | ((length <= 0) & (not DIRECT)):
        return
    lane = tl.arange(0, TILE_ROWS * TILE_HEADS)
    row, head = first + lane // TILE_HEADS, tl.program_id(1) * TILE_HEADS + lane % TILE_HEADS
    live = (row < rows) & (head < HEADS)
    position = length - rows + row
    c, r = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    q_at = (q_ptr + (start + row).to(tl.int64) * q_token + head * q_head)[:, None]
    q = tl.load(q_at + c[None], mask=live[:, None] & (c < RANK)[None], other=0.0)
    q_rope = tl.load(q_at + RANK + r[None], mask=live[:, None] & (r < ROPE)[None], other=0.0)
    peak, total, acc = nothing(TILE_ROWS * TILE_HEADS, BLOCK_RANK)
    for part in range(0, EACH):
        peak_b, total_b, acc_b = nothing(TILE_ROWS * TILE_HEADS, BLOCK_RANK)
        lo, hi, begin = tile_range(length, rows, first, table_width * PAGE, split + part,
                                   TILE_ROWS, 0, SPLITS, BLOCK_N)  # fmt: skip
        for n in range(begin, hi, SPLITS * BLOCK_N):
            key = n + tl.arange(0, BLOCK_N)
            inside = (key >= lo) & (key < hi)
            page = tl.load(table_ptr + request * table_width + key // PAGE, mask=inside, other=0)
            at = cache_ptr + page.to(tl.int64) * cache_page + (key % PAGE).to(tl.int64) * cache_row
            latent_mask = inside[:, None] & (c < RANK)[None]
            latent = tl.load(at[:, None] + c[None], mask=latent_mask, other=0.0).to(q.dtype)
            rope_mask = inside[None] & (r < ROPE)[:, None]
            rope = tl.load(at[None] + RANK + r[:, None], mask=rope_mask, other=0.0).to(q.dtype)
            visible = live[:, None] & inside[None] & (key[None] <= position[:, None])
            scores = (dot(q, tl.trans(latent), WIDEN) + dot(q_rope, rope, WIDEN)) * SCALE
            weights, fade, peak_b, total_b = fade_in(scores, visible, peak_b, total_b, 0.0)
            acc_b = acc_b * fade[:, None] + dot(weights.to(latent.dtype), latent, WIDEN)
        peak, total, acc = join(peak, total, acc, peak_b, total_b, acc_b, EACH)
    own = (split * num_tokens + start + row) * HEADS + head
    if DIRECT:  # The only split of the grid is 0.
        found = attended(peak, total, acc, total, False)
        leave_result(out_ptr + own.to(tl.int64) * RANK, found, live, RANK)
    else:
        acc_at = acc_ptr + own.to(tl.int64) * RANK
        leave_split(stats_ptr + 2 * own, acc_at, peak, total, acc, live, RANK)


@operator(limit=attention_limit)
def latent_attention(
    q: Tensor, latent_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    query_start_loc: Tensor, scale: float, latent_rank: int, *, batch_invariant: bool = False,
) -> Plan:  # fmt: skip
    """Attention by splits, then the sum of the splits, unless programs have all of them.

    Raises:
        BackendError: elements of a cache's row are not adjacent in memory.
    """
    q = q if q.stride(-1) == 1 else q.contiguous()
    cache = adjacent(latent_cache, "latent_cache")
    table, seq_lens = block_table.contiguous(), seq_lens.contiguous()
    starts = query_start_loc.contiguous()
    (num_tokens, heads, width), (num_reqs, blocks) = q.shape, table.shape
    rank, page_size = latent_rank, cache.shape[1]
    tile_rows = _TILE // min(power_of_two(heads), _TILE)
    if not batch_invariant:
        tile_rows = min(power_of_two(-(-num_tokens // num_reqs)), tile_rows)
    tile_heads = _TILE // tile_rows
    block_n = 32 if q.dtype.itemsize == 2 else 16
    tiles, head_blocks = num_tiles(num_tokens, num_reqs + 1, tile_rows), -(-heads // tile_heads)
    alone = head_blocks if batch_invariant else 0
    most, nbytes = -(-blocks * page_size // block_n), 4 * num_tokens * heads * rank
    busy = busy_tiles(num_tokens, num_reqs, tile_rows) * head_blocks
    splits = splits_for(busy, most, alone, nbytes)
    acc, stats, out = splits.tensors(q, rank)
    values = dict(
        q_ptr=q, cache_ptr=cache, table_ptr=table, lens_ptr=seq_lens, starts_ptr=starts,
        out_ptr=out, acc_ptr=acc, stats_ptr=stats, num_reqs=num_reqs, num_tokens=num_tokens,
        table_width=blocks, q_token=q.stride(0), q_head=q.stride(1),
        cache_page=cache.stride(0), cache_row=cache.stride(1),
        HEADS=heads, RANK=rank, ROPE=width - rank, PAGE=page_size, SCALE=scale,
        SPLITS=splits.count, EACH=splits.each, DIRECT=splits.is_direct,
        TILE_ROWS=tile_rows, TILE_HEADS=tile_heads,
        BLOCK_N=block_n, BLOCK_RANK=power_of_two(rank, 16),
        BLOCK_ROPE=power_of_two(width - rank, 16), R_PAD=power_of_two(num_reqs + 1, 16),
        WIDEN=widen(latent_attention_kernel, q, cache),
    )  # fmt: skip
    grid = (tiles, head_blocks, splits.programs)
    choice = _MANY_HEADS if heads * tile_rows >= _WIDE * _TILE else _FEW_HEADS
    attend = Launch(latent_attention_kernel, grid, values, choice=choice)
    return [attend, *combine_launches(acc, stats, (seq_lens, starts), out, None, splits)], out

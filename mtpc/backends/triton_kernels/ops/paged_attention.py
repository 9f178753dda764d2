"""Paged attention for few query rows per request: each page is read once per key/value head.

A program handles one tile of query rows (all heads of a group), one key/value head and one split
of the context, and `combine` joins the splits; or a program goes through all splits. Split s takes
the blocks of positions b with b % splits == s, whatever the length: a row's bits depend neither on
seq_lens nor on which other rows its request has, and short contexts still spread over the splits.
A program whose split has no block ends at once. (Online softmax: Milakov and Gimelshein,
arXiv:1805.02867; splits: Dao et al., "Flash-Decoding", 2023.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.codes import as_codes, read_codes, read_scales, unspread, weigh
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
    split_blocks,
    tile_range,
)

_TILES = {2: {128: (64, 64), 1024: (32, 32)}, 4: {64: (64, 32), 1024: (16, 16)}}
"""Query rows times heads that a program holds, unless one group alone is larger, and positions at a
time; by bytes of an element and the largest head dim. With more, wide heads and float32 spill on
NVIDIA."""
_MOST_CODES = 32
"""The most positions at a time where caches hold codes, which are widened in registers. More spill
on AMD."""
_FEW_SPREAD = 16
"""The most query rows times heads of a program that spreads heads wider than 128. More spill."""
_WAVES = 4
"""See `splits_for`."""

_FEW = 4096
"""The most sums of a program of 128 threads. On an H100 they are faster than 256 threads."""
# AMD, by Triton 3.9: products of 16 rows take under 256 registers, so that two waves share a unit.
_CHOICE = Choice(
    (
        Change(threads=256),
        Change(factors={"BLOCK_N": 0.5}),
        Change(num_stages=3),
        Change(amd={"matrix_instr_nonkdim": 16}),
    )
)


@triton.jit
def _sees(position, key, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    return (key <= position) & ((WINDOW <= 0) | (key > position - WINDOW))


@triton.jit
def _queries(at, live, D: tl.constexpr, BLOCK_D: tl.constexpr, SPREAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Queries at these places, as the keys' codes are spread."""
    d = tl.arange(0, BLOCK_D)
    q = tl.load(at[:, None] + d[None], mask=live[:, None] & (d < D)[None], other=0.0)
    return unspread(q, D).to(q.dtype) if SPREAD else q


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, k_at, v_at, k_scale_at, v_scale_at, inside, visible, peak, total, acc,
    D: tl.constexpr, DV: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    CODED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attention to the keys and values at k_at and v_at, which the caller computes; see
    `tiles.locate`. With codes there, each position's scales count with its score and its weight."""
    d, dv = tl.arange(0, q.shape[1]), tl.arange(0, acc.shape[1])
    k_mask, v_mask = inside[None] & (d < D)[:, None], inside[:, None] & (dv < DV)[None]
    k = tl.load(k_at[None] + d[:, None], mask=k_mask, other=0.0)
    if CODED:
        scales = read_scales(tl.load(k_scale_at, mask=inside, other=0.0), k.dtype)
        scores = dot(q, read_codes(k, q.dtype), WIDEN) * (SCALE * scales)[None]
    else:
        scores = dot(q, k.to(q.dtype), WIDEN) * SCALE
    weights, fade, peak, total = fade_in(scores, visible, peak, total, SOFTCAP)
    v = tl.load(v_at[:, None] + dv[None], mask=v_mask, other=0.0)
    if CODED:
        scales = read_scales(tl.load(v_scale_at, mask=inside, other=0.0), v.dtype)
        weights, powers = weigh(weights, scales, q.dtype)
        sums = dot(weights, read_codes(v, q.dtype), WIDEN) * powers[:, None]
    else:
        sums = dot(weights.to(v.dtype), v, WIDEN)
    return peak, total, acc * fade[:, None] + sums


@triton.jit
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr,
    lens_ptr, starts_ptr, sinks_ptr, acc_ptr, stats_ptr, out_ptr,
    num_reqs, num_tokens, table_width, q_token, q_head,
    k_page, k_row, k_head, v_page, v_row, v_head,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr, EACH: tl.constexpr, DIRECT: tl.constexpr,
    TILE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, R_PAD: tl.constexpr,
    CODED: tl.constexpr, SPREAD: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program with one of several splits writes acc and stats; if DIRECT, it has all splits (EACH
    of them), and writes out. Rows of no request are those of one more, which is off: zeros."""
    await_launches(EARLY)
    kv_head, split, reqs = tl.program_id(1), tl.program_id(2), tl.arange(0, R_PAD)
    begins = tl.load(starts_ptr + reqs, mask=reqs <= num_reqs, other=0)
    ends = tl.load(starts_ptr + 1 + reqs, mask=reqs < num_reqs, other=num_tokens)
    lens = tl.load(lens_ptr + reqs, mask=reqs < num_reqs, other=0)
    request, start, rows, length, first = locate(reqs, begins, ends, lens, num_reqs + 1, TILE_ROWS)
    if (first >= rows) | ((length <= 0) & (not DIRECT)):
        return
    lane = tl.arange(0, BLOCK_M)
    row, head = first + lane // GROUP, kv_head * GROUP + lane % GROUP
    live, position = (row < rows) & (lane < TILE_ROWS * GROUP), length - rows + row
    own = (split * num_tokens + start + row) * (tl.num_programs(1) * GROUP) + head
    peak, total, acc = nothing(BLOCK_M, BLOCK_DV)
    lo, hi, begin = tile_range(length, rows, first, table_width * PAGE, split,
                               TILE_ROWS, WINDOW, SPLITS, BLOCK_N)  # fmt: skip
    if not DIRECT:  # noqa: SIM102 (a constant, and what is loaded)
        if begin >= hi:
            leave_split(stats_ptr + 2 * own, acc_ptr + own, peak, total, acc, live, 0)
            return
    q_at = q_ptr + (start + row).to(tl.int64) * q_token + head * q_head
    q = _queries(q_at, live, D, BLOCK_D, SPREAD)
    for part in range(0, EACH):
        peak_b, total_b, acc_b = nothing(BLOCK_M, BLOCK_DV)
        lo, hi, begin = tile_range(length, rows, first, table_width * PAGE, split + part,
                                   TILE_ROWS, WINDOW, SPLITS, BLOCK_N)  # fmt: skip
        for n in range(begin, hi, SPLITS * BLOCK_N):  # Triton pipelines no `while`.
            key = n + tl.arange(0, BLOCK_N)
            inside = (key >= lo) & (key < hi)
            page = tl.load(table_ptr + request * table_width + key // PAGE, mask=inside, other=0)
            page, offset = page.to(tl.int64), (key % PAGE).to(tl.int64)
            k_at = k_ptr + page * k_page + offset * k_row + kv_head * k_head
            v_at = v_ptr + page * v_page + offset * v_row + kv_head * v_head
            scale = (page * PAGE + offset) * tl.num_programs(1) + kv_head
            visible = live[:, None] & inside[None] & _sees(position[:, None], key[None], WINDOW)
            peak_b, total_b, acc_b = _attend(
                q, k_at, v_at, k_scale_ptr + scale, v_scale_ptr + scale, inside, visible,
                peak_b, total_b, acc_b, D, DV, SCALE, SOFTCAP, CODED, WIDEN)  # fmt: skip
        peak, total, acc = join(peak, total, acc, peak_b, total_b, acc_b, EACH)
    acc, place = unspread(acc, DV) if SPREAD else acc, own.to(tl.int64) * DV
    if DIRECT:  # The only split of the grid is 0.
        sinks = tl.load(sinks_ptr + head, mask=live & HAS_SINKS, other=0.0).to(tl.float32)
        found = attended(peak, total, acc, sinks, HAS_SINKS)
        leave_result(out_ptr + place, found, live, DV)
    else:
        leave_split(stats_ptr + 2 * own, acc_ptr + place, peak, total, acc, live, DV)


@operator(limit=attention_limit, codes=True)
def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    query_start_loc: Tensor, scale: float, sliding_window: int, softcap: float,
    sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None,
    *, batch_invariant: bool = False,
) -> Plan:  # fmt: skip
    """Attention by splits, then the sum of the splits, unless programs have all of them.

    Raises:
        BackendError: elements of a cache's row are not adjacent in memory, or scales are not as
            `as_codes` takes them.
    """
    q = q if q.stride(-1) == 1 else q.contiguous()
    k = as_codes(adjacent(k_cache, "k_cache"), k_scale, "k_cache")
    v = as_codes(adjacent(v_cache, "v_cache"), v_scale, "v_cache")
    table, seq_lens = block_table.contiguous(), seq_lens.contiguous()
    starts = query_start_loc.contiguous()
    (num_tokens, heads, dim), (num_reqs, width) = q.shape, table.shape
    kv_heads, page_size, value_dim = k.shape[2], k.shape[1], v.shape[3]
    group = heads // kv_heads
    rows_hint = -(-num_tokens // num_reqs)
    by_width = _TILES[q.dtype.itemsize].items()
    limit, block_n = next(tile for widest, tile in by_width if max(dim, value_dim) <= widest)
    block_n = block_n if k_scale is None else min(block_n, _MOST_CODES)
    limit = _FEW_SPREAD if k_cache.dtype == torch.int8 and dim > 128 else limit
    held = limit if batch_invariant else min(rows_hint * group, limit)
    block_m = power_of_two(max(group, held), 16)
    tile_rows = block_m // group
    tiles = num_tiles(num_tokens, num_reqs + 1, tile_rows)
    blocks = split_blocks(width * page_size, sliding_window, tile_rows, block_n)
    busy = busy_tiles(num_tokens, num_reqs, tile_rows) * kv_heads
    alone, nbytes = kv_heads if batch_invariant else 0, 4 * num_tokens * heads * value_dim
    splits = splits_for(busy, blocks, alone, nbytes, _WAVES)
    acc, stats, out = splits.tensors(q, value_dim)
    values = dict(
        q_ptr=q, k_ptr=k, v_ptr=v, k_scale_ptr=k if k_scale is None else k_scale,
        v_scale_ptr=v if v_scale is None else v_scale,
        table_ptr=table, lens_ptr=seq_lens, starts_ptr=starts,
        sinks_ptr=q if sinks is None else sinks, out_ptr=out, acc_ptr=acc, stats_ptr=stats,
        num_reqs=num_reqs, num_tokens=num_tokens, table_width=width,
        q_token=q.stride(0), q_head=q.stride(1),
        k_page=k.stride(0), k_row=k.stride(1), k_head=k.stride(2),
        v_page=v.stride(0), v_row=v.stride(1), v_head=v.stride(2),
        GROUP=group, D=dim, DV=value_dim, PAGE=page_size,
        SCALE=scale, WINDOW=sliding_window, SOFTCAP=softcap, HAS_SINKS=sinks is not None,
        SPLITS=splits.count, EACH=splits.each, DIRECT=splits.is_direct,
        TILE_ROWS=tile_rows, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_D=power_of_two(dim, 16), BLOCK_DV=power_of_two(value_dim, 16),
        R_PAD=power_of_two(num_reqs + 1, 16), WIDEN=widen(paged_attention_kernel, q, v),
        CODED=k_scale is not None, SPREAD=k_cache.dtype == torch.int8,
    )  # fmt: skip
    grid = (tiles, kv_heads, splits.programs)
    threads = 128 if block_m * power_of_two(value_dim, 16) <= _FEW else 256
    attend = Launch(paged_attention_kernel, grid, values, threads, choice=_CHOICE)
    return [attend, *combine_launches(acc, stats, (seq_lens, starts), out, sinks, splits)], out

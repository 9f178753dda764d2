"""The indexer of sparse attention: scores of all positions that a row sees, then the best ones.

In the first kernel, a program scores one row against a block of positions, and further blocks if
there are more than programs. Scores go to memory as integers of the same order. In the second
kernel, a program has one row. It finds the score of the last position to choose, digit by digit, by
counting (radix selection). Then it passes over the positions again, and writes those with a greater
score; of equal ones it writes the earlier, as many as there is room for. A row that sees no more
positions than it may choose gets all of them, without scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import (
    NO_CHOICE,
    Change,
    Choice,
    Launch,
    adjacent,
    power_of_two,
    widen,
)
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.tiles import dot, locate, num_tiles

_POSITIONS = 64
"""Positions of a block."""
_PROGRAMS = 2048
"""The most programs that score, if there are fewer rows."""
_HEADS = 16
"""Heads that a program takes at a time."""
_BLOCK, _MOST, _EACH = 1024, 8192, 8
"""Scores that a pass takes together: at least, at most, and of each thread. More are taken where
contexts may be long, because each of a row's turns waits for memory (never measured)."""
_BITS = 11
"""Bits of a digit: three passes find the edge. The last digit has a bit of the one before."""
_SCORE_CHOICE = Choice((Change(factors={"BLOCK_H": 4}), Change(threads=128)))
"""64 heads fill one instruction of Hopper."""
_EDGE_CHOICE = Choice((Change(factors={"BLOCK": 0.5}), Change(factors={"BLOCK": 2})))
_MAX_QUERY = 64 * 128
"""The most elements of a row's query, all of which a program loads."""


@triton.jit
def _as_ordered(scores):  # type: ignore[no-untyped-def]
    """int32 bits that, as unsigned integers, have the order of float32 scores. NaN is the greatest,
    so that a broken key is chosen, and noticed."""
    bits = scores.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return tl.where(scores == scores, ordered, -1)


@triton.jit(do_not_specialize=["num_pages"])
def score_positions_kernel(  # type: ignore[no-untyped-def]
    q_ptr, weights_ptr, cache_ptr, table_ptr, lens_ptr, starts_ptr, scores_ptr,
    num_reqs, table_width, num_pages, context, q_token, q_head, weights_token,
    cache_page, cache_row,
    HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    R_PAD: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """scores int32 [T, context]: sum_h weights[t, h] * relu(q[t, h] . key[s]), ordered."""
    reqs = tl.arange(0, R_PAD)
    begins = tl.load(starts_ptr + reqs, mask=reqs < num_reqs, other=0)
    ends = tl.load(starts_ptr + 1 + reqs, mask=reqs < num_reqs, other=0)
    lens = tl.load(lens_ptr + reqs, mask=reqs < num_reqs, other=0)
    request, start, rows, length, row = locate(reqs, begins, ends, lens, num_reqs, 1)
    visible = tl.minimum(length - rows + row + 1, context)
    if (row >= rows) | (length <= 0) | (visible <= COUNT):
        return
    d, token = tl.arange(0, BLOCK_D), (start + row).to(tl.int64)
    for first in range(tl.program_id(1) * BLOCK_N, visible, tl.num_programs(1) * BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        inside = key < visible
        page = tl.load(table_ptr + request * table_width + key // PAGE, mask=inside, other=0)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64)
        at = cache_ptr + page * cache_page + (key % PAGE).to(tl.int64) * cache_row
        keys = tl.load(at[:, None] + d[None], mask=inside[:, None] & (d < D)[None], other=0.0)
        keys = tl.trans(keys.to(q_ptr.dtype.element_ty))
        scores = tl.zeros([BLOCK_N], tl.float32)
        for block in range(0, HEADS, BLOCK_H):
            h = block + tl.arange(0, BLOCK_H)
            q_at = q_ptr + token * q_token + h[:, None] * q_head + d[None]
            q = tl.load(q_at, mask=(h < HEADS)[:, None] & (d < D)[None], other=0.0)
            factors = tl.load(weights_ptr + token * weights_token + h, mask=h < HEADS, other=0.0)
            products = dot(q, keys, WIDEN)
            products = tl.where(products < 0, 0.0, products)  # Not maximum, which would hide NaN.
            scores += tl.sum(products * factors.to(tl.float32)[:, None], 0)
        tl.store(scores_ptr + token * context + key, _as_ordered(scores), mask=inside)


@triton.jit
def _edge_of(held, digits, room, edge, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The edge with one more digit, from the number of scores with each value of that digit; and
    how many of the scores that begin with this edge may be chosen."""
    not_below = tl.sum(held) - tl.cumsum(held) + held
    found = tl.sum((not_below >= room).to(tl.int32)) - 1
    room -= tl.sum(tl.where(digits > found, held, 0))
    return edge | (found.to(tl.uint32) << SHIFT), room


@triton.jit(do_not_specialize=["num_pages"])
def choose_slots_kernel(  # type: ignore[no-untyped-def]
    scores_ptr, table_ptr, lens_ptr, starts_ptr, out_ptr,
    num_reqs, table_width, num_pages, context, num_tokens,
    PAGE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, R_PAD: tl.constexpr,
    BITS: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """out int32 [T, COUNT]: the slots chosen, positions ascending, then -1. Rows of no request are
    those of one more, which is off."""
    reqs = tl.arange(0, R_PAD)
    begins = tl.load(starts_ptr + reqs, mask=reqs <= num_reqs, other=0)
    ends = tl.load(starts_ptr + 1 + reqs, mask=reqs < num_reqs, other=num_tokens)
    lens = tl.load(lens_ptr + reqs, mask=reqs < num_reqs, other=0)
    request, start, rows, length, row = locate(reqs, begins, ends, lens, num_reqs + 1, 1)
    visible = tl.minimum(length - rows + row + 1, context)
    if row >= rows:
        return
    token = (start + row).to(tl.int64)
    scores_ptr += token * context
    lane, digits = tl.arange(0, BLOCK), tl.arange(0, DIGITS)
    edge, room = tl.full([], 0, tl.uint32), visible  # Room for scores that equal the edge.
    if visible > COUNT:
        room = tl.full([], COUNT, tl.int32)
        for done in tl.static_range(0, 32, BITS):
            held = tl.zeros([DIGITS], tl.int32)
            for first in range(0, visible, BLOCK):
                inside = first + lane < visible
                score = tl.load(scores_ptr + first + lane, mask=inside, other=0)
                score = score.to(tl.uint32, bitcast=True)
                if done > 0:
                    inside = inside & ((score >> (32 - done)) == (edge >> (32 - done)))
                digit = (score >> max(32 - BITS - done, 0)) & (DIGITS - 1)
                held += tl.histogram(digit.to(tl.int32), DIGITS, mask=inside)
            edge, room = _edge_of(held, digits, room, edge, max(32 - BITS - done, 0))
    written, equals = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for first in range(0, visible, BLOCK):
        position = first + lane
        inside = position < visible
        chosen = inside
        if visible > COUNT:
            score = tl.load(scores_ptr + position, mask=inside, other=0)
            score = score.to(tl.uint32, bitcast=True)
            equal = inside & (score == edge)
            rank = equals + tl.cumsum(equal.to(tl.int32))
            chosen = (inside & (score > edge)) | (equal & (rank <= room))
            equals += tl.sum(equal.to(tl.int32))
        place = written + tl.cumsum(chosen.to(tl.int32)) - 1
        written += tl.sum(chosen.to(tl.int32))
        page = tl.load(table_ptr + request * table_width + position // PAGE, mask=chosen, other=0)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int32)
        tl.store(out_ptr + token * COUNT + place, page * PAGE + position % PAGE, mask=chosen)
    for place in range(written, COUNT, BLOCK):
        rest = out_ptr + token * COUNT + place + lane
        tl.store(rest, tl.full([BLOCK], -1, tl.int32), mask=place + lane < COUNT)


def _limit(call: Mapping[str, Any]) -> str | None:
    heads, dim = call["query"].shape[1:]
    if heads * dim > _MAX_QUERY:
        return f"{heads} heads of {dim}; it takes {_MAX_QUERY} numbers a row"
    return None


@operator(limit=_limit)
def choose_slots(
    query: Tensor, weights: Tensor, index_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    query_start_loc: Tensor, count: int,
) -> Plan:  # fmt: skip
    """Scores, then the choice.

    Raises:
        BackendError: elements of a cache's row are not adjacent in memory.
    """
    most = min(count, block_table.shape[1] * index_cache.shape[1])
    out = query.new_empty((query.shape[0], most), dtype=torch.int32)
    query = query if query.stride(-1) == 1 else query.contiguous()
    weights = weights if weights.stride(-1) == 1 else weights.contiguous()
    cache = adjacent(index_cache, "index_cache")
    table, seq_lens = block_table.contiguous(), seq_lens.contiguous()
    starts = query_start_loc.contiguous()
    (num_tokens, heads, dim), (num_reqs, blocks) = query.shape, table.shape
    num_pages, page_size = cache.shape[:2]
    context, tiles = blocks * page_size, num_tiles(num_tokens, num_reqs + 1, 1)
    scores = query.new_empty((num_tokens, context), dtype=torch.int32)
    each = min(-(-context // _POSITIONS), -(-_PROGRAMS // num_tokens))
    block = min(max(power_of_two(context) // 8, _BLOCK), _MOST)
    values = dict(
        q_ptr=query, weights_ptr=weights, cache_ptr=cache, table_ptr=table, lens_ptr=seq_lens,
        starts_ptr=starts, scores_ptr=scores, out_ptr=out, q_token=query.stride(0),
        q_head=query.stride(1), weights_token=weights.stride(0), cache_page=cache.stride(0),
        cache_row=cache.stride(1), num_reqs=num_reqs, table_width=blocks, num_pages=num_pages,
        context=context, num_tokens=num_tokens, PAGE=page_size, COUNT=most,
        R_PAD=power_of_two(num_reqs + 1, 16), HEADS=heads, D=dim, BLOCK_H=_HEADS,
        BLOCK_D=power_of_two(dim, 16), BLOCK_N=_POSITIONS, BLOCK=block, BITS=_BITS,
        DIGITS=1 << _BITS, WIDEN=widen(score_positions_kernel, query, cache),
    )  # fmt: skip
    launches = [
        Launch(score_positions_kernel, (tiles, each, 1), values,
               choice=_SCORE_CHOICE if heads >= 4 * _HEADS else NO_CHOICE),
        Launch(choose_slots_kernel, (tiles, 1, 1), values, threads=max(256, block // _EACH),
               choice=_EDGE_CHOICE),
    ]  # fmt: skip
    return launches, out

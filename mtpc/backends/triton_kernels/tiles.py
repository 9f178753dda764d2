"""Device functions that the attention kernels share: rows of a program, and the softmax.

Launch grids must not depend on query_start_loc, which is on the device. Each request's rows are cut
into tiles of B rows. Request r's tiles start at index starts[r] // B + r, which leaves room for all
of them whatever the lengths, and T // B + R tiles always suffice. Programs in gaps do nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_FEW = 4


def num_tiles(num_tokens: int, num_reqs: int, tile_rows: int) -> int:
    """Programs along the grid's first axis."""
    return num_tokens // tile_rows + num_reqs


def busy_tiles(num_tokens: int, num_reqs: int, tile_rows: int) -> int:
    """Of `num_tiles`, those that have rows, if all requests have the same number of rows."""
    return num_reqs * -(-num_tokens // (num_reqs * tile_rows))


def split_blocks(context: int, window: int, tile_rows: int, block: int) -> int:
    """The most blocks of positions that the rows of a tile attend to, for splits to take.

    A window of up to `_FEW` blocks is one: to join splits would take as long as to go through its
    blocks one after the other (by computation, never measured).

    Args:
        context: positions of the longest context.
        window: positions that a row attends to; 0 or less: all.
        tile_rows: rows of a tile.
        block: positions of a block.
    """
    blocks = -(-context // block)
    if window <= 0:
        return blocks
    # The first position of the window may be the last one of a block.
    seen = min(blocks, -(-(window + tile_rows - 2) // block) + 1)
    return seen if seen > _FEW else 1


@triton.jit
def locate(reqs, begins, ends, lens, num_reqs, TILE_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's request; the request's first flat row, number of rows and length; and the
    first of its rows in this tile (beyond them, there is nothing to do).

    It takes loaded values, not pointers: Inductor assumes that a pointer that goes into a function
    is written, and would copy the tensor before each launch.
    """
    tile = tl.program_id(0)
    tiles = begins // TILE_ROWS + reqs
    request = tl.sum(((reqs < num_reqs) & (tiles <= tile)).to(tl.int32)) - 1
    start = tl.sum(tl.where(reqs == request, begins, 0)).to(tl.int32)
    rows = tl.sum(tl.where(reqs == request, ends, 0)).to(tl.int32) - start
    length = tl.sum(tl.where(reqs == request, lens, 0)).to(tl.int32)
    return request, start, rows, length, (tile - start // TILE_ROWS - request) * TILE_ROWS


@triton.jit
def tile_range(  # type: ignore[no-untyped-def]
    length, rows, first, capacity, split,
    TILE_ROWS: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Positions lo to hi that some row of the tile attends to, and where this split begins."""
    last = tl.minimum(first + TILE_ROWS, rows)
    hi = tl.minimum(length - rows + last, capacity)
    lo = 0
    if WINDOW > 0:
        lo = tl.maximum(length - rows + first - WINDOW + 1, 0)
    block = lo // BLOCK_N
    block += (split + SPLITS - block % SPLITS) % SPLITS
    return lo, hi, block * BLOCK_N


@triton.jit
def dot(a, b, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """a @ b in float32; float32 operands are not rounded to tf32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def fade_in(scores, visible, peak, total, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """One step of the online softmax, in powers of two.

    Peaks are rounded up to whole numbers, so all factors between splits are powers of two, and
    exact. Splits that are joined earlier or later, in the same order, give the same bits.

    Returns the new weights, the factor for what was summed before, and the new peak and total.
    """
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1): right at both infinities of exp.
        scores = SOFTCAP * (1 - 2 / (tl.exp2(scores * (2 * LOG2E / SOFTCAP)) + 1))
    scores = tl.where(visible, scores * LOG2E, float("-inf"))
    new_peak = tl.maximum(peak, tl.ceil(tl.max(scores, 1)))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(peak - shift)
    return weights, fade, new_peak, total * fade + tl.sum(weights, 1)


@triton.jit
def exact_power(x):  # type: ignore[no-untyped-def]
    """2^x of whole numbers up to 127; 0 below -126 and for NaN."""
    whole = tl.where(x >= -126, x, -127.0).to(tl.int32)
    return ((whole + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def join(peak, total, acc, peak_b, total_b, acc_b, EACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two splits joined: peaks and totals [rows], sums [rows, columns]. If a program has one split
    only (EACH is 1), the second one as it is."""
    if EACH == 1:
        return peak_b, total_b, acc_b
    new_peak = tl.maximum(peak, peak_b)
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    a, b = exact_power(peak - shift), exact_power(peak_b - shift)
    return new_peak, total * a + total_b * b, acc * a[:, None] + acc_b * b[:, None]


@triton.jit
def attended(peak, total, acc, sinks, HAS_SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Results of attention [rows, columns], from the joined splits; sinks [rows]. A row that
    attends to nothing is zeros, whatever its sink."""
    seen = total != 0  # NaN too: it must reach the logits.
    if HAS_SINKS:
        sinks = sinks.to(tl.float32) * LOG2E
        top = tl.maximum(peak, tl.ceil(sinks))
        top = tl.where(top == float("-inf"), 0.0, top)
        fade = exact_power(peak - top)
        total = total * fade + tl.exp2(sinks - top)
        acc = acc * fade[:, None]
    total = tl.where(seen, total, 1.0)
    return tl.where(seen[:, None], acc / total[:, None], 0.0)


@triton.jit
def nothing(ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Peaks, totals and sums of rows that have attended to nothing yet."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    return peak, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def leave_split(  # type: ignore[no-untyped-def]
    stats_at, acc_at, peak, total, acc, live, COLUMNS: tl.constexpr
):
    """Store a split's peaks, totals and sums of live rows, for `combine`."""
    column = tl.arange(0, acc.shape[1])
    tl.store(stats_at, peak, mask=live)
    tl.store(stats_at + 1, total, mask=live)
    seen = live & (total != 0)  # NaN too: it must reach the logits.
    tl.store(acc_at[:, None] + column[None], acc, mask=seen[:, None] & (column < COLUMNS)[None])


@triton.jit
def leave_result(out_at, found, live, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store live rows of results [rows, columns]."""
    column = tl.arange(0, found.shape[1])
    mask = live[:, None] & (column < COLUMNS)[None]
    tl.store(out_at[:, None] + column[None], found.to(out_at.dtype.element_ty), mask=mask)

"""Joining the splits of an attention: all at once, in an order that the number of splits fixes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, power_of_two
from mtpc.backends.triton_kernels.tiles import LOG2E

_PROGRAMS, _MAX_SPLITS = 512, 64
"""The least number of programs, about two for each compute unit of the largest devices; and the
most splits. Both were chosen on paper, not measured."""
_ELEMENTS, _LEAST = 2048, 32
"""Sums of all splits that a program of `combine` holds at once, 32 a thread; and its least columns.
"""


def splits_for(programs: int, blocks: int) -> int:
    """The number of splits of contexts of up to `blocks` blocks, if a grid has `programs`
    programs."""
    return max(1, min(-(-_PROGRAMS // programs), blocks, _MAX_SPLITS))


@triton.jit
def combine_kernel(  # type: ignore[no-untyped-def]
    acc_ptr, stats_ptr, sinks_ptr, lens_ptr, starts_ptr, out_ptr, num_reqs, num_tokens,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, S_PAD: tl.constexpr,
    R_PAD: tl.constexpr, HAS_SINKS: tl.constexpr, ALL_ON: tl.constexpr,
):  # fmt: skip
    """acc [S, T, N, DV] and stats [S, T, N, 2] (peak, total) -> out [T, N, DV]."""
    token, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    on = True
    if not ALL_ON:
        reqs = tl.arange(0, R_PAD)
        ends = tl.load(starts_ptr + 1 + reqs, mask=reqs < num_reqs, other=0)
        request = tl.sum(((reqs < num_reqs) & (ends <= token)).to(tl.int32))
        on = tl.load(lens_ptr + request, mask=request < num_reqs, other=0) > 0
    s = tl.arange(0, S_PAD)
    at = (s * num_tokens + token) * heads + head
    there = s < tl.where(on, SPLITS, 0)
    peaks = tl.load(stats_ptr + 2 * at, mask=there, other=float("-inf"))
    totals = tl.load(stats_ptr + 2 * at + 1, mask=there, other=0.0)
    peak = tl.max(peaks, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, sink)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(totals * tl.exp2(peaks - peak), 0)
    seen = total != 0  # A row that attends to nothing is zeros, whatever its sink.
    if HAS_SINKS:
        total += tl.exp2(sink - peak)
    # All splits at once; where nothing was seen, nothing was written.
    dv = tl.program_id(2) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    width = tl.where(totals != 0, DV, 0)  # NaN too: it must reach the logits.
    rows = acc_ptr + at.to(tl.int64)[:, None] * DV + dv[None]
    parts = tl.load(rows, mask=dv[None] < width[:, None], other=0.0)
    fade = tl.where(totals != 0, tl.exp2(peaks - peak), 0.0)
    acc = tl.sum(parts * fade[:, None], 0)
    out = tl.where(seen, acc / tl.where(seen, total, 1.0), 0.0)
    out_at = (token.to(tl.int64) * heads + head) * DV + dv
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=dv < DV)


def combine_launch(
    acc: Tensor,
    stats: Tensor,
    lengths: tuple[Tensor, Tensor] | None,
    out: Tensor,
    sinks: Tensor | None,
) -> Launch:
    """Join acc [S, T, N, D] by stats [S, T, N, 2] into out [T, N, D].

    Args:
        acc: weighted sums of each split; unwritten where the split's total is 0.
        stats: each split's peak score (times log2 e) and total weight.
        lengths: seq_lens [R] and query_start_loc [R+1]; rows of no request, or one that is off,
            are zeros. None: stats say of every row what it attends to.
        out: written whole.
        sinks: [N] or None.
    """
    splits, num_tokens, heads, dim = acc.shape
    seq_lens, starts = lengths or (stats, stats)
    block = min(power_of_two(dim), max(_LEAST, _ELEMENTS // power_of_two(splits)))
    arguments = dict(
        acc_ptr=acc, stats_ptr=stats, sinks_ptr=acc if sinks is None else sinks,
        lens_ptr=seq_lens, starts_ptr=starts, out_ptr=out,
        num_reqs=seq_lens.shape[0] if lengths else 0, num_tokens=num_tokens,
    )  # fmt: skip
    constants = dict(
        DV=dim, BLOCK_DV=block, SPLITS=splits, S_PAD=power_of_two(splits),
        R_PAD=power_of_two(seq_lens.shape[0], 16), HAS_SINKS=sinks is not None,
        ALL_ON=lengths is None,
    )  # fmt: skip
    grid = (num_tokens, heads, -(-dim // block))
    return Launch(combine_kernel, grid, arguments, constants, threads=64)

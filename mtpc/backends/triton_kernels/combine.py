"""Splits of an attention: how many there are, and how they are joined, one after another.

Whether a program has one split, and `combine` joins them, or a program goes through all of them
itself, the bits of a row are the same: split by split the same numbers are added, and all factors
are powers of two (`tiles.fade_in`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, power_of_two
from mtpc.backends.triton_kernels.tiles import attended, exact_power

_PROGRAMS, _MAX_SPLITS = 512, 64
"""The least number of programs, about two for each compute unit of the largest devices; and the
most splits. Both were chosen on paper, not measured."""
_SCRATCH = 64 << 20
"""Bytes of the sums of all splits, at most; beyond, a program goes through all splits."""
_BLOCK, _AT_ONCE = 128, 8
"""Columns of a program of `combine`; splits whose sums it waits for together."""


@dataclass(frozen=True)
class Splits:
    """How contexts are cut.

    Attributes:
        count: number of splits. Split s takes the blocks b of positions with b % count == s, so a
            context of few blocks has as many splits that have any as it has blocks.
        each: splits of a program, 1 or all.
        is_direct: whether programs, which have all splits, write results; nothing is left to join.
    """

    count: int
    each: int
    is_direct: bool

    @property
    def programs(self) -> int:
        """Programs along the grid's axis of splits."""
        return self.count // self.each

    def tensors(self, query: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sums [splits, T, N, width], stats [splits, T, N, 2] and results [T, N, width] of rows
        like query [T, N, _]. Where programs write results, sums and stats are these, and they are
        zeros: such programs leave out rows of no request."""
        tokens, heads = query.shape[:2]
        if self.is_direct:
            out = query.new_zeros((tokens, heads, width))
            return out, out, out
        sums, stats = (
            query.new_empty((self.count, tokens, heads, n), dtype=torch.float32) for n in (width, 2)
        )
        return sums, stats, query.new_empty((tokens, heads, width))


def splits_for(programs: int, blocks: int, alone: int = 0, nbytes: int = 0) -> Splits:
    """Splits of contexts of up to `blocks` blocks.

    Args:
        programs: of a grid without splits.
        blocks: of positions, of the longest context.
        alone: as `programs`, of one request with one tile of rows, if results must not depend on
            how many rows a step has; else 0. Then that number decides how many splits there are.
        nbytes: of the sums of one split of all rows.
    """
    count = max(1, min(-(-_PROGRAMS // (alone or programs)), blocks, _MAX_SPLITS))
    has_many = alone > 0 and (programs >= _PROGRAMS // 2 or count * nbytes > _SCRATCH)
    return Splits(count, count if has_many else 1, has_many or count == 1)


@triton.jit
def combine_kernel(  # type: ignore[no-untyped-def]
    acc_ptr, stats_ptr, sinks_ptr, lens_ptr, starts_ptr, out_ptr, num_reqs, num_tokens,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, S_PAD: tl.constexpr,
    R_PAD: tl.constexpr, HAS_SINKS: tl.constexpr, ALL_ON: tl.constexpr, AT_ONCE: tl.constexpr,
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
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    end = tl.max(tl.where(totals != 0, s + 1, 0), 0)  # Behind it no split has anything.
    dv = tl.program_id(2) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    for first in range(0, end, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            split = first + i
            own = (split * num_tokens + token) * heads + head
            mine = tl.load(stats_ptr + 2 * own, mask=split < end, other=float("-inf"))
            weight = tl.load(stats_ptr + 2 * own + 1, mask=split < end, other=0.0)
            # Where nothing was seen, nothing was written. NaN too must reach the logits.
            width = tl.where(weight != 0, DV, 0)
            sums = tl.load(acc_ptr + own.to(tl.int64) * DV + dv, mask=dv < width, other=0.0)
            factor = exact_power(mine - shift)
            total += weight * factor
            acc += (sums * factor)[None]
    peak = peak + tl.zeros([1], tl.float32)
    sink = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head)
    out = attended(peak, total, acc, sink + tl.zeros([1], tl.float32), HAS_SINKS)
    out_at = (token.to(tl.int64) * heads + head) * DV + dv
    tl.store(out_ptr + out_at[None], out.to(out_ptr.dtype.element_ty), mask=(dv < DV)[None])


def combine_launches(
    acc: Tensor,
    stats: Tensor,
    lengths: tuple[Tensor, Tensor] | None,
    out: Tensor,
    sinks: Tensor | None,
) -> list[Launch]:
    """Join acc [S, T, N, D] by stats [S, T, N, 2] into out [T, N, D], unless they are out itself.

    Args:
        acc: weighted sums of each split; unwritten where the split's total is 0.
        stats: each split's peak (a whole number, in powers of two) and total weight.
        lengths: seq_lens [R] and query_start_loc [R+1]; rows of no request, or one that is off,
            are zeros. None: stats say of every row what it attends to.
        out: written whole.
        sinks: [N] or None.
    """
    if acc is out:
        return []
    splits, num_tokens, heads, dim = acc.shape
    seq_lens, starts = lengths or (stats, stats)
    block = min(power_of_two(dim), _BLOCK)
    arguments = dict(
        acc_ptr=acc, stats_ptr=stats, sinks_ptr=acc if sinks is None else sinks,
        lens_ptr=seq_lens, starts_ptr=starts, out_ptr=out,
        num_reqs=seq_lens.shape[0] if lengths else 0, num_tokens=num_tokens,
    )  # fmt: skip
    constants = dict(
        DV=dim, BLOCK_DV=block, SPLITS=splits, S_PAD=power_of_two(splits),
        R_PAD=power_of_two(seq_lens.shape[0], 16), HAS_SINKS=sinks is not None,
        ALL_ON=lengths is None, AT_ONCE=_AT_ONCE,
    )  # fmt: skip
    grid = (num_tokens, heads, -(-dim // block))
    return [Launch(combine_kernel, grid, arguments, constants, threads=64)]

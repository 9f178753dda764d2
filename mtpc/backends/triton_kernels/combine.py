"""Splits of an attention: how many there are, and how they are joined.

With `batch_invariant`, either each program has one split, and `combine` joins them, or a program
goes through all splits. A row has the same bits either way: split by split the same numbers are
added, and all factors are powers of two (`tiles.fade_in`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, await_launches, power_of_two
from mtpc.backends.triton_kernels.tiles import attended, exact_power

_PROGRAMS, _MAX_SPLITS = 512, 64
"""The least number of programs, about two for each compute unit of the largest devices; and the
most splits."""
_FEW, _LONG = 4, 8
"""The least number of blocks of a split: if there are more splits than `combine` joins at once; and
if there are enough programs without splits, because several waves of programs end more evenly than
one and a bit."""
_SCRATCH = 64 << 20
"""The most bytes of the sums of all splits; beyond that, a program goes through all splits."""
_BLOCK, _AT_ONCE = 128, 16
"""Columns of a program of `combine`; splits whose loads it waits for together. On an H100, each
wait takes almost a microsecond."""


@dataclass(frozen=True)
class Splits:
    """How contexts are cut.

    Attributes:
        count: number of splits. Split s takes the blocks b of positions with b % count == s. So in
            a context of few blocks, as many splits as there are blocks have work.
        each: splits of a program, 1 or all.
        is_direct: whether programs have all splits, and write results; nothing is left to join.
        in_order: whether splits are added one after another, as such programs do.
    """

    count: int
    each: int
    is_direct: bool
    in_order: bool

    @property
    def programs(self) -> int:
        """Programs along the grid's axis of splits."""
        return self.count // self.each

    def tensors(self, query: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sums [splits, T, N, width], stats [splits, T, N, 2] and results [T, N, width] of rows
        like query [T, N, _]. Where programs write results, sums and stats are not used, and query
        stands for them."""
        tokens, heads = query.shape[:2]
        out = query.new_empty((tokens, heads, width))
        if self.is_direct:
            return query, query, out
        sums, stats = (
            query.new_empty((self.count, tokens, heads, n), dtype=torch.float32) for n in (width, 2)
        )
        return sums, stats, out


def splits_for(
    programs: int, blocks: int, alone: int = 0, nbytes: int = 0, waves: int = 1
) -> Splits:
    """Splits of contexts of up to `blocks` blocks.

    Args:
        programs: number of programs with work in a grid without splits.
        blocks: number of blocks of positions in the longest context.
        alone: the same number for one request with one tile of rows, if results must not depend on
            how many rows a step has: then it decides how many splits there are. Else 0.
        nbytes: bytes of the sums of one split of all rows.
        waves: how many times `_PROGRAMS` there should be, if contexts are long enough.
    """
    count = -(-_PROGRAMS // (alone or programs))
    most = max(blocks // _FEW, min(blocks, _AT_ONCE))  # More are joined in several steps.
    if not alone:
        count = max(count, min(waves * _PROGRAMS // programs, blocks // _LONG))
    count = max(1, min(count, most, _MAX_SPLITS))
    has_many = alone > 0 and (programs >= _PROGRAMS // 2 or count * nbytes > _SCRATCH)
    return Splits(count, count if has_many else 1, has_many or count == 1, alone > 0)


@triton.jit
def _is_on(reqs, ends, lens, num_reqs, token):  # type: ignore[no-untyped-def]
    """Whether a row belongs to a request with a length above 0."""
    request = tl.sum(((reqs < num_reqs) & (ends <= token)).to(tl.int32))
    return tl.sum(tl.where(reqs == request, lens, 0)) > 0


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    total, acc, weights, sums, lane, AT_ONCE: tl.constexpr, IN_ORDER: tl.constexpr
):
    """Weights and sums [splits, columns] added to total and acc [columns]."""
    if IN_ORDER:  # In the order of programs that have all splits.
        for i in tl.static_range(AT_ONCE):
            is_next = (lane == i)[:, None]
            total += tl.sum(tl.where(is_next, weights, 0.0), 0)
            acc += tl.sum(tl.where(is_next, sums, 0.0), 0)
        return total, acc
    return total + tl.sum(weights, 0), acc + tl.sum(sums, 0)


@triton.jit
def combine_kernel(  # type: ignore[no-untyped-def]
    acc_ptr, stats_ptr, sinks_ptr, lens_ptr, starts_ptr, out_ptr, num_reqs, num_tokens,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, S_PAD: tl.constexpr,
    R_PAD: tl.constexpr, HAS_SINKS: tl.constexpr, ALL_ON: tl.constexpr, AT_ONCE: tl.constexpr,
    IN_ORDER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """acc [S, T, N, DV] and stats [S, T, N, 2] (peak, total) -> out [T, N, DV]."""
    await_launches(EARLY)
    token, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first = token.to(tl.int64) * heads + head
    row = heads.to(tl.int64) * num_tokens
    # No load waits for another. Rows of no request load, too; their values are dropped afterwards.
    on = True
    if not ALL_ON:
        reqs = tl.arange(0, R_PAD)
        ends = tl.load(starts_ptr + 1 + reqs, mask=reqs < num_reqs, other=0)
        lens = tl.load(lens_ptr + reqs, mask=reqs < num_reqs, other=0)
        on = _is_on(reqs, ends, lens, num_reqs, token)
    s = tl.arange(0, S_PAD)
    at = stats_ptr + 2 * (first + s * row)
    peaks = tl.load(at, mask=s < SPLITS, other=float("-inf"))
    peak = tl.max(peaks, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    end = SPLITS
    if SPLITS > AT_ONCE:  # From `end` on, no split has anything.
        totals = tl.load(at + 1, mask=s < SPLITS, other=0.0)
        end = tl.max(tl.where(totals != 0, s + 1, 0), 0)
    dv = tl.program_id(2) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    total, acc = tl.zeros([BLOCK_DV], tl.float32), tl.zeros([BLOCK_DV], tl.float32)
    lane = tl.arange(0, AT_ONCE)
    for begin in range(0, end, AT_ONCE):
        own, there = first + (begin + lane) * row, begin + lane < SPLITS
        mine = tl.load(stats_ptr + 2 * own, mask=there, other=float("-inf"))
        weights = tl.load(stats_ptr + 2 * own + 1, mask=there, other=0.0)
        mine, weights = tl.where(on, mine, float("-inf")), tl.where(on, weights, 0.0)
        held = there[:, None] & (dv < DV)[None]
        sums = tl.load(acc_ptr + (own * DV)[:, None] + dv[None], mask=held, other=0.0)
        # A split that saw nothing wrote no sums. NaN weights are kept: NaN must reach the logits.
        sums = tl.where((weights != 0)[:, None], sums, 0.0)
        factors = exact_power(mine - shift)
        weights, sums = (
            tl.broadcast_to((weights * factors)[:, None], held.shape),
            sums * factors[:, None],
        )
        total, acc = _add(total, acc, weights, sums, lane, AT_ONCE, IN_ORDER)
    sink = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head)
    each = tl.zeros([BLOCK_DV], tl.float32)
    out = attended(peak + each, total, acc[:, None], sink + each, HAS_SINKS)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (first * DV + dv)[:, None], out, mask=(dv < DV)[:, None])


def combine_launches(
    acc: Tensor,
    stats: Tensor,
    lengths: tuple[Tensor, Tensor] | None,
    out: Tensor,
    sinks: Tensor | None,
    cut: Splits | None = None,
) -> list[Launch]:
    """The launch that joins acc [S, T, N, D] by stats [S, T, N, 2] into out [T, N, D]; none if
    programs have written out already.

    Args:
        acc: weighted sums of each split; not written where the split's total is 0.
        stats: each split's peak (a whole number, the exponent of a power of two) and total weight.
        lengths: seq_lens [R] and query_start_loc [R+1]; rows of no request, or of a request of
            length 0, get zeros. None: stats of every row are written.
        out: written whole.
        sinks: [N] or None.
        cut: how contexts are cut; None: into S splits, which are added in any order.
    """
    if cut is not None and cut.is_direct:
        return []
    splits, num_tokens, heads, dim = acc.shape
    seq_lens, starts = lengths or (stats, stats)
    block = min(power_of_two(dim), _BLOCK)
    values = dict(
        acc_ptr=acc, stats_ptr=stats, sinks_ptr=acc if sinks is None else sinks,
        lens_ptr=seq_lens, starts_ptr=starts, out_ptr=out,
        num_reqs=seq_lens.shape[0] if lengths else 0, num_tokens=num_tokens,
        DV=dim, BLOCK_DV=block, SPLITS=splits, S_PAD=power_of_two(splits),
        R_PAD=power_of_two(seq_lens.shape[0], 16), HAS_SINKS=sinks is not None,
        ALL_ON=lengths is None, AT_ONCE=min(_AT_ONCE, power_of_two(splits)),
        IN_ORDER=cut is not None and cut.in_order,
    )  # fmt: skip
    return [Launch(combine_kernel, (num_tokens, heads, -(-dim // block)), values, threads=32)]

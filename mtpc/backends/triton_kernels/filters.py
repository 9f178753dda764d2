"""Where min-p, top-k and top-p cut a row's logits: several programs a row, and an exact edge.

Bins divide tokens by the distance of their logits from the row's greatest one. A program for each
part of a row counts the tokens of each bin. A program for each row finds the bins that may hold an
edge, and the logits of these bins are gathered. Among these few a bisection finds the edge. Both
filters ask for the greatest logit such that the tokens at or above it are enough, in number or in
probability. The bisection halves an interval of logits until one logit is left. The ends of the
interval are always logits of the row, so the edge is exact, and a few dozen passes suffice. A row
with too many logits in these bins is searched whole. The sums of a row do not depend on other rows.

Probabilities are not summed bin by bin: the number of a bin's tokens bounds its sum, and the sum of
all tokens is known. So few bins may hold the edge of top-p; then the tokens above them are summed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from mtpc.backends.triton_kernels.launch import Launch, power_of_two
from mtpc.layout import SCRATCH_SLOT
from mtpc.sampling_params import FLOATS, INTS

_BINS, _MOST = 128, 16_384
"""Bins, each an eighth wide except the last, which has the rest; and the most logits that are
gathered."""
_PART, _CHUNK, _TOGETHER = 2048, 2048, 16
"""Tokens of a part; tokens that a pass of the bisection takes together (sums and edges of more
would not fit into registers); and parts whose bins are summed together."""

TEMPERATURE: tl.constexpr = tl.constexpr(FLOATS.index("temperature"))
_TOP_P: tl.constexpr = tl.constexpr(FLOATS.index("top_p"))
_MIN_P: tl.constexpr = tl.constexpr(FLOATS.index("min_p"))
NUM_FLOATS: tl.constexpr = tl.constexpr(len(FLOATS))
_TOP_K: tl.constexpr = tl.constexpr(INTS.index("top_k"))
NUM_INTS: tl.constexpr = tl.constexpr(len(INTS))
SCRATCH: tl.constexpr = tl.constexpr(SCRATCH_SLOT)
_STEPS: tl.constexpr = tl.constexpr(8)
"""Bins of a distance of one."""
_ROUNDING: tl.constexpr = tl.constexpr(1e-12)
"""A bound of the relative error of a float64 sum over a vocabulary."""


@triton.jit
def row_peak(  # type: ignore[no-untyped-def]
    raw_peaks_ptr, peaks_ptr, row, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr
):
    """A row's greatest logit; minus infinity where it can choose nothing."""
    block = tl.arange(0, BLOCKS_PAD)
    at, there = row * BLOCKS + block, block < BLOCKS
    # Logits that are all minus infinity are not adjusted to anything else.
    raw = tl.load(raw_peaks_ptr + at, mask=there, other=float("-inf"))
    peaks = tl.load(peaks_ptr + at, mask=there, other=float("-inf"))
    peak = tl.max(tl.where(raw < float("inf"), peaks, float("inf")), 0)
    return tl.where(peak < float("inf"), peak, float("-inf"))


@triton.jit
def _filters(slots_ptr, positions_ptr, floats_ptr, ints_ptr, row, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a row is sampled, and its top-k, top-p and min-p; a greedy row has neither of the
    first two."""
    slot = tl.load(slots_ptr + row // ROWS)
    on = (slot != SCRATCH) & (tl.load(positions_ptr + row) >= 0)
    slot = tl.where(on, slot, 0)
    floats_ptr += slot * NUM_FLOATS
    sampled = on & (tl.load(floats_ptr + TEMPERATURE) != 0)
    top_k = tl.where(sampled, tl.load(ints_ptr + slot * NUM_INTS + _TOP_K), 0)
    top_p = tl.where(sampled, tl.load(floats_ptr + _TOP_P), 1.0)
    return sampled, top_k, top_p, tl.load(floats_ptr + _MIN_P)


@triton.jit
def _least(peak, min_p):  # type: ignore[no-untyped-def]
    """The least logit that min-p keeps."""
    return tl.where(min_p > 0, peak + tl.log(tl.where(min_p > 0, min_p, 1.0)), float("-inf"))


@triton.jit
def _bin(x, peak, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bin of a logit, by its distance from the greatest; minus infinity is in the last one."""
    far = (peak - x) * _STEPS
    return tl.where(far < BINS - 1, far, BINS - 1).to(tl.int32)


@triton.jit
def count_bins_kernel(  # type: ignore[no-untyped-def]
    scores_ptr, raw_peaks_ptr, peaks_ptr, positions_ptr, slots_ptr, floats_ptr, ints_ptr,
    counts_ptr, masses_ptr, vocab,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, PART: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """For one part: counts int32 [N, PARTS, BINS], and for top-p without top-k masses float64
    [N, 2, PARTS], the probability, not normalised, of the tokens that min-p keeps: of all, and of
    those in the last bin."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, top_k, top_p, min_p = _filters(slots_ptr, positions_ptr, floats_ptr, ints_ptr, row, ROWS)
    if (top_k <= 0) & (top_p >= 1):
        return
    token = part * PART + tl.arange(0, PART)
    x = tl.load(scores_ptr + row * vocab + token, mask=token < vocab, other=float("-inf"))
    tl.debug_barrier()  # Else NVIDIA's compiler loads the logits only after the peak.
    peak = row_peak(raw_peaks_ptr, peaks_ptr, row, BLOCKS, BLOCKS_PAD)
    if peak == float("-inf"):
        return
    bin_, parts = _bin(x, peak, BINS), tl.num_programs(1)
    if top_k <= 0:
        mass = tl.where(x >= _least(peak, min_p), tl.exp(x - peak), 0.0)
        rest = tl.where(bin_ == BINS - 1, mass, 0.0)
        at = masses_ptr + 2 * row * parts + part
        tl.store(at, tl.sum(mass, 0))
        tl.store(at + parts, tl.sum(rest, 0))
    bins, none = tl.arange(0, BINS), tl.maximum((part + 1) * PART - vocab, 0)
    counts = tl.histogram(bin_, BINS) - tl.where(bins == BINS - 1, none, 0)  # A mask is slower.
    tl.store(counts_ptr + (row * parts + part) * BINS + bins, counts)


@triton.jit
def _bins_of_mass(counts, wanted, total, rest, deepest, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first and the last bin that may hold the greatest logit such that the mass at or above it
    is `wanted`.

    Args:
        counts: number of tokens of each bin.
        wanted: a mass.
        total: the mass of all tokens.
        rest: the mass of the last bin.
        deepest: the bin of the least logit that min-p keeps; tokens below it have no mass.
        BINS: number of bins.
    """
    bins = tl.arange(0, BINS)
    is_near = bins < BINS - 1
    far = bins.to(tl.float64) / _STEPS
    most = tl.where(is_near & (bins <= deepest), tl.exp(-far), 0.0) * counts
    least = tl.where(is_near & (bins < deepest), tl.exp(-far - 1.0 / _STEPS), 0.0) * counts
    # Bounds of the mass down to each bin: from the bins above, or from what those below leave over.
    most_above, least_above = tl.cumsum(most, 0), tl.cumsum(least, 0)
    most_below, least_below = tl.sum(most, 0) - most_above, tl.sum(least, 0) - least_above
    most_above = tl.minimum(most_above, total - rest - least_below)
    least_above = tl.maximum(least_above, total - rest - most_below)
    slack = _ROUNDING * total
    first = tl.min(tl.where(most_above + slack >= wanted, bins, BINS - 1), 0)
    last = tl.min(tl.where(is_near & (least_above - slack >= wanted), bins, BINS - 1), 0)
    return first, last


@triton.jit
def find_bins_kernel(  # type: ignore[no-untyped-def]
    raw_peaks_ptr, peaks_ptr, positions_ptr, slots_ptr, floats_ptr, ints_ptr, counts_ptr,
    masses_ptr, bins_ptr, sums_ptr, places_ptr, vocab,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr, BINS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """bins int32 [N, 3]: the first and the last bin that may hold an edge, and the number of their
    tokens (2^31 - 1 where a row can choose nothing); sums float64 [N, 2]: the mass of all tokens,
    and the row's peak; places int32 [N, PARTS]: where a part's gathered logits begin."""
    row = tl.program_id(0).to(tl.int64)
    _, top_k, top_p, min_p = _filters(slots_ptr, positions_ptr, floats_ptr, ints_ptr, row, ROWS)
    if (top_k <= 0) & (top_p >= 1):
        return
    peak = row_peak(raw_peaks_ptr, peaks_ptr, row, BLOCKS, BLOCKS_PAD)
    if peak == float("-inf"):
        tl.store(bins_ptr + 3 * row + 2, 2147483647)
        return
    bins, lane = tl.arange(0, BINS), tl.arange(0, TOGETHER)
    counts = tl.zeros([BINS], tl.int32)
    for begin in range(0, PARTS, TOGETHER):
        part = begin + lane
        at = (row * PARTS + part)[:, None] * BINS + bins[None]
        counts += tl.sum(tl.load(counts_ptr + at, mask=(part < PARTS)[:, None], other=0), 0)
    if top_k > 0:
        # Top-p is of what top-k leaves, so all above the edge of top-k is wanted, too.
        enough = tl.cumsum(counts, 0) >= tl.minimum(top_k, vocab)
        first, last = tl.zeros([], tl.int32), tl.min(tl.where(enough, bins, BINS - 1), 0)
        total = tl.zeros([], tl.float64)
    else:
        part = tl.arange(0, PARTS_PAD)
        at, there = 2 * row * PARTS + part, part < PARTS
        total = tl.sum(tl.load(masses_ptr + at, mask=there, other=0.0), 0)
        rest = tl.sum(tl.load(masses_ptr + at + PARTS, mask=there, other=0.0), 0)
        deepest = _bin(_least(peak, min_p), peak, BINS)
        first, last = _bins_of_mass(counts, top_p * total, total, rest, deepest, BINS)
    inside = (bins >= first) & (bins <= last)
    tl.store(bins_ptr + 3 * row, first)
    tl.store(bins_ptr + 3 * row + 1, last)
    tl.store(bins_ptr + 3 * row + 2, tl.sum(tl.where(inside, counts, 0), 0))
    tl.store(sums_ptr + 2 * row, total)
    tl.store(sums_ptr + 2 * row + 1, peak)
    place = tl.zeros([], tl.int32)
    for begin in range(0, PARTS, TOGETHER):
        part = begin + lane
        at, there = (row * PARTS + part)[:, None] * BINS + bins[None], part < PARTS
        mask = there[:, None] & inside[None]
        each = tl.sum(tl.load(counts_ptr + at, mask=mask, other=0), 1)
        places = place + tl.cumsum(each, 0) - each
        tl.store(places_ptr + row * PARTS + part, places, mask=there)
        place += tl.sum(each, 0)


@triton.jit
def gather_bins_kernel(  # type: ignore[no-untyped-def]
    scores_ptr, positions_ptr, slots_ptr, floats_ptr, ints_ptr, bins_ptr, sums_ptr, places_ptr,
    near_ptr, above_ptr, vocab,
    ROWS: tl.constexpr, PART: tl.constexpr, BINS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """near float64 [N, MOST]: the logits in those bins, unless there are more; above float64
    [N, PARTS]: the mass of a part's tokens above them.

    The peak is loaded and not computed by `row_peak`: addresses depend on it, and where an address
    depends on a function's result, Inductor takes the function's pointers for written ones.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, last = tl.load(bins_ptr + 3 * row), tl.load(bins_ptr + 3 * row + 1)
    count, at = tl.load(bins_ptr + 3 * row + 2), row * tl.num_programs(1) + part
    begin, peak = tl.load(places_ptr + at), tl.load(sums_ptr + 2 * row + 1)
    _, top_k, top_p, _ = _filters(slots_ptr, positions_ptr, floats_ptr, ints_ptr, row, ROWS)
    if ((top_k <= 0) & (top_p >= 1)) | (count > MOST):
        return
    token = part * PART + tl.arange(0, PART)
    x = tl.load(scores_ptr + row * vocab + token, mask=token < vocab, other=float("-inf"))
    bin_ = _bin(x, peak, BINS)
    held = (bin_ >= first) & (bin_ <= last) & (token < vocab)
    place = begin + tl.cumsum(held.to(tl.int32), 0) - 1
    tl.store(near_ptr + row * MOST + place, x, mask=held)
    mass = tl.zeros([], tl.float64)
    if first > 0:
        nearest = tl.min(bin_, 0)
        if nearest < first:  # Most parts have no token above.
            mass += tl.sum(tl.where(bin_ < first, tl.exp(x - peak), 0.0), 0)
    tl.store(above_ptr + at, mass)


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def]
    """int64 in the order of float64; -0.0 comes before 0.0."""
    bits = x.to(tl.int64, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)


@triton.jit
def _unordered(key):  # type: ignore[no-untyped-def]
    """The float64 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFFFFFFFFFF, key).to(tl.float64, bitcast=True)


@triton.jit
def _mass(x, peak, IS_COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weight of each token: one, or its probability, not normalised."""
    if IS_COUNT:
        return tl.where(x == x, 1.0, 0.0).to(tl.float64)
    return tl.exp(x - peak)


@triton.jit
def _total(scores_ptr, vocab, cut, peak, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The probability, not normalised, of the tokens whose logit is at or above `cut`."""
    total = tl.zeros([CHUNK], tl.float64)
    for first in range(0, vocab, CHUNK):
        token = first + tl.arange(0, CHUNK)
        x = tl.load(scores_ptr + token, mask=token < vocab, other=float("-inf"))
        held = (token < vocab) & (x >= cut)
        total += tl.where(held, _mass(x, peak, False), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _edge(  # type: ignore[no-untyped-def]
    scores_ptr, vocab, cut, peak, wanted, IS_COUNT: tl.constexpr, CHUNK: tl.constexpr
):
    """The greatest logit such that the mass at or above it is at least `wanted`; where there is
    less mass, the least logit at or above `cut`."""
    low, high = _ordered(cut), _ordered(peak)
    # The answer is in [low, high]; `high` is a logit of the row, and so is `low` after a pass.
    while low < high:
        middle = low + ((high - low).to(tl.uint64, bitcast=True) // 2).to(tl.int64) + 1
        # Lane by lane, and across lanes once a pass: each reduction waits for the whole program.
        masses = tl.zeros([CHUNK], tl.float64)
        above = tl.zeros([CHUNK], tl.int64) + high
        below = tl.zeros([CHUNK], tl.int64) + low
        has_below = tl.zeros([CHUNK], tl.int32)
        for first in range(0, vocab, CHUNK):
            token = first + tl.arange(0, CHUNK)
            x = tl.load(scores_ptr + token, mask=token < vocab, other=float("-inf"))
            key = _ordered(x)
            held = (token < vocab) & (x >= cut)
            upper = held & (key >= middle)
            lower = held & (key < middle)
            masses += tl.where(upper, _mass(x, peak, IS_COUNT), 0.0)
            above = tl.where(upper, tl.minimum(above, key), above)
            below = tl.where(lower, tl.maximum(below, key), below)
            has_below = tl.where(lower, 1, has_below)
        if (tl.sum(masses, 0) >= wanted) | (tl.max(has_below, 0) == 0):
            low = tl.min(above, 0)
        else:
            high = tl.max(below, 0)
    return _unordered(low)


@triton.jit
def _cut(  # type: ignore[no-untyped-def]
    logits_ptr, count, cut, peak, above, total, vocab, top_k, top_p, CHUNK: tl.constexpr
):
    """The least logit that top-k and top-p keep, of those at or above `cut`.

    All of these are among the `count` logits, except for a mass `above`. `total` is the mass
    without top-k.
    """
    if top_k > 0:
        wanted = tl.minimum(top_k, vocab).to(tl.float64)
        lowest = tl.full([], float("-inf"), tl.float64)
        cut = tl.maximum(cut, _edge(logits_ptr, count, lowest, peak, wanted, True, CHUNK))
        total = _total(logits_ptr, count, cut, peak, CHUNK)
    if top_p < 1:
        cut = _edge(logits_ptr, count, cut, peak, top_p * total - above, False, CHUNK)
    return cut


@triton.jit
def cut_kernel(  # type: ignore[no-untyped-def]
    scores_ptr, raw_peaks_ptr, peaks_ptr, positions_ptr, slots_ptr, floats_ptr, ints_ptr,
    bins_ptr, sums_ptr, above_ptr, near_ptr, cuts_ptr, vocab,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr, MOST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """cuts float64 [N]: the least logit that all filters keep, of rows that are sampled."""
    row = tl.program_id(0).to(tl.int64)
    sampled, top_k, top_p, min_p = _filters(
        slots_ptr, positions_ptr, floats_ptr, ints_ptr, row, ROWS
    )
    if not sampled:
        return
    peak = row_peak(raw_peaks_ptr, peaks_ptr, row, BLOCKS, BLOCKS_PAD)
    if peak == float("-inf"):
        return
    cut = _least(peak, min_p)
    if (top_k > 0) | (top_p < 1):
        count = tl.load(bins_ptr + 3 * row + 2)
        total = tl.load(sums_ptr + 2 * row)
        if count <= MOST:
            part = tl.arange(0, PARTS_PAD)
            above = tl.load(above_ptr + row * PARTS + part, mask=part < PARTS, other=0.0)
            above = tl.sum(above, 0)
            near_ptr += row * MOST
            cut = _cut(near_ptr, count, cut, peak, above, total, vocab, top_k, top_p, CHUNK)
        else:
            scores_ptr += row * vocab
            cut = _cut(scores_ptr, vocab, cut, peak, 0.0, total, vocab, top_k, top_p, CHUNK)
    tl.store(cuts_ptr + row, cut)


def filter_launches(values: dict[str, Any], count: int) -> list[Launch]:
    """The launches that find the cuts [N] of rows of logits.

    Args:
        values: scores [N, V], peaks of their BLOCKS, parameters, ROWS of a request; and `cuts_ptr`,
            float64 [N], which is written for rows that are sampled.
        count: N.
    """
    vocab, blocks, cuts = (values[name] for name in ("vocab", "BLOCKS", "cuts_ptr"))
    parts = -(-vocab // _PART)
    values = values | dict(
        counts_ptr=cuts.new_empty((count, parts, _BINS), dtype=torch.int32),
        masses_ptr=cuts.new_empty((count, 2, parts)),
        bins_ptr=cuts.new_empty((count, 3), dtype=torch.int32),
        sums_ptr=cuts.new_empty((count, 2)),
        places_ptr=cuts.new_empty((count, parts), dtype=torch.int32),
        near_ptr=cuts.new_empty((count, _MOST)),
        above_ptr=cuts.new_empty((count, parts)),
        BLOCKS_PAD=power_of_two(blocks), PARTS=parts, PARTS_PAD=power_of_two(parts), PART=_PART,
        BINS=_BINS, TOGETHER=_TOGETHER, MOST=_MOST, CHUNK=_CHUNK,
    )  # fmt: skip
    each, whole = (count, parts, 1), (count, 1, 1)
    return [
        Launch(count_bins_kernel, each, values, threads=128),
        Launch(find_bins_kernel, whole, values),
        Launch(gather_bins_kernel, each, values),
        Launch(cut_kernel, whole, values, threads=512),
    ]

"""What a step notes of emitted tokens: how often each was emitted, and their log-probabilities, for
requests that ask for them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.layout import SCRATCH_SLOT
from mtpc.sampling_params import INTS

_SCRATCH: tl.constexpr = tl.constexpr(SCRATCH_SLOT)


@triton.jit
def count_tokens_kernel(  # type: ignore[no-untyped-def]
    counts_ptr, ids_ptr, emitted_ptr, slots_ptr, vocab, W: tl.constexpr, W_PAD: tl.constexpr
):
    """counts int32 [S, V]; a program has one request, and each token once."""
    request = tl.program_id(0).to(tl.int64)
    slot, emitted = tl.load(slots_ptr + request), tl.load(emitted_ptr + request)
    if slot == _SCRATCH:
        return
    column = tl.arange(0, W_PAD)
    live = (column < W) & (column < emitted)
    ids = tl.load(ids_ptr + request * W + column, mask=live, other=-1)
    same = (ids[:, None] == ids[None, :]) & live[:, None] & live[None, :]
    times = tl.sum(same.to(tl.int32), 1)
    is_first = tl.sum((same & (column[None, :] < column[:, None])).to(tl.int32), 1) == 0
    at = counts_ptr + slot * vocab + ids
    before = tl.load(at, mask=live & is_first, other=0)
    tl.store(at, before + times, mask=live & is_first)


@operator(any_element=True)
def count_tokens(
    output_counts: Tensor, ids: Tensor, num_emitted: Tensor, state_slots: Tensor
) -> Plan:
    """One launch; output_counts is contiguous."""
    requests, width = ids.shape
    values = dict(
        counts_ptr=output_counts, ids_ptr=ids.contiguous(), emitted_ptr=num_emitted.contiguous(),
        slots_ptr=state_slots.contiguous(), vocab=output_counts.shape[1], W=width,
        W_PAD=power_of_two(width),
    )  # fmt: skip
    return [Launch(count_tokens_kernel, (requests, 1, 1), values, threads=64)], None


_CHUNK = 4096
"""Logits that a program loads together."""
_NUM_INTS: tl.constexpr = tl.constexpr(len(INTS))
_LOGPROBS: tl.constexpr = tl.constexpr(INTS.index("logprobs"))


@triton.jit
def write_logprobs_kernel(  # type: ignore[no-untyped-def]
    logprobs_ptr, top_ids_ptr, top_ptr, logits_ptr, ids_ptr, emitted_ptr, slots_ptr, ints_ptr,
    places_ptr, vocab, logits_row, width,
    HAS_PLACES: tl.constexpr, W: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """logprobs float64 [R, width]; top_ids int64 and top float64 [R, width, COUNT]. A program has
    one row; the most probable tokens are found one by one, the first of equals first."""
    row = tl.program_id(0).to(tl.int64)
    request, column = row // W, row % W
    slot = tl.load(slots_ptr + request)
    asked = tl.load(ints_ptr + slot * _NUM_INTS + _LOGPROBS)
    if (slot == _SCRATCH) | (asked < 0) | (column >= tl.load(emitted_ptr + request)):
        return
    logits_ptr += (tl.load(places_ptr + row) if HAS_PLACES else row) * logits_row
    # Lane by lane, and across lanes at the end: each reduction waits for the whole program.
    peaks = tl.full([CHUNK], float("-inf"), tl.float64)
    for first in range(0, vocab, CHUNK):
        token = first + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf"))
        peaks = tl.maximum(peaks, x.to(tl.float64))
    peak = tl.max(peaks, 0)
    totals = tl.zeros([CHUNK], tl.float64)
    for first in range(0, vocab, CHUNK):
        token = first + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf"))
        totals += tl.exp(x.to(tl.float64) - peak)
    shift = peak + tl.log(tl.sum(totals, 0))

    at = request * width + column
    own = tl.load(logits_ptr + tl.load(ids_ptr + row)).to(tl.float64)
    tl.store(logprobs_ptr + at, own - shift)
    last, last_token = tl.full([], float("inf"), tl.float64), tl.full([], -1, tl.int32)
    for place in range(COUNT):
        best = tl.full([CHUNK], float("-inf"), tl.float64)
        chosen = tl.zeros([CHUNK], tl.int32) + vocab
        for first in range(0, vocab, CHUNK):
            token = first + tl.arange(0, CHUNK)
            x = tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf"))
            x = x.to(tl.float64) - shift
            left = (token < vocab) & ((x < last) | ((x == last) & (token > last_token)))
            better = left & ((x > best) | (chosen == vocab))
            best = tl.where(better, x, best)
            chosen = tl.where(better, token, chosen)
        last = tl.max(best, 0)
        last_token = tl.min(tl.where(best == last, chosen, vocab), 0)
        tl.store(top_ids_ptr + at * COUNT + place, last_token.to(tl.int64))
        tl.store(top_ptr + at * COUNT + place, last)


@operator(any_element=True)
def write_logprobs(
    logprobs: Tensor, top_ids: Tensor, top_logprobs: Tensor, logits: Tensor, ids: Tensor,
    num_emitted: Tensor, state_slots: Tensor, ints: Tensor, places: Tensor | None = None,
) -> Plan:  # fmt: skip
    """One launch; what is written is contiguous."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    values = dict(
        logprobs_ptr=logprobs, top_ids_ptr=top_ids, top_ptr=top_logprobs, logits_ptr=logits,
        ids_ptr=ids.contiguous(), emitted_ptr=num_emitted.contiguous(),
        slots_ptr=state_slots.contiguous(), ints_ptr=ints.contiguous(),
        places_ptr=ids if places is None else places.contiguous(),  # Without, none is read.
        vocab=logits.shape[1], logits_row=logits.stride(0), width=logprobs.shape[1],
        HAS_PLACES=places is not None, W=ids.shape[1], COUNT=top_ids.shape[2], CHUNK=_CHUNK,
    )  # fmt: skip
    return [Launch(write_logprobs_kernel, (ids.numel(), 1, 1), values, threads=512)], None

"""Counts of emitted tokens: a program for each request."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.layout import SCRATCH_SLOT

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

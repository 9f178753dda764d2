"""Block tables as lists of cache rows; see `mtpc.backends.aiter.token_lists`, whose kernel it is.

A request has as many programs as its longest context could use. Each goes through blocks of the
actual context, so those that it does not reach end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, power_of_two

_BLOCK = 1024
"""Rows that a program lists together."""
_PROGRAMS = 2048
"""The most programs, if there are fewer requests."""


@triton.jit
def token_lists_kernel(  # type: ignore[no-untyped-def]
    table_ptr, lens_ptr, starts_ptr, rows_ptr, num_reqs, table_width,
    PAGE: tl.constexpr, BEHIND: tl.constexpr, BLOCK: tl.constexpr, R_PAD: tl.constexpr,
):  # fmt: skip
    """starts int32 [R + 1]; rows int32: the lists, then BEHIND zeros."""
    request, reqs = tl.program_id(0), tl.arange(0, R_PAD)
    lens = tl.load(lens_ptr + reqs, mask=reqs < num_reqs, other=0)
    listed = tl.minimum(tl.maximum(lens, 1), table_width * PAGE)
    listed = tl.where(reqs < num_reqs, listed, 0)
    start = tl.sum(tl.where(reqs < request, listed, 0))
    count = tl.sum(tl.where(reqs == request, listed, 0))
    tokens = tl.sum(tl.where((reqs == request) & (lens > 0), listed, 0))
    is_last = request == num_reqs - 1
    if tl.program_id(1) == 0:
        tl.store(starts_ptr + request, start)
        if is_last:
            tl.store(starts_ptr + num_reqs, start + count)
    end = count + tl.where(is_last, BEHIND, 0)
    for first in range(tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        position = first + tl.arange(0, BLOCK)
        has_token = position < tokens
        at = table_ptr + request * table_width + position // PAGE
        row = tl.load(at, mask=has_token, other=0) * PAGE + position % PAGE
        tl.store(rows_ptr + start + position, tl.where(has_token, row, 0), mask=position < end)


def list_plan(
    block_table: Tensor, seq_lens: Tensor, page_size: int, behind: int
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """The launch and the results of the operator; `behind` rows 0 follow the last list."""
    (num_reqs, blocks), longest = block_table.shape, block_table.shape[1] * page_size
    starts = seq_lens.new_empty((num_reqs + 1,))
    rows = block_table.new_empty((num_reqs * longest + behind,))
    values = dict(
        table_ptr=block_table.contiguous(), lens_ptr=seq_lens.contiguous(), starts_ptr=starts,
        rows_ptr=rows, num_reqs=num_reqs, table_width=blocks, PAGE=page_size, BEHIND=behind,
        BLOCK=_BLOCK, R_PAD=power_of_two(num_reqs, 16),
    )  # fmt: skip
    each = min(-(-longest // _BLOCK), -(-_PROGRAMS // num_reqs))
    return Launch(token_lists_kernel, (num_reqs, each, 1), values), (starts, rows)

"""The lists of tokens that aiter's latent attention reads.

The operator has the size of the longest contexts, as a captured step needs, and on a GPU does the
work of the actual ones: what is behind the lists is left open, but for the rows that aiter's own
test has there (`facts.FACTS`), which assembly may fetch ahead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtpc.backends.aiter.facts import FACTS

BEHIND: int = FACTS["rows behind the lists"].value


@torch.library.custom_op("mtpc_aiter::token_lists", mutates_args=())
def token_lists(block_table: Tensor, seq_lens: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """The cache rows of all requests' tokens, one request behind the other: pages of one token.

    Args:
        block_table: int32 [R, M].
        seq_lens: int32 [R]; a request that is off (0) is given the null page's first row, so that
            no list is empty.
        page_size: tokens per page, P.

    Returns:
        Where each request's list begins and the last one ends, int32 [R + 1]; and the lists, int32
        [R * M * P + BEHIND]. Behind the last list are BEHIND times row 0, then anything.
    """
    (num_reqs, blocks), device = block_table.shape, block_table.device
    longest, each = blocks * page_size, torch.arange(num_reqs + 1, device=device)
    before = each[:, None] > each[None, :-1]
    lens = seq_lens.clamp(1, longest)
    starts = torch.where(before, lens, 0).sum(1, dtype=torch.int32)
    place = torch.arange(num_reqs * longest + BEHIND, dtype=torch.int32, device=device)
    request = (torch.searchsorted(starts, place, right=True) - 1).clamp(max=num_reqs - 1)
    position = (place - starts[request]).clamp(0, longest - 1)
    row = block_table[request, position // page_size] * page_size + position % page_size
    is_listed = (place < starts[request + 1]) & (seq_lens[request] > 0)
    return starts, torch.where(is_listed, row, 0).int()


@token_lists.register_fake
def _(block_table: Tensor, seq_lens: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    num_reqs, blocks = block_table.shape
    rows = num_reqs * blocks * page_size + BEHIND
    return seq_lens.new_empty((num_reqs + 1,)), block_table.new_empty((rows,))


@token_lists.register_kernel("cuda")
def list_on_gpu(block_table: Tensor, seq_lens: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """`token_lists` by mtpc's Triton kernel."""
    from mtpc.backends.triton_kernels.launch import run
    from mtpc.backends.triton_kernels.token_lists import list_plan

    launch, out = list_plan(block_table, seq_lens, page_size, BEHIND)
    run([launch])
    return out

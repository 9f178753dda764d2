"""Small exchanges of ranks, in one launch, through the memory of their GPUs (`peer_memory`).

A program has a block of the part. It copies it to its own GPU's memory, tells all ranks so, waits
until all have told it so, and reads the block of every rank in the order of the ranks.

**Why one wait is enough.** The sets of blocks take turns: the c-th exchange of a block uses set
c mod 2. So a rank writes to a block again in exchange c + 2. Before, in exchange c + 1, it has seen
flag c + 1 of every rank. A rank raises that in its exchange c + 1, which begins when its exchange c
has ended, as both are launches of one stream; so it has read what this rank gave in c. Flags are
raised with release and read with acquire semantics at the scope of the system. A block has its own
bytes, flags and count, whatever the size of an exchange, so this holds for each block by itself.

The count is the rank's own flag, so each launch, replayed or not, finds it in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.peer_memory import BLOCK_BYTES, BLOCKS, FLAG_BYTES, MOST_BYTES, PEERS
from mtpc.backends.triton_kernels import ELEMENTS
from mtpc.backends.triton_kernels.launch import Launch, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator

_THREADS = 64
"""One wavefront on AMD, whose release waits for its own stores alone."""


@triton.jit
def raise_flags(there, is_rank, count):  # type: ignore[no-untyped-def]
    """Tell every rank that this program has given its part; what it wrote before is seen first."""
    tl.debug_barrier()  # All threads have written.
    tl.atomic_xchg(there, count, mask=is_rank, sem="release", scope="sys")


@triton.jit
def least_flag(here, is_rank, count):  # type: ignore[no-untyped-def]
    """The least flag of all ranks, or `count` if that is less."""
    seen = tl.atomic_add(here, 0, mask=is_rank, sem="acquire", scope="sys")
    return tl.min(tl.where(is_rank, seen, count))


@triton.jit
def await_flags(here, is_rank, count):  # type: ignore[no-untyped-def]
    """Wait until every rank has given its part of the block. One may be an exchange ahead."""
    least = least_flag(here, is_rank, count)
    while least < count:  # Of a number: Triton 3.6 fails on a loop that leaves a tensor.
        least = least_flag(here, is_rank, count)
    tl.debug_barrier()  # No thread reads before.


@triton.jit(do_not_specialize=["rank"])
def exchange_kernel(  # type: ignore[no-untyped-def]
    part_ptr, out_ptr, addresses_ptr, rank, size,
    SUM: tl.constexpr, RANKS: tl.constexpr, RANKS_PAD: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_BYTES: tl.constexpr, FLAG_BYTES: tl.constexpr,
):  # fmt: skip
    """part [size]; addresses int64 [RANKS]; out [size] if it is a SUM, else [RANKS, size]."""
    block, other, i = tl.program_id(0), tl.arange(0, RANKS_PAD), tl.arange(0, BLOCK)
    at = block * BLOCK + i
    inside, is_rank = at < size, other < RANKS
    own = tl.load(addresses_ptr + rank)
    all_memory = tl.load(addresses_ptr + other, mask=is_rank, other=0)
    first_flag = 2 * BLOCKS * BLOCK_BYTES + block.to(tl.int64) * RANKS * FLAG_BYTES
    here = (own + first_flag + other * FLAG_BYTES).to(tl.pointer_type(tl.int64))
    there = (all_memory + first_flag + rank * FLAG_BYTES).to(tl.pointer_type(tl.int64))
    count = tl.load((own + first_flag + rank * FLAG_BYTES).to(tl.pointer_type(tl.int64))) + 1

    begin = ((count & 1) * BLOCKS + block) * BLOCK_BYTES
    to = tl.multiple_of((own + begin).to(part_ptr.dtype), 16)
    tl.store(to + i, tl.load(part_ptr + at, mask=inside), mask=inside)
    raise_flags(there, is_rank, count)
    await_flags(here, is_rank, count)

    wide = tl.float32 if SUM else part_ptr.dtype.element_ty
    total = tl.zeros([BLOCK], dtype=wide)
    for one in tl.static_range(RANKS):
        given = (tl.load(addresses_ptr + one) + begin).to(part_ptr.dtype)
        found = tl.load(tl.multiple_of(given, 16) + i, mask=inside).to(wide)
        if SUM:
            total = found if one == 0 else total + found
        else:
            tl.store(out_ptr + one * size + at, found, mask=inside)
    if SUM:
        tl.store(out_ptr + at, total.to(part_ptr.dtype.element_ty), mask=inside)


def exchange(part: Tensor, out: Tensor, group: str, is_sum: bool) -> list[Launch]:
    """The launch of an exchange.

    Args:
        part: at most `MOST_BYTES`, of one shape and dtype on all ranks.
        out: contiguous; as the part if it is a sum, else [ranks, *part.shape].
        group: has an entry in `PEERS`.
        is_sum: whether to add the parts.
    """
    memory, block = PEERS[group], BLOCK_BYTES // part.itemsize
    ranks = len(memory.addresses)
    values = dict(
        part_ptr=part.contiguous(), out_ptr=out, addresses_ptr=memory.addresses, rank=memory.rank,
        size=part.numel(), SUM=is_sum, RANKS=ranks, RANKS_PAD=power_of_two(ranks), BLOCK=block,
        BLOCKS=BLOCKS, BLOCK_BYTES=BLOCK_BYTES, FLAG_BYTES=FLAG_BYTES,
    )  # fmt: skip
    grid = (-(-part.numel() // block), 1, 1)
    return [Launch(exchange_kernel, grid, values, threads=_THREADS)]


def peers_limit(call: Mapping[str, Any]) -> str | None:
    """Why ranks do not exchange a part through each other's memory; None where they do."""
    part = call["part"]
    if call["group"] not in PEERS:
        return "its ranks do not share memory"
    nbytes = part.numel() * part.itemsize
    return f"{nbytes} bytes; it takes up to {MOST_BYTES}" if nbytes > MOST_BYTES else None


def _sum_limit(call: Mapping[str, Any]) -> str | None:
    dtype = call["part"].dtype
    return peers_limit(call) if dtype in ELEMENTS else f"{dtype}"


@operator(_sum_limit, any_element=True)
def sum_ranks(part: Tensor, group: str, after: Tensor | None) -> Plan:
    """One launch."""
    out = torch.empty_like(part, memory_format=torch.contiguous_format)
    return exchange(part, out, group, is_sum=True), out


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element: numbers are moved as they are, whatever their dtype."""


@operator(peers_limit, any_element=True)
def gather_ranks(part: Tensor, ranks: int, group: str, after: Tensor | None) -> Plan:
    """The launch of `sum_ranks`, which does not add."""
    out, bits = part.new_empty([ranks, *part.shape]), _BITS[part.itemsize]
    return exchange(part.contiguous().view(bits), out.view(bits), group, is_sum=False), out

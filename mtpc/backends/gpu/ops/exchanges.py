"""Exchanges of ranks on GPUs, to which the collectives of `mtpc.ops.collectives` are lowered."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mtpc.ops.collectives import gathered, group_of, summed
from mtpc.ops.traits import Traits, operator

_exchange = dist.all_to_all_single


@operator(
    Traits("dims", "moves", dims="add"), lambda part, ranks: part.new_empty([ranks, *part.shape])
)
def gather_ranks(part: Tensor, ranks: int, group: str, after: Tensor | None = None) -> Tensor:
    """The tensors of all ranks, in the order of the ranks, with the same bits on every rank.

    Args:
        part: of one shape and dtype on all ranks.
        ranks: how many the group has.
        group: name of the process group.
        after: what another collective gave, which this one must follow: a compiler may move calls
            that do not depend on each other, and ranks must make the same calls in one order.

    Returns:
        [ranks, *part.shape].
    """
    return gathered(part, group)


@operator(Traits("dims", "moves", dims="along"), "parts")
def exchange_ranks(parts: Tensor, group: str, after: Tensor | None = None) -> Tensor:
    """What each rank has for this one.

    Args:
        parts: [ranks, ...], of one shape and dtype on all ranks; rank r gets the r-th.
        group: name of the process group.
        after: as of `gather_ranks`.

    Returns:
        As `parts`: the tensors of all ranks for this one, in the order of the ranks.
    """
    found = torch.empty_like(parts, memory_format=torch.contiguous_format)
    _exchange(found, parts.contiguous(), group=group_of(group))
    return found


@operator(Traits("row", "elements", rows="part"), "part")
def sum_ranks(part: Tensor, group: str, after: Tensor | None = None) -> Tensor:
    """As `all_reduce`: a small sum as one exchange, for which GPUs that share memory have a kernel.

    Args:
        part: as of `all_reduce`.
        group: name of the process group.
        after: as of `gather_ranks`.

    Returns:
        As `part`.
    """
    return summed(part, group)

"""Collectives: values that ranks exchange within a step, over a torch.distributed process group.

Every rank gets the same bits: each gathers all values and combines them in the order of the ranks.
A graph names the group, as torch's functional collectives do. The process's rank is looked up when
the operator runs, so all ranks have the same graph.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from mtpc.ops.traits import Traits, largest_of, operator


def parts_of(part: Tensor, group: str) -> list[Tensor]:
    """The tensors of all ranks, which have one shape and dtype, in the order of the ranks."""
    return list(gathered(part, group))


def gathered(part: Tensor, group: str) -> Tensor:
    """[ranks, *part.shape], by the one call by which ranks exchange values in a step."""
    members = group_of(group)
    whole = part.new_empty(members.size() * part.numel())
    _gather(whole, part.reshape(-1), members)
    return whole.view(members.size(), *part.shape)


_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Before torch 2.13 it has another name."""


def is_collective(target: Any) -> bool:
    """Whether an operator takes a process group."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(one.name == "group" for one in schema.arguments)


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of a name that graphs hold."""
    return dist.distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(name))


@operator(Traits("row", "elements", rows="part"), "part")
def all_reduce(part: Tensor, group: str) -> Tensor:
    """The sum of all ranks' tensors, in the order of the ranks.

    bfloat16 and float16 are summed in float32 and rounded once.

    Args:
        part: this rank's summand; all have one shape.
        group: name of the process group.

    Returns:
        As `part`.
    """
    return summed(part, group)


def summed(part: Tensor, group: str) -> Tensor:
    wide = torch.promote_types(part.dtype, torch.float32)
    first, *others = parts_of(part, group)
    total = first.to(wide, copy=True)
    for other in others:
        total += other
    return total.to(part.dtype)


@operator(
    Traits("dims", "moves", dims="along"),
    lambda part, dim, size: part.new_empty(
        [size if i == dim else n for i, n in enumerate(part.shape)]
    ),
)
def all_gather(part: Tensor, dim: int, size: int, group: str) -> Tensor:
    """All ranks' parts as one tensor.

    Args:
        part: rank r of n holds what begins at r * ceil(size / n) along `dim`.
        dim: the dimension that is cut, from 0.
        size: of the whole along it.
        group: name of the process group.

    Returns:
        As `part`, with `size` along `dim`.
    """
    ranks = group_of(group).size()
    step = -(-size // ranks)
    filled = F.pad(part, (0, 0) * (part.dim() - 1 - dim) + (0, step - part.shape[dim]))
    return torch.cat(parts_of(filled, group), dim).narrow(dim, 0, size).contiguous()


@operator(
    Traits("dims", "moves", dims="along"),
    lambda whole, dim, ranks: whole.new_empty(
        [n // ranks if i == dim else n for i, n in enumerate(whole.shape)]
    ),
)
def rank_part(whole: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """This rank's part of a tensor that every rank has, cut along `dim`, from 0, into equal
    parts."""
    own = whole.chunk(ranks, dim)[group_of(group).rank()]
    return own.clone(memory_format=torch.contiguous_format)


@operator(
    Traits("row", "moves", rows="ids", features=0),
    lambda rows, ids: rows.new_empty([*ids.shape, rows.shape[1]]),
)
def vocab_embedding(rows: Tensor, ids: Tensor, step: int, group: str) -> Tensor:
    """Rows of an embedding that is cut by its vocabulary.

    One rank has the row of an id, and the others add zeros to it: the sum is exact.

    Args:
        rows: [V_r, H], rank r's rows, at least one: those of the ids from r * step on.
        ids: int64, any shape, each below the vocabulary's size.
        step: rows of every rank but the last ones.
        group: name of the process group.

    Returns:
        [*ids.shape, H], dtype of rows.
    """
    own = ids - group_of(group).rank() * step
    is_own = (own >= 0) & (own < rows.shape[0])
    found = F.embedding(own.clamp(0, rows.shape[0] - 1), rows)
    summand = torch.where(is_own[..., None], found, torch.zeros_like(found))
    return all_reduce(summand, group)


@operator(Traits("row", "compares", rows="logits"), lambda logits: largest_of(logits))
def vocab_max(logits: Tensor, step: int, group: str) -> tuple[Tensor, Tensor]:
    """The largest logit and its id, of logits that are cut by the vocabulary.

    Of equal logits the lowest id wins, and not a number is larger than any number, as in
    `Tensor.max`.

    Args:
        logits: [..., V_r], rank r's logits, at least one: those of the ids from r * step on.
        step: logits of every rank but the last ones.
        group: name of the process group.

    Returns:
        The largest logits, dtype of logits, and their ids, int64; [...] both.
    """
    best, place = logits.max(-1)
    ids = place + group_of(group).rank() * step
    # One collective for both: float64 holds logits and ids exactly.
    told = torch.stack(parts_of(torch.stack([best.double(), ids.double()]), group))
    found, rank = told[:, 0].max(0)
    chosen = told[:, 1].gather(0, rank[None])[0]
    return found.to(logits.dtype), chosen.long()


@operator(Traits("row", "moves", rows="value", features=0), "value")
def first_rank(value: Tensor, group: str) -> Tensor:
    """The first rank's tensor, of one shape and dtype, on every rank: for choices on which all must
    agree."""
    told = value.clone(memory_format=torch.contiguous_format)
    dist.broadcast(told, group=group_of(group), group_src=0)
    return told

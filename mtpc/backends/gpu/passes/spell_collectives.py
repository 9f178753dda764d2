"""spell-collectives: the arithmetic of collectives as plain operators around exchanges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mtpc.backends.gpu.passes.batch_invariant import Emitter
from mtpc.capture.graph import StepGraph, arguments
from mtpc.ops.signatures import value_of
from mtpc.passes.base import GETITEM, Pass, is_call, tidy
from mtpc.passes.shard import Sharding

aten, ours = torch.ops.aten, torch.ops.mtpc
_GATHER, _EXCHANGE = ours.gather_ranks.default, ours.exchange_ranks.default
_SUM = ours.sum_ranks.default
LEAST_SAVED = 4 << 20
"""An all-reduce in two exchanges must save so many bytes. The links of an H200 carry them in about
10 us, which `mtpc plan` assumes as the latency of an exchange. Never measured."""


@dataclass(frozen=True)
class SpellCollectives(Pass, policy="backend"):
    """Leave two operators by which ranks exchange values, `gather_ranks` and `exchange_ranks`, and
    `sum_ranks` for small sums of ranks that share memory.

    Other sums, and the choice of the largest logit, become operators that a compiler fuses and that
    other passes know. Exchanges that do not depend on each other are put in one order, because a
    compiler might order them otherwise on a rank whose part of the vocabulary is smaller. The
    results have the bits of `mtpc.ops.collectives`. The cuda backend enables it.

    Attributes:
        sharding: this rank's part of the model; None leaves the step as it is.
    """

    sharding: Sharding | None = None

    def apply(self, graph: StepGraph) -> int:
        if self.sharding is None:
            return 0
        rewrites = 0
        for node in list(graph.graph.nodes):
            spell = _SPELLINGS.get(node.target) if node.op == "call_function" else None
            if spell is not None:
                with graph.graph.inserting_before(node):
                    given = {n: each for n, each in arguments(node).items() if n != "group"}
                    new = spell(_Emitter(graph.graph, node, self.sharding), **given)
                _take_over(node, new)
                rewrites += 1
        _keep_order(graph.graph)
        return tidy(graph, rewrites)


@dataclass(frozen=True)
class _Emitter(Emitter):
    """Emits calls in place of a collective."""

    sharding: Sharding

    @property
    def ranks(self) -> int:
        return self.sharding.ranks

    def gathered(self, part: fx.Node) -> fx.Node:
        """[ranks, *shape] of all ranks' parts."""
        return self(_GATHER, part, self.ranks, self.sharding.group)

    def firsts(self, step: int, device: torch.device) -> fx.Node:
        """int64 [ranks]: the first id of each rank's part of a vocabulary."""
        end = self.ranks * step
        return self(aten.arange.start_step, 0, end, step, dtype=torch.int64, device=device)


def _take_over(node: fx.Node, new: fx.Node | tuple[fx.Node, ...]) -> None:
    """Replace a call's result, or each of its results."""
    if isinstance(new, fx.Node):
        node.replace_all_uses_with(new)
        return
    for user in list(node.users):
        assert user.target is GETITEM
        user.replace_all_uses_with(new[user.args[1]])  # type: ignore[index]


def _all_reduce(emit: _Emitter, part: fx.Node) -> fx.Node:
    """Each rank adds all parts, or its block of all parts if these are large (`_saved_bytes`).

    One operator does that for small parts of ranks that share memory. In each way an element is the
    sum of the ranks' numbers in the order of the ranks.
    """
    value, ranks = value_of(part), emit.ranks
    if value.numel() * value.itemsize <= emit.sharding.peer_bytes:
        return emit(_SUM, part, emit.sharding.group)
    if _saved_bytes(value, ranks) < LEAST_SAVED:
        return _sum(emit, emit.gathered(part))
    flat, block = emit(aten.reshape.default, part, [-1]), -(-value.numel() // ranks)
    if block * ranks > value.numel():
        flat = emit(aten.constant_pad_nd.default, flat, [0, block * ranks - value.numel()])
    blocks = emit(aten.reshape.default, flat, [ranks, block])
    own = _sum(emit, emit(_EXCHANGE, blocks, emit.sharding.group))
    whole = emit(aten.reshape.default, emit.gathered(own), [-1])
    if block * ranks > value.numel():
        whole = emit(aten.slice.Tensor, whole, 0, 0, value.numel())
    return emit(aten.reshape.default, whole, list(value.shape))


def _saved_bytes(part: Tensor, ranks: int) -> int:
    """How much less a rank sends of an all-reduce by blocks than by a gather of all parts.

    That is 2 (n - 1) / n of the part's bytes in place of n - 1 times these; for two ranks the same.
    """
    return part.numel() * part.itemsize * (ranks - 1) * (ranks - 2) // ranks


def _sum(emit: _Emitter, parts: fx.Node) -> fx.Node:
    """The sum of [ranks, ...] in the order of the ranks, rounded once."""
    dtype = value_of(parts).dtype
    parts = emit.cast(parts, torch.promote_types(dtype, torch.float32))
    total = emit(aten.select.int, parts, 0, 0)
    for rank in range(1, emit.ranks):
        total = emit(aten.add.Tensor, total, emit(aten.select.int, parts, 0, rank))
    return emit.cast(total, dtype)


def _all_gather(emit: _Emitter, part: fx.Node, dim: int, size: int) -> fx.Node:
    shape, step = list(value_of(part).shape), -(-size // emit.ranks)
    if shape[dim] < step:
        pads = [0, 0] * (len(shape) - 1 - dim) + [0, step - shape[dim]]
        part = emit(aten.constant_pad_nd.default, part, pads)
    beside = emit(aten.movedim.int, emit.gathered(part), 0, dim)
    shape[dim] = emit.ranks * step
    joined = emit(aten.reshape.default, beside, shape)
    return emit(aten.contiguous.default, emit(aten.slice.Tensor, joined, dim, 0, size))


def _vocab_embedding(emit: _Emitter, rows: fx.Node, ids: fx.Node, step: int) -> fx.Node:
    firsts = emit.firsts(step, value_of(ids).device)
    first = emit(ours.rank_part.default, firsts, 0, emit.ranks, emit.sharding.group)
    last = value_of(rows).shape[0] - 1
    own = emit(aten.sub.Tensor, ids, first)
    held = emit(aten.clamp.default, own, 0, last)
    other = emit(aten.unsqueeze.default, emit(aten.ne.Tensor, own, held), -1)
    found = emit(aten.embedding.default, rows, held)
    return _all_reduce(emit, emit(aten.masked_fill.Scalar, found, other, 0))


def _vocab_max(emit: _Emitter, logits: fx.Node, step: int) -> tuple[fx.Node, fx.Node]:
    best = emit(aten.max.dim, logits, -1)
    wide = [emit(aten.to.dtype, emit(GETITEM, best, i), torch.float64) for i in (0, 1)]
    told = emit.gathered(emit(aten.stack.default, wide))
    found = emit(aten.max.dim, emit(aten.select.int, told, 1, 0), 0)
    largest, rank = emit(GETITEM, found, 0), emit(GETITEM, found, 1)
    chosen = emit(aten.unsqueeze.default, rank, 0)
    places = emit(aten.gather.default, emit(aten.select.int, told, 1, 1), 0, chosen)
    first = emit(aten.mul.Tensor, rank, step)
    ids = emit(aten.add.Tensor, emit.cast(emit(aten.select.int, places, 0, 0), torch.int64), first)
    return emit.cast(largest, value_of(logits).dtype), ids


def _first_rank(emit: _Emitter, value: fx.Node) -> fx.Node:
    return emit(aten.clone.default, emit(aten.select.int, emit.gathered(value), 0, 0))


_SPELLINGS: dict[Any, Callable[..., Any]] = {
    ours.all_reduce.default: _all_reduce,
    ours.all_gather.default: _all_gather,
    ours.vocab_embedding.default: _vocab_embedding,
    ours.vocab_max.default: _vocab_max,
    ours.first_rank.default: _first_rank,
}
"""Each takes the call's arguments by name, without the group."""


def _keep_order(graph: fx.Graph) -> None:
    """Have each exchange follow the one before it, and so all before that."""
    behind: dict[fx.Node, int] = {}  # How many exchanges a value is known to come after.
    last: fx.Node | None = None
    for node in graph.nodes:
        behind[node] = max((behind[source] for source in node.all_input_nodes), default=0)
        if is_call(node, _GATHER, _EXCHANGE, _SUM):
            count = 0 if last is None else behind[last]
            if last is not None and behind[node] < count:
                node.kwargs = {**node.kwargs, "after": last}
            last, behind[node] = node, count + 1

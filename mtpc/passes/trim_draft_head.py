"""trim-draft-head: drafts from a part of the vocabulary; verification keeps the text exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mtpc.capture.graph import StepGraph
from mtpc.passes.base import Policy, emit, emit_attribute, emit_weight, operands, sweep
from mtpc.passes.linears import draft_nodes, weight_of
from mtpc.weights.recipes import Rows

aten = torch.ops.aten


@dataclass(frozen=True)
class TrimDraftHead:
    """Restrict drafts to `token_ids`: the draft head reads only these rows of the head.

    The head is the largest matrix that a draft reads, and frequent tokens make up most of any text
    (FR-Spec, arXiv:2502.14856). The target's head stays as it is, so the emitted text is that of
    plain decoding; only the number of accepted drafts can change. The trimmed copy takes memory
    beside the target's head. The pass does nothing without token ids.

    Attributes:
        token_ids: ascending, each smaller than the number of rows of the head. Of equal logits the
            lowest id wins, as in the whole head.
    """

    name: ClassVar[str] = "trim-draft-head"
    policy: ClassVar[Policy] = "on"
    token_ids: tuple[int, ...] = ()

    def apply(self, graph: StepGraph) -> int:
        if not self.token_ids:
            return 0
        draft = draft_nodes(graph.graph)
        picks = [node for node in graph.graph.nodes if node in draft and _picks(graph, node)]
        for pick in picks:
            self._trim(graph, pick)
        sweep(graph)
        return len(picks)

    def _trim(self, graph: StepGraph, pick: fx.Node) -> None:
        picked, dim = operands(pick, aten.argmax.default, 2)
        head, selected = _head_of(picked)
        x, *weights = operands(head, aten.linear.default, 3)
        recipe_runs = runs(self.token_ids)
        with graph.graph.inserting_before(pick):
            rows = [
                emit_weight(
                    graph,
                    f"trimmed.{str(weight.target).replace('.', '_')}",
                    Rows(recipe_runs, str(weight.target)),
                    weight,
                )
                for weight in weights
                if weight is not None
            ]
            logits = emit(graph.graph, aten.linear.default, (x, *rows), head)
            if selected:
                logits = emit(graph.graph, aten.select.int, (logits, *selected), pick)
            index = emit(graph.graph, aten.argmax.default, (logits, dim), pick)
            chosen = self._token_ids_of(graph, index)
        pick.replace_all_uses_with(chosen)

    def _token_ids_of(self, graph: StepGraph, index: fx.Node) -> fx.Node:
        """Append nodes that map rows of the trimmed head to token ids."""
        if self.token_ids == tuple(range(len(self.token_ids))):
            return index
        device = index.meta["val"].device
        name = graph.weights.add_constant(torch.tensor(self.token_ids, device=device))
        ids = emit_attribute(graph, name, graph.weights[name], index)
        return emit(graph.graph, aten.index_select.default, (ids, 0, index), index)


def runs(token_ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending ids as maximal runs [start, stop)."""
    starts = [i for n, i in enumerate(token_ids) if n == 0 or token_ids[n - 1] != i - 1]
    stops = [i + 1 for n, i in enumerate(token_ids) if token_ids[n + 1 : n + 2] != (i + 1,)]
    return tuple(zip(starts, stops, strict=True))


def _picks(graph: StepGraph, node: fx.Node) -> bool:
    """Whether a node is the argmax over the vocabulary of the unchanged logits of a linear head."""
    logits, dim = operands(node, aten.argmax.default, 2)
    if dim != -1:
        return False
    x, weight, bias = operands(_head_of(logits)[0], aten.linear.default, 3)
    if x is None:
        return False
    return all(w is None or weight_of(graph, w) is not None for w in (weight, bias))


def _head_of(logits: Any) -> tuple[Any, tuple[Any, ...]]:
    """The node that computes the logits, and the arguments (0, 0) of a `select` of its result, or
    () without one."""
    whole, *selected = operands(logits, aten.select.int, 3)
    return (whole, tuple(selected)) if selected == [0, 0] else (logits, ())

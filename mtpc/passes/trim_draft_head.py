"""trim-draft-head: drafts from a part of the vocabulary, which verification makes harmless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mtpc.capture.graph import StepGraph, set_tensor
from mtpc.passes.base import Policy, emit, emit_weight, sweep
from mtpc.passes.linears import draft_nodes, weight_of
from mtpc.passes.patterns import operands
from mtpc.weights.recipes import Rows

aten = torch.ops.aten


@dataclass(frozen=True)
class TrimDraftHead:
    """Let drafts be among `token_ids` only: their use of the head reads these rows of it.

    The head is the largest matrix a draft reads; frequent tokens make up most of any text
    (FR-Spec, arXiv:2502.14856). The target's use of the head is left alone: what is emitted
    stays what plain decoding emits, and only how many drafts are accepted can change. Does
    nothing without token ids. The trimmed copy is memory on top of the target's head.

    Attributes:
        token_ids: ascending, each below the head's rows. Ties go to the lowest id, as in the
            whole head.
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
        """Token ids of rows of the trimmed head."""
        if self.token_ids == tuple(range(len(self.token_ids))):
            return index
        device = index.meta["val"].device
        name = graph.weights.add_constant(torch.tensor(self.token_ids, device=device))
        table = graph.weights[name]
        set_tensor(graph.module, name, table, buffer=True)
        ids = graph.graph.get_attr(name)
        ids.meta = {"val": index.meta["val"].fake_mode.from_tensor(table, static_shapes=True)}
        return emit(graph.graph, aten.index_select.default, (ids, 0, index), index)


def runs(token_ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending ids as runs [start, stop)."""
    starts = [i for n, i in enumerate(token_ids) if n == 0 or token_ids[n - 1] != i - 1]
    stops = [i + 1 for n, i in enumerate(token_ids) if token_ids[n + 1 : n + 2] != (i + 1,)]
    return tuple(zip(starts, stops, strict=True))


def _picks(graph: StepGraph, node: fx.Node) -> bool:
    """Whether a node is the argmax, over the vocabulary, of nothing but a head's product."""
    logits, dim = operands(node, aten.argmax.default, 2)
    if dim != -1:
        return False
    x, weight, bias = operands(_head_of(logits)[0], aten.linear.default, 3)
    if x is None:
        return False
    return all(w is None or weight_of(graph, w) is not None for w in (weight, bias))


def _head_of(logits: Any) -> tuple[Any, tuple[Any, ...]]:
    """The node that made logits, and (dim, index) where one of a leading dimension was selected."""
    whole, *selected = operands(logits, aten.select.int, 3)
    return (whole, tuple(selected)) if selected == [0, 0] else (logits, ())

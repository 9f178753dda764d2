"""trim-draft-head: drafts from a part of the vocabulary, which verification makes harmless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mtpc.capture.graph import StepGraph, set_tensor
from mtpc.passes.base import emit, emit_weight, is_call, sweep
from mtpc.passes.linears import draft_nodes, weight_of
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
        head, selected = _head_of(pick.args[0])
        x, *operands = head.args
        recipe_runs = runs(self.token_ids)
        with graph.graph.inserting_before(pick):
            rows = [
                emit_weight(
                    graph,
                    f"trimmed.{str(operand.target).replace('.', '_')}",
                    Rows(recipe_runs, str(operand.target)),
                    operand,
                )
                for operand in operands
                if isinstance(operand, fx.Node)
            ]
            logits = emit(graph.graph, aten.linear.default, (x, *rows), head)
            if selected:
                logits = emit(graph.graph, aten.select.int, (logits, *selected), pick)
            index = emit(graph.graph, aten.argmax.default, (logits, *pick.args[1:]), pick)
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
    if not is_call(node, aten.argmax.default) or node.args[1:] not in ((-1,), (-1, False)):
        return False
    head, _ = _head_of(node.args[0])
    if not is_call(head, aten.linear.default):
        return False
    return all(o is None or weight_of(graph, o) is not None for o in head.args[1:])


def _head_of(logits: Any) -> tuple[Any, tuple[Any, ...]]:
    """The node that made logits, and (dim, index) where one of a leading dimension was selected."""
    if is_call(logits, aten.select.int) and logits.args[1:] == (0, 0):
        return logits.args[0], logits.args[1:]
    return logits, ()

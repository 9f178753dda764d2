"""trim-draft-head: drafts from a part of the vocabulary; verification keeps the text exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtpc.capture.graph import StepGraph
from mtpc.passes.base import Pass, aten, emit, emit_attribute, emit_weight, is_call, operands, sweep
from mtpc.passes.linears import draft_nodes, weight_of
from mtpc.weights.recipes import Rows


@dataclass(frozen=True)
class TrimDraftHead(Pass, policy="on"):
    """Restrict drafts to `token_ids`: the draft head reads only these rows of the head.

    The head is the largest matrix that a draft reads, and frequent tokens make up most of any text
    (FR-Spec, arXiv:2502.14856). The target's head stays as it is, so the emitted text is that of
    plain decoding; only the number of accepted drafts can change. The trimmed copy takes memory
    beside the target's head. The pass does nothing without token ids.

    The ids are ascending, each smaller than the number of rows of the head. Of equal logits the
    lowest id wins, as in the whole head.
    """

    token_ids: tuple[int, ...] = ()

    def apply(self, graph: StepGraph) -> int:
        if not self.token_ids:
            return 0
        draft = draft_nodes(graph.graph)
        found = {node: _head_of(graph, node) for node in graph.graph.nodes if node in draft}
        heads = {node: head for node, head in found.items() if head is not None}
        for chooser, head in heads.items():
            self._trim(graph, chooser, head)
        sweep(graph)
        return len(heads)

    def _trim(self, graph: StepGraph, chooser: fx.Node, head: Head) -> None:
        """Let a choice see the listed tokens alone.

        An argmax is of the logits of these rows, and then mapped. A sampled choice keeps logits of
        the whole vocabulary, because masks, counts and noise are by token: the others get -inf.
        """
        recipe_runs = runs(self.token_ids)
        with graph.graph.inserting_before(chooser):
            rows = [
                emit_weight(
                    graph,
                    f"trimmed.{str(weight.target).replace('.', '_')}",
                    Rows(recipe_runs, str(weight.target)),
                    weight,
                )
                for weight in head.weights
            ]
            logits = emit(graph.graph, aten.linear.default, (head.x, *rows), head.node)
            if is_call(chooser, torch.ops.mtpc.sample.default):
                logits = self._whole(graph, logits, head.node)
                chooser.update_arg(0, self._selected(graph, logits, head, chooser))
                return
            logits = self._selected(graph, logits, head, chooser)
            index = emit(graph.graph, aten.argmax.default, (logits, -1), chooser)
            chosen = self._token_ids_of(graph, index)
        chooser.replace_all_uses_with(chosen)

    def _selected(self, graph: StepGraph, logits: fx.Node, head: Head, chooser: fx.Node) -> fx.Node:
        if not head.selected:
            return logits
        return emit(graph.graph, aten.select.int, (logits, *head.selected), chooser)

    def _token_ids_of(self, graph: StepGraph, index: fx.Node) -> fx.Node:
        """Append nodes that map rows of the trimmed head to token ids."""
        if self.token_ids == tuple(range(len(self.token_ids))):
            return index
        ids = self._ids(graph, index)
        return emit(graph.graph, aten.index_select.default, (ids, 0, index), index)

    def _ids(self, graph: StepGraph, like: fx.Node) -> fx.Node:
        """The listed tokens, ascending, int64 [V_d]."""
        constant = torch.tensor(self.token_ids, device=like.meta["val"].device)
        name = graph.weights.add_constant(constant)
        return emit_attribute(graph, name, graph.weights[name], like)

    def _whole(self, graph: StepGraph, logits: fx.Node, head: fx.Node) -> fx.Node:
        """Logits of the listed tokens [N, V_d] -> of all [N, V]."""
        shape, ids = list(head.meta["val"].shape), self._ids(graph, logits)
        whole = emit(graph.graph, aten.new_full.default, (logits, shape, float("-inf")), head)
        return emit(graph.graph, aten.index_copy.default, (whole, 1, ids, logits), head)


@dataclass(frozen=True)
class Head:
    """The linear head whose logits a draft is chosen from: its call, what it multiplies, and its
    weight with its bias, if any. A `select` of its result has the arguments `selected`, (0, 0)."""

    node: fx.Node
    x: fx.Node
    weights: tuple[fx.Node, ...]
    selected: tuple[Any, ...]


def runs(token_ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending ids as maximal runs [start, stop)."""
    starts = [i for n, i in enumerate(token_ids) if n == 0 or token_ids[n - 1] != i - 1]
    stops = [i + 1 for n, i in enumerate(token_ids) if token_ids[n + 1 : n + 2] != (i + 1,)]
    return tuple(zip(starts, stops, strict=True))


def _head_of(graph: StepGraph, node: fx.Node) -> Head | None:
    """The head of a choice over the unchanged logits of all tokens; None of another node."""
    logits, dim = operands(node, aten.argmax.default, 2)
    if is_call(node, torch.ops.mtpc.sample.default):
        logits, dim = node.args[0], -1
    if dim != -1:
        return None
    whole, *selected = operands(logits, aten.select.int, 3)
    if selected != [0, 0]:
        whole, selected = logits, []
    x, *weights = operands(whole, aten.linear.default, 3)
    given = tuple(weight for weight in weights if weight is not None)
    if x is None or any(weight_of(graph, weight) is None for weight in given):
        return None
    return Head(whole, x, given, tuple(selected))

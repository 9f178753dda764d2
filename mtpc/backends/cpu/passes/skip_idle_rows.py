"""skip-idle-rows: kernels work on the rows in use, not on all rows of the bucket."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from mtpc.capture.effects import eliminate_dead_nodes
from mtpc.capture.graph import StepGraph, arguments, first_argument
from mtpc.layout import LOGITS_STARTS, StepKey
from mtpc.ops.traits import counts_rows, is_view, traits_of
from mtpc.passes.base import GETITEM, Pass, aten, emit, is_call
from mtpc.plan import SKIP_IDLE_ROWS

_PUBLISHED = ("batch.positions", "batch.seq_lens", "batch.query_start_loc")
"""Metadata buffers of a forward, in the order in which the step writes them."""


@dataclass(frozen=True)
class SkipIdleRows(Pass, policy="backend", name=SKIP_IDLE_ROWS):
    """Pass the number of leading rows in use to the kernels that can leave out the others.

    A decode step is compiled for all rows of its bucket, and a prefill step for a whole chunk. So a
    batch of five in a bucket of eight, or a prompt of eight tokens in a chunk of 64, would pay for
    rows that nothing reads. The metadata that each forward of the step writes gives the number of
    rows up to the last one in use. A kernel's result for a row does not depend on the number of
    rows, so rows in use do not change. Idle rows of a result are undefined; the pass clears them
    where any other operator reads them. On by default on backends with such kernels (cpu).
    """

    def apply(self, graph: StepGraph) -> int:
        counts = _Counts(graph.graph, graph.key)
        counted: list[fx.Node] = []
        for node in list(graph.graph.nodes):
            counts.follow(node)
            rows = counts.of(node) if counts_rows(node.target) else None
            if rows is not None:
                node.kwargs = {**node.kwargs, "rows": rows}
                counted.append(node)
        for node in counted:
            _clear_if_read(graph.graph, node)
        if not counted:
            eliminate_dead_nodes(graph.graph)  # The counts, which nothing reads.
        return len(counted)


def _clear_if_read(graph: fx.Graph, node: fx.Node) -> None:
    """Clear the idle rows of each result that is also read by operators without the row count."""
    single = isinstance(node.meta["val"], Tensor)
    rows, x = node.kwargs["rows"], first_argument(node)
    lead = traits_of(node.target).row_dims(x.meta["val"])
    for result in [node] if single else list(node.users):
        if _is_read(result, rows):
            features = result.meta["val"].dim() - lead
            with graph.inserting_before(result.next):
                args = (result, rows, features)
                emit(graph, torch.ops.mtpc.clear_idle_rows.default, args, node)


def _is_read(node: fx.Node, rows: Any) -> bool:
    """Whether an operator that lacks the count `rows` reads the idle rows of a node."""
    for user in node.users:
        if user.target is GETITEM or is_view(user.target):
            if _is_read(user, rows):
                return True
        elif not traits_of(user.target).skips_idle and user.kwargs.get("rows") is not rows:
            return True
    return False


@dataclass
class _Counts:
    """Nodes that count the rows in use of the forward whose metadata was written last.

    A count is a pair: the number of rows of the bucket, and a node int [1] with those in use.

    Attributes:
        graph: the graph that is walked in order.
        key: key of its step.
        published: buffer of `_PUBLISHED` -> the value last written to it.
        requests: count of requests.
        tokens: count of flat tokens.
        logits: count of a ragged step's rows of logits, until these are accepted.
        selected: node of features of selected rows -> True if these are the rows of logits, False
            if they are one row per request.
    """

    graph: fx.Graph
    key: StepKey
    published: dict[str, fx.Node] = field(default_factory=dict)
    requests: tuple[int, fx.Node] | None = None
    tokens: tuple[int, fx.Node] | None = None
    logits: tuple[int, fx.Node] | None = None
    selected: dict[fx.Node, bool] = field(default_factory=dict)

    def follow(self, node: fx.Node) -> None:
        """Visit a node. After a write of metadata, emit the counts."""
        if is_call(node, aten.copy_.default):
            into, value, _ = arguments(node).values()
            if is_call(into, aten.slice.Tensor):
                into = first_argument(into)
            name = str(into.target)
            if name in _PUBLISHED and isinstance(value, fx.Node):
                self.published[name] = value
            if name == _PUBLISHED[-1] and len(self.published) == len(_PUBLISHED):
                self._count(node)
            # With one row of logits per request, the count of requests serves.
            is_ragged = name == LOGITS_STARTS and self.key.max_emitted != 1
            if is_ragged and isinstance(value, fx.Node):
                with self.graph.inserting_before(node.next):  # The largest of their starts.
                    count = emit(self.graph, aten.amax.default, (value, [0], True), node)
                self.logits = (self.key.num_logits, count)
        elif is_call(node, torch.ops.mtpc.accept.default):
            self.logits = None  # From here on rows are selected for each request alone.
        elif _has_features(node):
            inputs = [one for one in node.all_input_nodes if one in self.selected]
            if is_call(node, aten.index_select.default):
                rows = arguments(node)["index"].meta["val"].shape[0]
                self.selected[node] = self.logits is not None and rows == self.logits[0]
            elif inputs:
                self.selected[node] = self.selected[inputs[0]]

    def of(self, node: fx.Node) -> fx.Node | None:
        """The node that counts an operator's rows; None if no count fits, or there is one row only.

        Sizes alone do not decide: [1, 16, H] may be 16 tokens, or 16 parts of the row of a single
        request. Rows of requests and of logits are selected by `index_select` only, so `follow`
        marks what depends on such a selection.
        """
        counted = self.tokens
        if node in self.selected:
            counted = self.logits if self.selected[node] else self.requests
        x = first_argument(node).meta["val"]
        lead = [size for size in x.shape[: traits_of(node.target).row_dims(x)] if size != 1]
        return counted[1] if counted is not None and lead == [counted[0]] else None

    def _count(self, node: fx.Node) -> None:
        """Emit, after a node, the counts of requests up to the last active one and their tokens."""
        positions, lens, starts = (self.published[name] for name in _PUBLISHED)
        num_reqs, device = lens.meta["val"].shape[0], lens.meta["val"].device
        ordinals = (1, num_reqs + 1)
        with self.graph.inserting_before(node.next):
            ordinal = emit(
                self.graph, aten.arange.start, ordinals, node, dtype=torch.int32, device=device
            )
            is_on = emit(self.graph, aten.gt.Scalar, (lens, 0), node)
            marked = emit(self.graph, aten.mul.Tensor, (ordinal, is_on), node)
            requests = emit(self.graph, aten.amax.default, (marked, [0], True), node)
            tokens = emit(self.graph, aten.index_select.default, (starts, 0, requests), node)
        self.requests = (num_reqs, requests)
        self.tokens = (positions.meta["val"].shape[0], tokens)


def _has_features(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in values)

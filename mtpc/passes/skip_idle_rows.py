"""skip-idle-rows: work on the rows that a step has, not on those that its bucket could have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from mtpc.capture.graph import StepGraph
from mtpc.layout import StepKey
from mtpc.ops import references
from mtpc.ops.signatures import may_omit
from mtpc.passes.base import GETITEM, emit, is_call

aten = torch.ops.aten

_PUBLISHED = ("batch.positions", "batch.seq_lens", "batch.query_start_loc")
"""Of a forward's metadata, in the order in which the step writes it."""
_LOGITS = "batch.logits_start_loc"
"""Of a prefill step's rows of logits, [R+1]: how many there are up to each request."""
_OF_HEADS = (
    torch.ops.mtpc.packed_head_linear.default,
    torch.ops.mtpc.rotate.default,
    torch.ops.mtpc.rotate_and_write.default,
)
"""Operators whose first argument has a dimension of heads behind its rows."""
_SKIPPING: dict[Any, int] = {
    operator: 2 if operator in _OF_HEADS else 1
    for operator in references().values()
    if may_omit(operator, "rows")
}
"""Operators that may be told their `rows`, and how many last dimensions of the first argument are
not rows."""


_BY_REQUEST = (
    torch.ops.mtpc.write_cache.default,
    torch.ops.mtpc.paged_attention.default,
    torch.ops.mtpc.latent_attention.default,
    torch.ops.mtpc.gated_delta_rule.default,
    torch.ops.mtpc.choose_slots.default,
)
"""Operators that read no row but those of requests that are on."""
_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.transpose.int,
    aten.unsqueeze.default,
    GETITEM,
)


@dataclass(frozen=True)
class SkipIdleRows:
    """Tell the kernels between attention's how many leading rows are in use.

    A step is compiled for a bucket's rows, a prefill for a whole chunk. A batch of five in a
    bucket of eight, or a prompt of eight tokens in a chunk of 64, would pay for all of them: where
    rows are many the processor is the limit, and the time is theirs. How many rows come before the
    last one in use follows from the metadata that each forward of the step publishes; a kernel's
    result for a row does not depend on how many there are, so no row in use changes. Idle rows of
    a result hold anything; they are cleared where any other operator reads them. On by default
    where the backend has kernels that leave rows out (cpu).
    """

    name: ClassVar[str] = "skip-idle-rows"

    def apply(self, graph: StepGraph) -> int:
        counts = _Counts(graph.graph, graph.key)
        told: list[fx.Node] = []
        for node in list(graph.graph.nodes):
            counts.follow(node)
            rows = counts.of(node) if is_call(node, *_SKIPPING) else None
            if rows is not None:
                node.kwargs = {**node.kwargs, "rows": rows}
                told.append(node)
        for node in told:
            _clear_what_is_seen(graph.graph, node)
        return len(told)


def _clear_what_is_seen(graph: fx.Graph, node: fx.Node) -> None:
    """Clear the idle rows of each result that operators read which were not told of them."""
    single = isinstance(node.meta["val"], Tensor)
    rows, x = node.kwargs["rows"], node.args[0]
    lead = x.meta["val"].dim() - _SKIPPING[node.target]  # type: ignore[union-attr]
    for result in [node] if single else list(node.users):
        if _is_seen(result, rows):
            features = result.meta["val"].dim() - lead
            with graph.inserting_before(result.next):
                args = (result, rows, features)
                emit(graph, torch.ops.mtpc.clear_idle_rows.default, args, node)


def _is_seen(node: fx.Node, rows: Any) -> bool:
    """Whether idle rows, of which `rows` tells, are read as they are."""
    for user in node.users:
        if is_call(user, *_VIEWS):
            if _is_seen(user, rows):
                return True
        elif not is_call(user, *_BY_REQUEST) and user.kwargs.get("rows") is not rows:
            return True
    return False


@dataclass
class _Counts:
    """How many rows are in use, of the forward that was published last.

    Attributes:
        graph: walked in order.
        key: of its step.
        published: the last value that was written to each of `_PUBLISHED`.
        requests: node int [1], and the size that it is a part of.
        tokens: the same of flat tokens.
        logits: the same of a prefill step's rows of logits.
        selected: features of selected rows: whether these are the rows of logits, not one a
            request.
    """

    graph: fx.Graph
    key: StepKey
    published: dict[str, fx.Node] = field(default_factory=dict)
    requests: tuple[int, fx.Node] | None = None
    tokens: tuple[int, fx.Node] | None = None
    logits: tuple[int, fx.Node] | None = None
    selected: dict[fx.Node, bool] = field(default_factory=dict)

    def follow(self, node: fx.Node) -> None:
        """Look at a node; where metadata has been published, count its rows."""
        if is_call(node, aten.copy_.default):
            into, value = node.args[:2]
            if is_call(into, aten.slice.Tensor):
                into = into.args[0]  # type: ignore[union-attr]
            name = str(into.target)  # type: ignore[union-attr]
            if name in _PUBLISHED and isinstance(value, fx.Node):
                self.published[name] = value
            if name == _PUBLISHED[-1] and len(self.published) == len(_PUBLISHED):
                self._count(node)
            if name == _LOGITS and isinstance(value, fx.Node):
                self._count_logits(node, value)
        elif _has_features(node):
            self._follow_selection(node)

    def _follow_selection(self, node: fx.Node) -> None:
        inputs = [one for one in node.all_input_nodes if one in self.selected]
        if is_call(node, aten.index_select.default):
            rows = node.args[2].meta["val"].shape[0]  # type: ignore[union-attr]
            self.selected[node] = self.logits is not None and rows == self.logits[0]
        elif inputs:
            self.selected[node] = self.selected[inputs[0]]

    def of(self, node: fx.Node) -> fx.Node | None:
        """The count for an operator's rows; None if they are of another kind, or one.

        Sizes alone do not tell: [1, 16, H] are 16 tokens, or 16 parts of the one request's row. The
        step, and what select-head-rows makes of it, selects rows by `index_select` alone.
        """
        counted = self.tokens
        if node in self.selected:
            counted = self.logits if self.selected[node] else self.requests
        x: Any = node.args[0]
        shape = x.meta["val"].shape[: -_SKIPPING[node.target]]
        lead = [size for size in shape if size != 1]
        return counted[1] if counted is not None and lead == [counted[0]] else None

    def _count(self, node: fx.Node) -> None:
        """Count behind a node: requests up to the last one that is on, and its last token."""
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

    def _count_logits(self, node: fx.Node, starts: fx.Node) -> None:
        """The last of ascending starts; with one row a request their count will do."""
        if self.key.max_emitted == 1:
            return
        with self.graph.inserting_before(node.next):
            count = emit(self.graph, aten.amax.default, (starts, [0], True), node)
        self.logits = (self.key.num_logits, count)


def _has_features(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in values)

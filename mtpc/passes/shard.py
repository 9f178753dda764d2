"""shard: a step for one of several ranks, each of which holds a part of the weights and caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from mtpc.capture.graph import StepGraph, arguments, set_tensor
from mtpc.capture.inline import fake_call, fake_mode_of
from mtpc.errors import GraphError, UnsupportedModelError
from mtpc.ops.attention import HEADS
from mtpc.ops.traits import SUM, Cut, traits_of
from mtpc.passes.base import GETITEM, Pass, emit, emit_named, emit_weight, is_call, tidy
from mtpc.passes.held import Call, NeedsWholeError, Shape, follow
from mtpc.passes.trim_draft_head import runs
from mtpc.weights.recipes import Rows

aten, ours = torch.ops.aten, torch.ops.mtpc


@dataclass(frozen=True)
class CutWeight:
    """What this rank holds of a weight.

    Attributes:
        dim: the dimension that is cut.
        runs: this rank's part of the dimension.
        step: of weights cut by the vocabulary: rows of each rank but the last ones; else 0.
        is_gathered: whether the plan gathers the result of the linear.
    """

    dim: int
    runs: tuple[tuple[int, int], ...]
    step: int = 0
    is_gathered: bool = False


@dataclass(frozen=True)
class Sharding:
    """One rank's part of a model, whose weights and caches are cut, by name.

    `peer_bytes` is the largest part that ranks exchange through each other's memory; 0: none.
    """

    rank: int
    ranks: int
    group: str
    weights: Mapping[str, CutWeight]
    caches: Mapping[str, Tensor] = field(repr=False)
    peer_bytes: int = 0


@dataclass(frozen=True)
class ShardStep(Pass, policy="required", name="shard"):
    """Cut the weights and caches of a flat step, and add the operators by which ranks exchange
    values. Without a `sharding`, the step stays whole.

    The pass derives what a rank holds of each value, from the weights through the step. A linear on
    cut input features gives summands, so `mtpc::all_reduce` comes after it, and after experts. If a
    plan gathers a result, the result stays cut until an operator needs the whole; of logits, ranks
    exchange only the largest. Every choice of a token comes from one collective, so ranks cannot
    diverge. The pass refuses a call that would compute something else on a part.
    """

    sharding: Sharding | None = None

    def apply(self, graph: StepGraph) -> int:
        if self.sharding is None:
            return 0
        return tidy(graph, _Cutter(graph, self.sharding).run())


class _Cutter:
    """Goes through a step once, in order of execution.

    Attributes:
        whole: whole shapes of values; that of the first value where a call has several.
        held: the cut dimension of each value of which this rank has a part.
        gathered: those of them that may be gathered.
        steps: `CutWeight.step` of weights and logits that are cut by the vocabulary.
    """

    def __init__(self, graph: StepGraph, sharding: Sharding):
        self.graph, self.fx, self.sharding = graph, graph.graph, sharding
        self.mode = fake_mode_of(self.fx)
        self.whole: dict[fx.Node, Shape] = {
            node: shape for node in self.fx.nodes if (shape := _shape(node)) is not None
        }
        self.held: dict[fx.Node, int] = {}
        self.gathered: set[fx.Node] = set()
        self.steps: dict[fx.Node, int] = {}
        self.rewrites = 0

    def run(self) -> int:
        """Cut all; returns the number of rewrites."""
        for node in list(self.fx.nodes):
            if node.op == "get_attr":
                self._cut_attribute(node, str(node.target))
            elif node.op == "call_function" and node in self.whole:
                self._cut_call(node)
            elif not self.held.keys().isdisjoint(node.all_input_nodes):  # It writes only.
                self._write(node)
        return self.rewrites

    def _cut_attribute(self, node: fx.Node, name: str) -> None:
        caches = self.sharding.caches
        if name in caches:
            set_tensor(self.graph.module, name, caches[name])
            node.meta["val"] = self.mode.from_tensor(caches[name], static_shapes=True)
            self.held[node] = HEADS
            return
        source, cut = self._cut_of(name)
        if cut is not None:
            with self.fx.inserting_after(node):
                # The name of a derived weight has one dot.
                own, inputs = f"shard.{name.replace('.', '_')}", len(self.whole[node]) - 1
                recipe = Rows(cut.runs, source, -1 if cut.dim == inputs > 0 else cut.dim)
                part = emit_weight(self.graph, own, recipe, node)
                self.graph.weights.wholes[own] = name
            self._replace(node, part, cut.dim)
            self.steps[part] = cut.step
            self.gathered |= {part} if cut.is_gathered or cut.step else set()

    def _cut_of(self, name: str) -> tuple[str, CutWeight | None]:
        """What this rank holds of a weight, as a part of which weight; None: all of it.

        Chosen rows of a weight that is cut by the vocabulary are dealt out evenly, because they are
        seldom spread over it evenly. They stay whole if a rank would have none of them.
        """
        weights, recipe = self.sharding.weights, self.graph.weights.recipes.get(name)
        if not isinstance(recipe, Rows) or recipe.part not in weights:
            return name, weights.get(name)
        source, cut = str(recipe.part), weights[str(recipe.part)]
        ids = tuple(row for start, stop in recipe.runs for row in range(start, stop))
        step = -(-len(ids) // self.sharding.ranks)
        if not cut.step or step * (self.sharding.ranks - 1) >= len(ids):
            return name, None
        own = runs(ids[self.sharding.rank * step :][:step])
        return source, CutWeight(cut.dim, own, step, cut.is_gathered)

    def _replace(self, old: fx.Node, new: fx.Node, dim: int | None = None) -> None:
        """Replace a value by one of the same whole shape; `dim` is cut, None if nothing is."""
        old.replace_all_uses_with(new, lambda user: user is not new)
        self.whole[new] = self.whole[old]
        if dim is not None:
            self.held[new] = dim
        self.rewrites += 1

    def _cut_call(self, node: fx.Node) -> None:
        cut = [n for n in node.all_input_nodes if n in self.held]
        if cut:
            try:
                is_operator = isinstance(node.target, OpOverload)
                if not (is_operator and self._share(node, arguments(node))):
                    self.held[node] = follow(Call(node, self.whole, self.held, self.sharding.ranks))
                    if self.gathered.issuperset(cut):
                        self.gathered.add(node)
                        self.steps[node] = max(self.steps.get(source, 0) for source in cut)
                    self._compute(node)
            except NeedsWholeError:
                self._make_whole(node, cut)
        elif traits_of(node.target).chooses:
            self._agree(node)

    def _share(self, node: fx.Node, given: dict[str, Any]) -> bool:
        """Compute a call on parts in a way of its own; returns whether it has one. Raises
        NeedsWholeError: it has, but not for these parts."""
        if is_call(node, aten.linear.default):
            return self._linear(node, given)
        if is_call(node, aten.embedding.default):
            return self._embed(node, given)
        traits = traits_of(node.target)
        if traits.chooses:
            return self._choose(node, given)
        return bool(traits.cuts) and self._by_cut(node, given, traits.cuts)

    def _by_cut(self, node: fx.Node, given: dict[str, Any], cuts: tuple[Cut, ...]) -> bool:
        """Compute a call in a way that its operator declares."""
        held = {name: self.held[value] for name, value in given.items() if value in self.held}
        for cut in cuts:
            wanted = {n: dim for n, dim in cut.arguments.items() if given.get(n) is not None}
            if held != wanted:
                continue
            if cut.result == SUM:
                with self.fx.inserting_before(node):
                    total = self._reduce(emit_named(self.fx, node.target, given, node), node)
                self._replace(node, total)
            elif cut.result is not None:
                self.held[node] = cut.result
                self._compute(node)
            return True
        raise NeedsWholeError

    def _compute(self, node: fx.Node) -> None:
        """Compute a call on parts; check that its value is the part that the rules predict."""
        node.meta |= fake_call(self.mode, node.target, node.args, node.kwargs)
        whole, part = self.whole[node], _shape(node) or ()
        dim, ranks = self.held[node], self.sharding.ranks
        others = [(a, b) for i, (a, b) in enumerate(zip(whole, part, strict=True)) if i != dim]
        is_part = part[dim] * ranks == whole[dim] or self.steps.get(node, 0)
        if not is_part or any(a != b for a, b in others):
            raise GraphError(f"{node} is {[*part]} on a rank, a part of {[*whole]} along {dim}")

    def _make_whole(self, node: fx.Node, cut: list[fx.Node]) -> None:
        """Gather the inputs that a call needs whole, if the plan gathers them."""
        for source in cut:
            if source not in self.gathered or source.op == "get_attr":
                raise self._refusal(node, source)
        for source in cut:
            with self.fx.inserting_before(node):
                dim = self.held[source]
                args = (source, dim, self.whole[source][dim], self.sharding.group)
                whole = emit(self.fx, ours.all_gather.default, args, node)
            self.whole[whole] = self.whole[source]
            node.replace_input_with(source, whole)
            self.rewrites += 1
        if traits_of(node.target).chooses:
            self._agree(node)

    def _refusal(self, node: fx.Node, source: fx.Node) -> UnsupportedModelError:
        dim, shape = self.held[source], [*self.whole[source]]
        return UnsupportedModelError(
            f"tensor_parallel_size is {self.sharding.ranks}: {node.target} ({node}, of "
            f"{node.meta.get('piece', 'the step')}) reads dimension {dim} of {shape} of {source}, "
            "of which each rank has a part under the model's base_model_tp_plan; mtpc cannot run "
            "it on a part: use tensor_parallel_size=1"
        )

    def _write(self, node: fx.Node) -> None:
        """A call without a result may write a part where its operator declares it."""
        try:
            is_shared = self._share(node, arguments(node))
        except NeedsWholeError:
            is_shared = False
        if not is_shared:
            self._make_whole(node, [n for n in node.all_input_nodes if n in self.held])

    def _reduce(self, summand: fx.Node, node: fx.Node) -> fx.Node:
        args = (summand, self.sharding.group)
        return emit(self.fx, ours.all_reduce.default, args, node)

    def _linear(self, node: fx.Node, given: dict[str, Any]) -> bool:
        """A product by a weight that is cut along its outputs or its inputs."""
        x, weight, bias = given["input"], given["weight"], given["bias"]
        last = len(self.whole[x]) - 1
        if weight not in self.held:
            raise NeedsWholeError
        if self.held[weight] == 0:
            if x in self.held or (bias is not None and self.held.get(bias) != 0):
                raise NeedsWholeError
            self.held[node], self.steps[node] = len(self.whole[node]) - 1, self.steps[weight]
            self.gathered |= {node} if weight in self.gathered else set()
            self._compute(node)
            return True
        if self.held.get(x, last) != last:
            raise NeedsWholeError
        with self.fx.inserting_before(node):
            if x not in self.held:
                args = (x, last, self.sharding.ranks, self.sharding.group)
                x = emit(self.fx, ours.rank_part.default, args, node)
            total = self._reduce(emit(self.fx, aten.linear.default, (x, weight), node), node)
            if bias is not None:  # Once, to the sum.
                total = emit(self.fx, aten.add.Tensor, (total, bias), node)
        self._replace(node, total)
        return True

    def _embed(self, node: fx.Node, given: dict[str, Any]) -> bool:
        """Rows of a table that is cut by its rows."""
        weight, ids = given["weight"], given["indices"]
        if ids in self.held or not self.steps.get(weight):
            return False
        with self.fx.inserting_before(node):
            args = (weight, ids, self.steps[weight], self.sharding.group)
            found = emit(self.fx, ours.vocab_embedding.default, args, node)
        self._replace(node, found)
        return True

    def _choose(self, node: fx.Node, given: dict[str, Any]) -> bool:
        """The largest of logits that are cut by the vocabulary."""
        logits, step = node.all_input_nodes[0], 0
        last, dim = len(self.whole[logits]) - 1, given.get("dim")
        if logits in self.held and self.held[logits] == last and not given.get("keepdim"):
            step = self.steps.get(logits, 0)
        if not step or dim not in (-1, last):
            raise NeedsWholeError
        with self.fx.inserting_before(node):
            args = (logits, step, self.sharding.group)
            found = emit(self.fx, ours.vocab_max.default, args, node)
            if node.target is aten.argmax.default:
                found = emit(self.fx, GETITEM, (found, 1), node)
        self._replace(node, found)
        return True

    def _agree(self, node: fx.Node) -> None:
        """All ranks take the first rank's choice, where each makes it from whole logits."""
        chosen = [node]
        if node.target is aten.max.dim:
            chosen = [user for user in node.users if user.args[1] == 1]
        for choice in chosen:
            with self.fx.inserting_after(choice):
                args = (choice, self.sharding.group)
                told = emit(self.fx, ours.first_rank.default, args, choice)
            self._replace(choice, told)


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    """Shape of a value, or of the first of several; None if a call has no result."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return tuple(first.shape) if isinstance(first, Tensor) else None

"""fuse-linear-chains: what is between two attentions becomes one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

import mtpc.ops.chain  # noqa: F401  (registers the op that this pass calls)
from mtpc.capture.graph import StepGraph
from mtpc.ops.chain import BIASED, GATED, LINEAR, NORM, NORM_PLUS_ONE
from mtpc.passes.base import GETITEM, emit, is_call, refresh_values, sweep
from mtpc.weights.packing import TILE

_CHAIN = torch.ops.mtpc.linear_chain.default
_LINEAR = torch.ops.mtpc.packed_linear.default
_GATED = torch.ops.mtpc.packed_gated_linear.default
_NORM = torch.ops.mtpc.add_rms_norm.default


@dataclass(frozen=True)
class FuseLinearChains:
    """Exchange packed linear layers, and norms with a residual sum, in a row for
    `mtpc::linear_chain`.

    From one attention to the next a dense layer is a path of them: the output projection, a norm,
    SwiGLU, the down projection, the next layer's norm and its joint projection. With few rows a
    good part of its time goes by between operators, whose host code has left the caches by then;
    a chain is one call, threads stay in it, and who waits at the end of a stage fetches the next
    one's weights. A chain has one norm at least, two stages, and one epsilon; what it gives on the
    way nobody else reads. On by default where the backend has such a kernel (cpu).
    """

    name: ClassVar[str] = "fuse-linear-chains"

    def apply(self, graph: StepGraph) -> int:
        rewrites = 0
        done: set[fx.Node] = set()
        for node in list(graph.graph.nodes):
            stage = _stage_of(node)
            if stage is None or node in done:
                continue
            chain = _grow(stage)
            done.update(stage.node for stage in chain.stages)
            if len(chain.stages) > 1 and chain.residual is not None:
                _replace(graph.graph, chain)
                rewrites += 1
        if rewrites:
            sweep(graph)
            refresh_values(graph)
        return rewrites


@dataclass(frozen=True)
class _Stage:
    """A node that may be one, taken apart.

    Attributes:
        node: the call.
        kind: its letter.
        inputs: what it reads of the stage before it: either of them, of a norm.
        operands: its weight, and its bias.
        epsilon: a norm's.
        out: what the next stage reads.
        total: a norm's residual sum, if anybody reads it.
    """

    node: fx.Node
    kind: str
    inputs: tuple[Any, ...]
    operands: tuple[fx.Node, ...]
    epsilon: float | None
    out: fx.Node
    total: fx.Node | None


@dataclass
class _Chain:
    """Stages that follow each other.

    Attributes:
        stages: at least one.
        x: what the first reads.
        residual: what the first norm adds to; None if there is none.
        epsilon: of the norms.
        total: the last norm's residual sum, if anybody reads it.
    """

    stages: list[_Stage]
    x: fx.Node
    residual: fx.Node | None = None
    epsilon: float | None = None
    total: fx.Node | None = None

    def add(self, stage: _Stage) -> None:
        self.stages.append(stage)
        if stage.epsilon is not None:
            self.epsilon, self.total = stage.epsilon, stage.total


def _stage_of(node: fx.Node) -> _Stage | None:
    """What a call is as a stage; none where it has arguments that stages have not."""
    args: Any = node.args
    if node.kwargs:
        return None
    if is_call(node, _NORM):
        (x, added, weight, epsilon), rest = args[:4], args[4:]
        if len(rest) > 1:
            return None
        results = {user.args[1]: user for user in node.users if is_call(user, GETITEM)}
        kind = NORM_PLUS_ONE if rest and rest[0] else NORM
        out = results.get(1)
        if out is None:
            return None
        return _Stage(node, kind, (x, added), (weight,), epsilon, out, results.get(0))
    if not is_call(node, _LINEAR, _GATED):
        return None
    x, weight, features, *rest = args
    bias = [operand for operand in rest if operand is not None]
    if len(bias) > is_call(node, _LINEAR):
        return None
    if features % TILE or weight.meta["val"].shape[0] * TILE != features:
        return None
    kind = GATED if is_call(node, _GATED) else BIASED if bias else LINEAR
    return _Stage(node, kind, (x,), (weight, *bias), None, node, None)


def _grow(first: _Stage) -> _Chain:
    """The longest chain that begins with a stage."""
    chain = _Chain([first], first.inputs[-1])
    if first.epsilon is not None:
        chain.residual, chain.epsilon, chain.total = first.inputs[0], first.epsilon, first.total
    while (following := _following(chain)) is not None:
        if following.epsilon is not None and chain.residual is None:
            chain.residual = _other_input(chain, following)
        chain.add(following)
    return chain


def _following(chain: _Chain) -> _Stage | None:
    """The stage that alone reads what the last one gives, if the chain can have it."""
    last = chain.stages[-1]
    if len(last.out.users) != 1:
        return None
    (user,) = last.out.users
    stage = _stage_of(user)
    if stage is None or stage.inputs.count(last.out) != 1 or not _alike(last.node, stage.node):
        return None
    if _writes_between(last.node, stage.node):
        return None
    if stage.epsilon is None:
        return stage if _is_read_later(chain.total, stage.node) else None
    if chain.epsilon is None:
        return stage
    other, users = _other_input(chain, stage), list(chain.total.users) if chain.total else []
    is_next = other is chain.total and users == [stage.node]
    return stage if is_next and stage.epsilon == chain.epsilon else None


def _other_input(chain: _Chain, norm: _Stage) -> fx.Node:
    """What a norm adds to what the chain gives."""
    left, right = norm.inputs
    return right if left is chain.stages[-1].out else left


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two calls are of pieces of one name."""
    return bool(one.meta.get("piece") == other.meta.get("piece"))


def _writes_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether anything is written between two calls: a chain reads everything where its last stage
    is, and a write of metadata is where another forward begins."""
    node = first.next
    while node is not last:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return True
        node = node.next
    return False


def _is_read_later(total: fx.Node | None, node: fx.Node) -> bool:
    """Whether all that reads a sum comes behind a node, where the chain will give it."""
    return total is None or all(node < user for user in total.users)


def _replace(graph: fx.Graph, chain: _Chain) -> None:
    """Put the operator where the last stage is."""
    last = chain.stages[-1]
    kinds = "".join(stage.kind for stage in chain.stages)
    operands = [operand for stage in chain.stages for operand in stage.operands]
    with graph.inserting_before(last.node):
        args = (chain.x, chain.residual, kinds, operands, chain.epsilon)
        both = emit(graph, _CHAIN, args, last.node)
        total, out = (emit(graph, GETITEM, (both, i), last.node) for i in (0, 1))
    last.out.replace_all_uses_with(out)
    if chain.total is not None:
        chain.total.replace_all_uses_with(total)

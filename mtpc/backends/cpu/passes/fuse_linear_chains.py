"""fuse-linear-chains: the linears and norms between two attentions as one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtpc.backends.cpu.ops.chain import BIASED, GATED, GROUPED, LINEAR, NORM, NORM_PLUS_ONE, ZEROS
from mtpc.capture.graph import StepGraph
from mtpc.passes.base import GETITEM, Pass, emit, is_call, is_narrow, operands, tidy
from mtpc.weights.packing import TILE

_CHAIN = torch.ops.mtpc.linear_chain.default
_LINEAR = torch.ops.mtpc.packed_linear.default
_GATED = torch.ops.mtpc.packed_gated_linear.default
_GROUPED = torch.ops.mtpc.grouped_linear.default
_GROUPED_GATED = torch.ops.mtpc.grouped_gated_linear.default
_NORM = torch.ops.mtpc.add_rms_norm.default


@dataclass(frozen=True)
class FuseLinearChains(Pass, policy="backend"):
    """Replace a sequence of linears and norms with a residual sum by `mtpc::linear_chain`.

    Linears are those on packed weights, of bfloat16 or of grouped codes.

    Between two attentions, a dense layer is such a sequence: the output projection, a norm, SwiGLU,
    the down projection, the next layer's norm and its joint projection. With few rows, much of the
    time passes between operators, because their host code is no longer in the processor's caches.
    A chain is one call. Its threads stay in it, and a thread that waits at the end of a stage
    prefetches weights of the next one.

    A chain has at least two stages, at least one of them a norm, and one epsilon. Nothing else may
    read a result between two stages. On by default on backends with such a kernel (cpu).
    """

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
        return tidy(graph, rewrites)


@dataclass(frozen=True)
class _Stage:
    """A call that may be a stage of a chain, and its parts.

    Attributes:
        node: the call.
        kind: its letter in `mtpc.backends.cpu.ops.chain`, and `ZEROS` after it if it has them.
        inputs: the input of a linear, or the two terms of a norm's sum. One of them is the result
            of the stage before.
        operands: its weight, the scales and zeros of a grouped one, and its bias if it has one.
        epsilon: of a norm; None for a linear.
        out: the result that the next stage reads.
        total: a norm's residual sum; None if nothing reads it.
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
    """A sequence of stages, at least one, and the input of the first.

    The first norm adds `residual` to its input. All norms have one epsilon; both are None without a
    norm. `total` is the residual sum of the last norm; None if nothing reads it.
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
    """The call as a stage, or None if it is of another kind or has arguments that stages lack."""
    if is_call(node, _NORM):
        x, added, weight, epsilon, plus_one = operands(node, _NORM, 5)
        results = {user.args[1]: user for user in node.users if is_call(user, GETITEM)}
        if x is None or 1 not in results:
            return None
        kind = NORM_PLUS_ONE if plus_one else NORM
        return _Stage(node, kind, (x, added), (weight,), epsilon, results[1], results.get(0))
    if is_call(node, _GROUPED, _GROUPED_GATED):
        count = 6 if is_call(node, _GROUPED) else 5
        x, codes, scales, zeros, features, *bias = operands(node, node.target, count)
        if x is None or not is_narrow(x) or not _fills_tiles(codes, features):
            return None
        biases = [operand for operand in bias if operand is not None]
        kind = GROUPED[GATED if count == 5 else BIASED if biases else LINEAR]
        if any(not is_narrow(operand) for operand in biases):
            return None
        points = [] if zeros is None else [zeros]
        weights = (codes, scales, *points, *biases)
        return _Stage(node, kind + ZEROS * len(points), (x,), weights, None, node, None)
    count = 4 if is_call(node, _LINEAR) else 3
    x, weight, features, *bias = operands(node, _LINEAR if count == 4 else _GATED, count)
    if x is None or not _fills_tiles(weight, features):
        return None
    biases = [operand for operand in bias if operand is not None]
    kind = GATED if count == 3 else BIASED if biases else LINEAR
    return _Stage(node, kind, (x,), (weight, *biases), None, node, None)


def _fills_tiles(weight: fx.Node, features: int) -> bool:
    return features % TILE == 0 and weight.meta["val"].shape[0] * TILE == features


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
    """The only stage that reads the chain's result, if the chain may have it as its next stage."""
    last = chain.stages[-1]
    if len(last.out.users) != 1:
        return None
    (user,) = last.out.users
    stage = _stage_of(user)
    if stage is None or stage.inputs.count(last.out) != 1:
        return None
    if last.node.meta.get("piece") != user.meta.get("piece") or _writes_between(last.node, user):
        return None
    if stage.epsilon is None:
        # The chain would stand here, so whatever reads the sum must come later.
        is_late = chain.total is None or all(user < reader for reader in chain.total.users)
        return stage if is_late else None
    if chain.epsilon is None:
        return stage
    other, users = _other_input(chain, stage), list(chain.total.users) if chain.total else []
    is_next = other is chain.total and users == [stage.node]
    return stage if is_next and stage.epsilon == chain.epsilon else None


def _other_input(chain: _Chain, norm: _Stage) -> fx.Node:
    """The term of a norm's sum that is not the chain's result."""
    left, right = norm.inputs
    return right if left is chain.stages[-1].out else left


def _writes_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether any node between two calls writes memory.

    A chain stands at its last stage and reads all its inputs there, so none of them may change
    before. A write of metadata also marks the beginning of another forward.
    """
    node = first.next
    while node is not last:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return True
        node = node.next
    return False


def _replace(graph: fx.Graph, chain: _Chain) -> None:
    """Insert the operator at the last stage, and give its results to the chain's readers."""
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

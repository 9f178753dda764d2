"""batch-invariant: products and sums of rows by operators that do not depend on other rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mtpc.backends.base import BATCH_INVARIANT
from mtpc.capture.graph import StepGraph, arguments
from mtpc.ops.signatures import value_of
from mtpc.passes.base import Policy, emit, emit_named, tidy

aten = torch.ops.aten

_LINEAR = torch.ops.mtpc.batch_invariant_linear.default
_ROW_SUM = torch.ops.mtpc.row_sum.default


@dataclass(frozen=True)
class BatchInvariant:
    """Replace operators whose order of summation may depend on the number of rows in PyTorch.

    Linears and products of matrices become `mtpc::batch_invariant_linear`; sums, means, softmax and
    layer norms of floating point are spelled out around `mtpc::row_sum`. The cuda backend enables
    it for the option `batch_invariant`, and checks that nothing is left.
    """

    name: ClassVar[str] = BATCH_INVARIANT
    policy: ClassVar[Policy] = "off"

    def apply(self, graph: StepGraph) -> int:
        rewrites = 0
        for node in list(graph.graph.nodes):
            rewrite = _REWRITES.get(node.target) if node.op == "call_function" else None
            if rewrite is None or value_of(node).dtype == torch.float64:
                continue
            with graph.graph.inserting_before(node):
                new = rewrite(Emitter(graph.graph, node), **arguments(node))
            if new is not None:
                node.replace_all_uses_with(new)
                rewrites += 1
        return tidy(graph, rewrites)


@dataclass(frozen=True)
class Emitter:
    """Emits calls in place of a node."""

    graph: fx.Graph
    node: fx.Node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return emit(self.graph, target, args, self.node, **kwargs)

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """x, or its copy of another dtype."""
        return x if value_of(x).dtype == dtype else self(aten.to.dtype, x, dtype)

    def product(self, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
        """x weight^T + bias."""
        given = {"x": x, "weight": weight, "bias": bias}
        return emit_named(self.graph, _LINEAR, given, self.node)

    def total(self, x: fx.Node, dim: int) -> fx.Node:
        """The float32 sum along a dimension, which stays, of size 1."""
        last = x if dim % _rank(x) == _rank(x) - 1 else self(aten.transpose.int, x, dim, -1)
        total = self(aten.unsqueeze.default, self(_ROW_SUM, last), -1)
        return total if last is x else self(aten.transpose.int, total, dim, -1)


def _rank(node: fx.Node) -> int:
    return value_of(node).dim()


def _linear(emit: Emitter, input: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> fx.Node:
    return emit.product(input, weight, bias)


def _addmm(
    emit: Emitter, self: fx.Node, mat1: fx.Node, mat2: fx.Node, beta: Any, alpha: Any
) -> fx.Node | None:
    if beta != 1 or alpha != 1 or _rank(self) != 1:
        return None
    return emit.product(mat1, emit(aten.transpose.int, mat2, 0, 1), self)


def _mm(emit: Emitter, self: fx.Node, mat2: fx.Node) -> fx.Node:
    return emit.product(self, emit(aten.transpose.int, mat2, -2, -1), None)


def _matmul(emit: Emitter, self: fx.Node, other: fx.Node) -> fx.Node | None:
    """A product by one matrix, or of two batches of matrices."""
    if _rank(other) == 2:
        return _mm(emit, self, other)
    before, shape = value_of(self).shape, value_of(emit.node).shape
    if _rank(self) < 3 or before[:-2] != value_of(other).shape[:-2]:
        return None
    if _rank(self) == 3:
        return _mm(emit, self, other)
    left = emit(aten.reshape.default, self, [-1, *before[-2:]])
    right = emit(aten.reshape.default, other, [-1, *value_of(other).shape[-2:]])
    return emit(aten.reshape.default, _mm(emit, left, right), list(shape))


def _sum(
    emit: Emitter, self: fx.Node, dim: Any, keepdim: bool = False, dtype: Any = None
) -> fx.Node | None:
    """A sum along one dimension. Sums of integers are the same in any order."""
    if not value_of(self).is_floating_point() or dim is None or len(dim) != 1:
        return None
    total = emit.total(self, dim[0])
    return _shaped(emit, total, dim[0], keepdim)


def _mean(
    emit: Emitter, self: fx.Node, dim: Any, keepdim: bool = False, dtype: Any = None
) -> fx.Node | None:
    if dim is None or len(dim) != 1:
        return None
    count = value_of(self).shape[dim[0]]
    mean = emit(aten.div.Tensor, emit.total(self, dim[0]), count)
    return _shaped(emit, mean, dim[0], keepdim)


def _shaped(emit: Emitter, total: fx.Node, dim: int, keepdim: bool) -> fx.Node:
    """A total in the shape and dtype of the call's result."""
    kept = total if keepdim else emit(aten.squeeze.dim, total, dim)
    return emit.cast(kept, value_of(emit.node).dtype)


def _softmax(emit: Emitter, self: fx.Node, dim: int, dtype: Any = None) -> fx.Node:
    wide = emit.cast(self, torch.float32)
    peak = emit(aten.amax.default, wide, [dim], True)
    weights = emit(aten.exp.default, emit(aten.sub.Tensor, wide, peak))
    shares = emit(aten.div.Tensor, weights, emit.total(weights, dim))
    return emit.cast(shares, value_of(emit.node).dtype)


def _layer_norm(
    emit: Emitter, input: fx.Node, normalized_shape: Any, weight: Any, bias: Any, eps: float,
    cudnn_enable: bool = True,
) -> fx.Node | None:  # fmt: skip
    if len(normalized_shape) != 1:
        return None
    wide, count = emit.cast(input, torch.float32), normalized_shape[0]
    mean = emit(aten.div.Tensor, emit.total(wide, -1), count)
    centred = emit(aten.sub.Tensor, wide, mean)
    square = emit.total(emit(aten.mul.Tensor, centred, centred), -1)
    variance = emit(aten.add.Tensor, emit(aten.div.Tensor, square, count), eps)
    normed = emit(aten.mul.Tensor, centred, emit(aten.rsqrt.default, variance))
    for target, operand in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        if operand is not None:
            normed = emit(target, normed, emit.cast(operand, torch.float32))
    return emit.cast(normed, value_of(emit.node).dtype)


_REWRITES: dict[Any, Callable[..., fx.Node | None]] = {
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.matmul.default: _matmul,
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _mean,
    aten.softmax.int: _softmax,
    aten.layer_norm.default: _layer_norm,
}
"""Each takes the call's arguments by name; returning None leaves the call as it is."""

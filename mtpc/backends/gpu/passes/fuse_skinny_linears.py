"""fuse-skinny-linears: linear layers of a few rows, with the norm before and SwiGLU behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mtpc.backends.base import FUSE_SKINNY_LINEARS
from mtpc.backends.gpu.ops.skinny import MOST_NORM_ROWS, MOST_ROWS, WIDTH_MULTIPLE
from mtpc.capture.graph import StepGraph
from mtpc.passes.base import GETITEM, Policy, emit, emit_named, is_call, is_narrow, operands, tidy

aten = torch.ops.aten

_ADD_NORM = torch.ops.mtpc.add_rms_norm.default
_ACTIVATION = torch.ops.mtpc.silu_and_mul.default


@dataclass(frozen=True)
class FuseSkinnyLinears:
    """Replace linears of a few bfloat16 rows by `mtpc::skinny_linear`, and those that alone read a
    residual sum's norm by `mtpc::norm_linear`, with the SwiGLU that alone reads their result.

    Linears of three or four rows are replaced only if they have no more features than inputs:
    libraries split these along the inputs, and on an H100 the kernels were faster for these alone.
    The pass looks for the norms and activations that fuse-elementwise emits. For backends with such
    kernels (cuda).
    """

    name: ClassVar[str] = FUSE_SKINNY_LINEARS
    policy: ClassVar[Policy] = "backend"

    def apply(self, graph: StepGraph) -> int:
        rewrites = 0
        for node in list(graph.graph.nodes):
            x, weight, bias = operands(node, aten.linear.default, 3)
            rows = _rows_of(x, weight)
            if rows is None:
                continue
            norm = _norm_of(x, node) if rows <= MOST_NORM_ROWS else None
            if norm is None:
                with graph.graph.inserting_before(node):
                    given = {"x": x, "weight": weight, "bias": bias}
                    new = emit_named(graph.graph, torch.ops.mtpc.skinny_linear.default, given, node)
                node.replace_all_uses_with(new)
            else:
                _fuse_norm(graph.graph, node, norm)
            rewrites += 1
        return tidy(graph, rewrites)


def _rows_of(x: Any, weight: Any) -> int | None:
    """The number of rows of a linear that the kernels take; None for any other linear."""
    if not is_narrow(x) or weight.op != "get_attr":
        return None
    features, width = weight.meta["val"].shape
    rows = x.meta["val"].numel() // width
    most = MOST_ROWS if features <= width else MOST_NORM_ROWS
    return rows if 0 < rows <= most and width % WIDTH_MULTIPLE == 0 else None


def _norm_of(x: fx.Node, reader: fx.Node) -> fx.Node | None:
    """The `add_rms_norm` whose normed result x only this linear reads; None if x is another
    node."""
    if not is_call(x, GETITEM) or x.args[1] != 1 or x.users.keys() != {reader}:
        return None
    norm: Any = x.args[0]
    return norm if is_call(norm, _ADD_NORM) and operands(norm, _ADD_NORM, 5)[0] else None


def _fuse_norm(graph: fx.Graph, node: fx.Node, norm: fx.Node) -> None:
    _, weight, bias = operands(node, aten.linear.default, 3)
    (reader, *others) = node.users
    is_gated = not others and bias is None and operands(reader, _ACTIVATION, 1) == (node,)
    for operand in (weight, bias):
        if operand is not None and norm < operand:
            norm.prepend(operand)
    args = (*operands(norm, _ADD_NORM, 5), weight, bias, is_gated)
    with graph.inserting_before(norm):
        both = emit(graph, torch.ops.mtpc.norm_linear.default, args, norm)
        total, out = (emit(graph, GETITEM, (both, i), norm) for i in (0, 1))
    for old in list(norm.users):
        if old.args[1] == 0:
            old.replace_all_uses_with(total)
    (reader if is_gated else node).replace_all_uses_with(out)

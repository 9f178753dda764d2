"""A step's graph as plain data: what `mtpc.certificate` reads, and an artifact keeps."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload

from mtpc.capture.graph import StepGraph, arguments, dim_of, dtype_name

Line = list[Any]
"""[name, operator, {argument: value}, shapes, dtypes]. What names a line begins with "%"."""


def listing(graph: StepGraph) -> list[Line]:
    """One line for each node, in order of execution.

    The operator of a tensor that the step holds is "get", and that of an entry of a result
    "getitem". Others are `aten::NAME.OVERLOAD`, and NAME for any kernel of `mtpc::NAME`. Arguments
    have their names and all defaults. Shapes are those of the result, or of each of the results;
    a size that is open is text. So are dtypes.
    """
    return [_line(node) for node in graph.graph.nodes if node.op != "output"]


def _line(node: fx.Node) -> Line:
    value = node.meta.get("val")
    results = [value] if isinstance(value, Tensor) else list(value or ())
    forms = [list(map(_sizes, results)), [dtype_name(result.dtype) for result in results]]
    if node.op == "get_attr":
        return [node.name, "get", {"name": str(node.target)}, *forms]
    if not isinstance(node.target, OpOverload):
        source, index = node.args
        return [node.name, "getitem", {"self": _plain(source), "index": index}, *forms]
    given = {name: _plain(value) for name, value in arguments(node).items()}
    return [node.name, operator_name(node.target), given, *forms]


def operator_name(target: OpOverload) -> str:
    namespace, _, name = target._schema.name.partition("::")
    if namespace.startswith("mtpc_"):
        return name
    return f"{namespace}::{name}.{target._overloadname}"


def _sizes(value: Any) -> list[int | str]:
    mode = getattr(value, "fake_mode", None)
    sizes = [n if mode is None else dim_of(mode, n) for n in value.shape]
    return [n if isinstance(n, int) else str(n) for n in sizes]


def _plain(value: Any) -> Any:
    """An argument as JSON has it."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)

"""From a flat step graph to a tape: which call each node becomes.

- A view becomes nothing: it is a tensor of the tape.
- A kernel of ours is called past torch's dispatcher.
- Arithmetic on elements, folds along a dimension, products of small matrices and rows by index are
  computed by `cpu_kernels/between.cpp`, with the same bits wherever a value stands in a tensor.
- Any other operator is called through torch's dispatcher.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mtpc.backends.record_tape import TapeRecorder
from mtpc.backends.tape import Entry
from mtpc.capture.effects import analyse
from mtpc.capture.fake_calls import tensors_in
from mtpc.capture.graph import StepGraph, arguments
from mtpc.capture.inline import fake_mode_of
from mtpc.ops.signatures import value_of
from mtpc.passes.base import refresh_values

Values = dict[str, Any]
"""A call's arguments by name; tensors are fake."""

_UNARY = {"neg", "bitwise_not", "logical_not", "isfinite", "cos", "sin", "exp", "sqrt", "rsqrt",
          "sigmoid", "silu", "softplus"}  # fmt: skip
_OPTIONS = {"softplus": (1, 20)}
"""Beyond the operand: beta, and from where on a number is its own softplus."""
_BINARY = {"add", "sub", "mul", "div", "floor_divide", "remainder", "minimum", "maximum",
           "__and__", "__or__", "bitwise_and", "bitwise_or", "logical_and", "logical_or",
           "eq", "ne", "lt", "le", "gt", "ge", "rsub"}  # fmt: skip
_RENAMED = {"__and__": "and", "__or__": "or", "bitwise_and": "and", "bitwise_or": "or"}
_FILLS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_COPIES = {"to", "_to_copy", "clone", "contiguous", "reshape", "flatten", "unflatten", "type_as"}
_FOLDS = {"sum": "sum", "amax": "maximum", "amin": "minimum", "any": "any", "all": "all",
          "cumsum": "scan", "mean": "sum"}  # fmt: skip
_NARROW = (torch.bfloat16, torch.float16)
_MOST_INDICES = 4
_MOST_TERMS = 8
"""Of a product's sums that are spelled out."""


def lower_to_tape(graph: StepGraph) -> tuple[int, list[Entry]]:
    """Bytes of the arena and the entries of a flat, verified graph."""
    refresh_values(graph)  # Passes need not keep what aliases what among temporaries.
    recorder = TapeRecorder()
    written = frozenset().union(*analyse(graph.graph).writes.values())
    held = [node for node in graph.graph.nodes if node.op == "get_attr"]
    for node in sorted(held, key=lambda node: str(node.target)):
        recorder.bind(str(node.target), node.meta["val"])
    with fake_mode_of(graph.graph):
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                _Lowering(recorder, node, node in written).run()
    return recorder.entries()


class _Lowering:
    """One call of the graph."""

    def __init__(self, recorder: TapeRecorder, node: fx.Node, is_written: bool):
        self.tape, self.node, self.is_written = recorder, node, is_written
        named = arguments(node)
        self.values: Values = fx.node.map_aggregate(named, value_of)
        self.results = tensors_in(node.meta.get("val"))
        overload: Any = node.target
        self.schema = overload._schema
        name = str(self.schema.name).partition("::")[2]
        self.in_place = self.schema.is_mutable and name.endswith("_") and not name.startswith("__")
        self.name = name[:-1] if self.in_place else name
        self.is_aten = str(self.schema.name).startswith("aten::")

    def run(self) -> None:
        known = [self.tape.is_known(result) for result in self.results]
        is_view = not self.schema.is_mutable or self.name == "detach"
        if is_view and known and all(known):
            return
        if self.is_aten and (self._constant() or self._between()):
            return
        for result, is_known in zip(self.results, known, strict=True):
            if not is_known:
                self.tape.new("returned", result)
        taken = [] if all(known) else self.results
        self.tape.operator(self.node, self.values, taken)

    @property
    def out(self) -> Tensor:
        """The only result, in memory of its own or in that of the first argument."""
        (result,) = self.results
        return result

    def _constant(self) -> bool:
        """Hold a result that depends on no tensor and is never written; False for other nodes."""
        if self.node.all_input_nodes or self.is_written or len(self.results) != 1:
            return False
        target: Any = self.node.target
        with unset_fake_temporarily():
            result = target(*self.node.args, **{**self.node.kwargs, "device": "cpu"})
            self.tape.hold(self.out, list(result.reshape(-1).tolist()))
        return True

    def _between(self) -> bool:
        """Lower to arithmetic, folds or rows by index; False for other nodes."""
        if len(self.results) != 1:
            return False
        for lower in (_unary, _spelled_out, _binary, _select, _clamp, _copy, _join, _fill, _fold,
                      _product, _take_rows, _put_rows):  # fmt: skip
            call = lower(self)
            if call is not None:
                if not self.tape.is_known(self.out):
                    self.tape.new("planned", self.out)
                call()
                return True
        return False

    def map(self, function: str, kind: torch.dtype, *operands: Any) -> Call | None:
        """A call of `TapeRecorder.map`, unless torch would round operands first."""
        tensors = [operand for operand in operands if isinstance(operand, Tensor)]
        if kind in _NARROW and any(tensor.dtype not in (kind, torch.bool) for tensor in tensors):
            return None
        if any(tensor.is_complex() for tensor in tensors):
            return None
        return lambda: self.tape.map(function, self.out, *operands, kind=kind)


Call = Callable[[], None]


def _unary(at: _Lowering) -> Call | None:
    if at.name == "square" or (at.name == "pow" and at.values.get("exponent") == 2):
        return at.map("mul", at.out.dtype, at.values["self"], at.values["self"])
    x, *options = at.values.values()
    if at.name not in _UNARY or tuple(options) != _OPTIONS.get(at.name, ()):
        return None
    if at.name == "bitwise_not":
        return at.map("logical_not" if x.dtype == torch.bool else "not", x.dtype, x)
    kind = x.dtype if at.name in ("neg", "isfinite", "logical_not") else at.out.dtype
    return at.map(at.name, kind, x)


def _spelled_out(at: _Lowering) -> Call | None:
    """tanh x as 2 sigmoid(2 x) - 1; gelu x, in its tanh form, as x sigmoid(c x (1 + 0.044715 x^2)),
    where c = 2 sqrt(2 / pi).

    PyTorch computes what fills no vector in another way than the rest, so a row's bits would depend
    on its place.
    """
    is_gelu = at.name == "gelu" and at.values["approximate"] == "tanh"
    if at.name != "tanh" and not is_gelu:
        return None
    x, twice = at.values["self"], 2 * math.sqrt(2 / math.pi)
    kind = torch.float32 if x.dtype in _NARROW else x.dtype
    inner = torch.empty(x.shape, dtype=kind)  # A fake tensor: where its numbers are.
    steps: list[tuple[Any, ...]] = [("mul", inner, x, 2.0), ("sigmoid", inner, inner)]
    steps += [("mul", inner, inner, 2.0), ("sub", at.out, inner, 1.0)]
    if is_gelu:
        steps = [("mul", inner, x, x), ("mul", inner, inner, 0.044715 * twice)]
        steps += [("add", inner, inner, twice), ("mul", inner, inner, x)]
        steps += [("sigmoid", inner, inner), ("mul", at.out, inner, x)]

    def call() -> None:
        at.tape.new("planned", inner)
        for step in steps:
            at.tape.map(*step, kind=kind)

    return call


def _binary(at: _Lowering) -> Call | None:
    if at.name not in _BINARY or at.values.get("alpha", 1) != 1:
        return None
    left, right, *_ = at.values.values()
    kind, name = torch.result_type(left, right), at.name
    rounding = at.values.get("rounding_mode")
    if name == "div" and rounding is None:
        kind = at.out.dtype
    elif name == "div" and rounding == "floor":
        name = "floor_divide"
    elif name == "div":
        return None
    if name in ("floor_divide", "remainder") and kind.is_floating_point:
        return None
    if name.startswith("logical"):
        if not all(isinstance(x, Tensor) and x.dtype == torch.bool for x in (left, right)):
            return None
        name = name.removeprefix("logical_")
    if name == "rsub":
        return at.map("sub", kind, right, left)
    return at.map(_RENAMED.get(name, name), kind, left, right)


def _select(at: _Lowering) -> Call | None:
    """where, masked_fill."""
    values = at.values
    if at.name == "where" and "condition" in values and len(values) == 3:
        return at.map("where", at.out.dtype, *values.values())
    if at.name == "masked_fill":
        return at.map("where", at.out.dtype, values["mask"], values["value"], values["self"])
    return None


def _clamp(at: _Lowering) -> Call | None:
    bounds = {"clamp": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}.get(at.name)
    if bounds is None:
        return None
    given = [(n, at.values[n]) for n in bounds if at.values.get(n) is not None]
    calls: list[Call] = []
    source = at.values["self"]
    for name, bound in given:
        function = "maximum" if name == "min" else "minimum"
        call = at.map(function, at.out.dtype, source, bound)
        if call is None:
            return None
        calls.append(call)
        source = at.out

    def clamp() -> None:
        for call in calls:
            call()

    return clamp


def _copy(at: _Lowering) -> Call | None:
    values = at.values
    if at.name == "copy" and at.in_place:
        source, out = values["src"], at.out
    elif at.name in _COPIES and not at.in_place:
        source, out = values["self"], at.out
        if source.numel() == out.numel() and source.shape != out.shape:
            if not out.is_contiguous():
                return None
            out = out.view(source.shape)  # Of dense memory.
            return lambda: at.tape.map("copy", out, source, kind=out.dtype)
    else:
        return None
    kind = torch.promote_types(source.dtype, out.dtype)
    return lambda: at.tape.map("copy", out, source, kind=kind)


def _join(at: _Lowering) -> Call | None:
    """cat, stack: each part is copied to its place."""
    if at.name not in ("cat", "stack"):
        return None
    parts, dim = at.values["tensors"], at.values["dim"]
    if any(part.dtype != at.out.dtype for part in parts):
        return None

    def call() -> None:
        start = 0
        for part in parts:
            if at.name == "stack":
                place, size = at.out.select(dim, start), 1
            else:
                size = part.shape[dim] if part.dim() == at.out.dim() else 0
                place = at.out.narrow(dim, start, size)
            if size and part.numel():
                at.tape.map("copy", place, part, kind=part.dtype)
            start += size

    return call


def _fill(at: _Lowering) -> Call | None:
    if at.name in _FILLS:
        number: Any = _FILLS[at.name]
    elif at.name in ("full", "full_like", "new_full"):
        number = at.values["fill_value"]
    elif at.name == "fill" and at.in_place and not isinstance(at.values["value"], Tensor):
        number = at.values["value"]
    elif at.name == "zero" and at.in_place:
        number = 0
    else:
        return None
    return lambda: at.tape.map("copy", at.out, number, kind=at.out.dtype)


def _fold(at: _Lowering) -> Call | None:
    if at.name not in _FOLDS or at.in_place or "dim" not in at.values:
        return None
    x, dims = at.values["self"], at.values["dim"]
    if isinstance(dims, (list, tuple)):
        if len(dims) != 1:
            return None
        (dims,) = dims
    if not isinstance(dims, int) or x.dim() == 0:
        return None
    dim = dims % x.dim()
    if x.shape[dim] == 0:
        return None
    kept = at.values.get("keepdim", False) or at.name == "cumsum"
    out = at.out if kept else at.out.unsqueeze(dim)
    wide = torch.promote_types(out.dtype, torch.float32)
    total = torch.empty(out.shape, dtype=wide) if at.name == "mean" else out

    def fold() -> None:
        if total is not out:
            at.tape.new("planned", total)
        at.tape.fold(_FOLDS[at.name], total, x, dim)
        if total is not out:
            at.tape.map("div", out, total, x.shape[dim], kind=wide)

    return fold


def _product(at: _Lowering) -> Call | None:
    """matmul and bmm of rows' own small matrices, A B as the sum of A[:, j] B[j, :] over j.

    PyTorch chooses how it adds by the number of matrices.
    """
    if at.name not in ("matmul", "bmm"):
        return None
    left, right = at.values.values()
    count, wide = left.shape[-1], torch.promote_types(at.out.dtype, torch.float32)
    is_small = 1 < count <= _MOST_TERMS and at.out.dtype.is_floating_point
    if min(left.dim(), right.dim()) < 3 or not is_small:
        return None
    total, term = (torch.empty(at.out.shape, dtype=wide) for _ in range(2))

    def call() -> None:
        at.tape.new("planned", total)
        at.tape.new("planned", term)
        for j in range(count):
            factors = left[..., j : j + 1], right[..., j : j + 1, :]
            at.tape.map("mul", term if j else total, *factors, kind=wide)
            if j:
                at.tape.map("add", at.out if j == count - 1 else total, total, term, kind=wide)

    return call


def _take_rows(at: _Lowering) -> Call | None:
    """index, index_select, embedding: rows of a table."""
    if at.in_place:
        return None
    if at.name == "embedding":
        return lambda: at.tape.move_rows(False, at.out, at.values["weight"], [at.values["indices"]])
    if at.name == "index_select":
        x, dim, index = at.values["self"], at.values["dim"], at.values["index"]
        if x.dim() == 0 or index.dim() != 1:
            return None
        return lambda: at.tape.move_rows(False, at.out.movedim(dim, 0), x.movedim(dim, 0), [index])
    if at.name == "index":
        return _advanced(at, False, at.out)
    return None


def _put_rows(at: _Lowering) -> Call | None:
    """index_copy_, index_put_: rows of a table are written."""
    if not at.in_place:
        return None
    if at.name == "index_copy":
        dim, index, source = at.values["dim"], at.values["index"], at.values["source"]
        if index.dim() != 1 or source.dtype != at.out.dtype or at.out.dim() == 0:
            return None
        table = at.out.movedim(dim, 0)
        return lambda: at.tape.move_rows(True, source.movedim(dim, 0), table, [index])
    if at.name == "index_put" and not at.values["accumulate"]:
        return _advanced(at, True, at.values["values"])
    return None


def _advanced(at: _Lowering, into: bool, rows: Tensor) -> Call | None:
    """x[i, j] with integer tensors for adjacent dimensions."""
    table, given = at.values["self"], list(at.values["indices"])
    indexed = [dim for dim, index in enumerate(given) if index is not None]
    indices = [given[dim] for dim in indexed]
    first, count = indexed[0], len(indexed)
    if indexed != list(range(first, first + count)) or count > _MOST_INDICES:
        return None
    if any(index.dtype not in (torch.int64, torch.int32) for index in indices):
        return None
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    wanted = (*table.shape[:first], *shape, *table.shape[first + count :])
    if rows.dtype != table.dtype or (not into and tuple(rows.shape) != wanted):
        return None
    rows = rows.expand(wanted)
    table = table.movedim(list(range(first, first + count)), list(range(count)))
    moved = range(first, first + len(shape))
    rows = rows.movedim(list(moved), list(range(len(shape))))
    return lambda: at.tape.move_rows(into, rows, table, indices)

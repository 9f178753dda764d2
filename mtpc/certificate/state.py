"""The values of a listing, as far as it is read, and what all rules need of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from mtpc.certificate import tables
from mtpc.certificate.values import (
    ANY,
    CONST,
    DIAGONAL,
    KINDS,
    OWN,
    PAIR,
    PLACE,
    REQUESTS,
    Layout,
    RefusedError,
    UnknownError,
    Value,
)

Line = Sequence[Any]
_REPORTS = ("count_tokens", "write_logprobs")
"""What may read the rows of a request as columns: it takes those that were emitted."""
_CARRIERS = tables.VIEWS | {"where"}
"""What may take a value that is known under a condition, which `where` has; or a request's rows as
columns, which a view may make rows again."""


class Checker:
    """The values of one listing, as far as it is read.

    Args:
        lines: [name, operator, {argument: value}, shapes, dtypes] each.
        dispatched: ATen's operators that the tape calls through PyTorch's dispatcher.
        on_gpu: whether elementwise operators have a thread for each element.

    Attributes:
        values: by line.
        buffers: line -> the name of the state that it is, or is the first part of.
        content: what the step has written to buffers of the batch.
        memory: line -> the first line whose memory it shares.
        counts: count -> one that is no smaller, and the condition under which it may be.
        single: counts of which none is over 1.
        windows: counts of windows that rows close -> their tag.
        shifts: tags of numbers that are rows of another layout, because acceptance ends there.

    Raises:
        RefusedError: it is no listing of a step.
    """

    def __init__(self, lines: Sequence[Line], dispatched: frozenset[str], on_gpu: bool) -> None:
        self.dispatched, self.on_gpu = dispatched, on_gpu
        self.values: dict[str, Any] = {}
        self.buffers: dict[str, str] = {}
        self.content: dict[str, Value] = {}
        self.memory: dict[str, str] = {}
        self.counts: dict[Layout, tuple[Layout, Any]] = {}
        self.single: set[Layout] = set()
        self.windows: dict[Layout, tuple[Any, ...]] = {}
        self.shifts: set[tuple[Any, ...]] = set()
        self.calls = {line[0]: line for line in lines}
        accepts = [line[2] for line in lines if line[1] == "accept"]
        held = {line[2].get("name"): line[3][0] for line in lines if line[1] == "get"}
        if len(accepts) != 1 or "batch.state_indices" not in held:
            raise RefusedError(
                f"{len(accepts)} calls of accept; expected one, of a step's requests"
            )
        self.active = accepts[0]["active"]
        self.num_reqs = held["batch.state_indices"][0]
        self.name, self.op, self.base = "", "", ""
        self.args: Mapping[str, Any] = {}
        self.shapes: list[tuple[Any, ...]] = [()]
        self.dtypes, self.in_place = [""], False

    def begin(self, line: Line) -> None:
        """The next line is read."""
        self.name, self.op, self.args, shapes, self.dtypes = line[:5]
        self.shapes = [tuple(shape) for shape in shapes] or [()]
        base = self.op.removeprefix("aten::").partition(".")[0]
        self.in_place = base.endswith("_") and not base.startswith("__")
        self.base = base.removesuffix("_") if self.in_place else base

    def at(self, name: str) -> Any:
        """An argument of the line: a value, a list of them, or what is given."""
        return self.value(self.args.get(name))

    def value(self, given: Any) -> Any:
        if isinstance(given, list):
            return [self.value(one) for one in given]
        if not isinstance(given, str) or given[:1] != "%":
            return given
        name = given[1:]
        if name not in self.values:
            raise RefusedError(f"{self.op} ({self.name}) reads {given}, which no line has given")
        held = self.content.get(self.buffers.get(name, ""))
        is_whole = held is not None and held.shape == tuple(self.calls[name][3][0])
        found = held if is_whole else self.values[name]
        if not isinstance(found, Value) or self.base in _CARRIERS:
            return found
        if found.is_conditional:
            return replace(found, kind=ANY, why=self.because("has rows of another request"))
        if "together" in found.facts and self.op not in _REPORTS:
            return replace(found, kind=ANY, why=self.because("has later rows of its request"))
        return found

    def unknown(self, why: str, *sources: Value) -> NoReturn:
        """Stop at the line: nothing is known of what it gives."""
        raise UnknownError(self.nothing(why, *sources), self.because(why, *sources))

    def nothing(self, why: str, *sources: Value) -> Any:
        """Results of which nothing is known, because of this line or of one before."""
        why = self.because(why, *sources)
        made = [Value(shape, (None,) * len(shape), ANY, why=why) for shape in self.shapes]
        return made if len(made) > 1 else made[0]

    def because(self, why: str, *sources: Value) -> str:
        """Why nothing is known: this line, or one before."""
        return next((v.why for v in sources if v.kind == ANY), f"{self.op} ({self.name}) {why}")

    def make(
        self, dims: Sequence[Layout], kind: str, tag: tuple[Any, ...] = (), facts: Any = ()
    ) -> Value:
        """The only result."""
        if kind == ANY:
            self.unknown("", *(v for v in map(self.at, self.args) if isinstance(v, Value)))
        is_place = bool(tag) and tag[0] in tables.PLACES
        kind = PLACE if is_place else OWN if kind == PLACE else kind
        if kind == OWN and tuple(dims) == (REQUESTS,) and not tag:
            tag = ("cnt", ((self.name, 1),))
        is_active = {"active"} if f"%{self.name}" == self.active else set()
        return Value(self.shapes[0], tuple(dims), kind, tag, frozenset(facts) | is_active)

    def bounds(self, value: Any) -> Layout:
        """The layout whose bounds a value has; None for another one."""
        if not isinstance(value, Value) or not value.tag:
            return None
        if value.tag[0] == "iota" and max(value.shape) == self.num_reqs + 1:
            return (("1", value.tag[1]),)
        return value.tag[1] if value.tag[0] == "bounds" else None

    def meet(self, *given: Any) -> Value:
        """What is computed element by element of values that name no places."""
        dims, kind, _ = self.join(*given)
        return self.make(dims, kind) if kind != PLACE else self.unknown("has numbers of places")

    def join(self, *given: Any) -> tuple[list[Layout], str, list[Value]]:
        """What is computed element by element: its dimensions, its kind, and the operands.

        Rows of two layouts must not meet, nor rows and numbers that follow from their places.
        """
        values = [v if isinstance(v, Value) else Value((), (), CONST, ("#", v)) for v in given]
        rank = max(len(v.dims) for v in values)
        dims: list[Layout] = [None] * rank
        for v in values:
            for axis, dim in enumerate(v.dims, rank - len(v.dims)):
                if dim is not None and dims[axis] not in (None, dim):
                    self.unknown("has rows of two layouts", *values)
                dims[axis] = dims[axis] if dim is None else dim
        values = [self._resolved(v, dims) for v in values]
        if any(v.kind == ANY or v.is_conditional for v in values):
            self.unknown("has rows that may be another request's", *values)
        kinds = {v.kind for v in values}
        if kinds & {PAIR, DIAGONAL} or sum(isinstance(dim, tuple) for dim in dims) > 1:
            return dims, PAIR, values
        return dims, max(kinds, key=KINDS.index), values

    def _resolved(self, value: Value, dims: Sequence[Layout]) -> Value:
        """An operand whose numbers of places are those of the result's dimensions."""
        own = tuple(dims[len(dims) - len(value.dims) :])
        is_number = value.tag[:1] in (("iota",), ("numbers",)) and max(value.shape) == 1
        met = [
            new
            for size, old, new in zip(value.shape, value.dims, own, strict=True)
            if old is None and new is not None and (size != 1 or (is_number and self.num_reqs == 1))
        ]
        sizes = [size for size in value.shape if size != 1] or [1]
        if value.kind == ANY:
            return value
        if not met:
            is_column = value.tag[:1] == ("iota",) and any(dim is not None for dim in dims)
            if is_column:
                return replace(value, tag=("col", value.tag[1] * (sizes[0] - 1) + 1))
            return value
        if "uniform" in value.facts or (value.tag == ("numbers",) and met == [REQUESTS]):
            return replace(value, dims=own)
        if value.tag[:1] == ("iota",) and len(sizes) == 1 and isinstance(met[0], tuple):
            times = value.tag[1]
            if met[0] == REQUESTS:
                tag = ("request",) if times == 1 else ("start", (("1", times),))
                return replace(value, dims=own, kind=PLACE, tag=tag)
            if times == 1:
                return replace(value, dims=own, kind=PLACE, tag=("row", met[0]))
        self.unknown("has rows, and numbers that follow from their places")

    def origin(self, argument: str) -> str:
        """The line of a value of requests that an argument has by row."""
        name = str(self.args[argument])[1:]
        while self.calls[name][1].startswith(("aten::index.", "aten::unsqueeze", "aten::view")):
            name = self.calls[name][2]["self"][1:]
        return name

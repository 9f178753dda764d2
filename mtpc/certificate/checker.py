"""The checker: what is known of a value, how values meet, and the walk over a listing.

What each operator gives is for rules.py, which has them by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NoReturn

from mtpc.certificate import tables


class Kind(IntEnum):
    """How much is known of a value: the less, the higher."""

    CONST = 0  # The same in any company.
    OWN = 1  # A request's alone, the one that the row belongs to.
    UPTO = 2  # So in its rows up to the last accepted one.
    PLACE = 3  # A number that names a place.
    DIAGONAL = 4  # Of two requests, and 0 where they are not one.
    PAIR = 5  # Of two requests.
    ANY = 6  # Nothing is known.


Line = Sequence[Any]
Layout = Any
"""What the places of a dimension are. None: the same in any company. "slots", "pages ...": state. A
tuple: rows of requests, as a sum of counts: (("1", 3),) has three for each request, (("x", 1),) as
many as the value x says."""
REQUESTS: Layout = (("1", 1),)


@dataclass(frozen=True)
class Value:
    """What is known of a tensor.

    Attributes:
        shape: sizes; text where they are open.
        dims: a `Layout` for each dimension.
        kind: how much is known.
        tag: what an integer names, and of what: see `lemmas.LEMMAS`.
        facts: what is known where a boolean is true; conditions under which a value is known.
        why: the operator that made it `any`.
    """

    shape: tuple[Any, ...]
    dims: tuple[Layout, ...]
    kind: Kind = Kind.CONST
    tag: tuple[Any, ...] = ()
    facts: frozenset[Any] = frozenset()
    why: str = ""

    @property
    def is_conditional(self) -> bool:
        """Whether rows may be another request's where a condition does not hold."""
        return any(fact[0] in ("unless", "where") for fact in self.facts)

    def __str__(self) -> str:
        dims = ", ".join("-" if dim is None else text_of(dim) for dim in self.dims)
        return f"{self.kind.name.lower()}[{dims}] {' '.join(map(text_of, self.tag))}".rstrip()


class UnknownError(Exception):
    """Nothing is known of what a line gives.

    Args:
        results: of the line, of the kind `any`.
        why: nothing is known.
    """

    def __init__(self, results: Any, why: str) -> None:
        super().__init__(why)
        self.results = results


class RefusedError(Exception):
    """The listing proves nothing; the message names the operator, and its line."""


def text_of(layout: Any) -> str:
    if not isinstance(layout, tuple):
        return str(layout)
    return "+".join(str(n) if name == "1" else f"{n}*{name}" for name, n in layout)


def sum_of(one: Layout, other: Layout) -> Layout:
    return tuple(sorted((Counter(dict(one)) + Counter(dict(other))).items()))


def pool_of(name: Any) -> str:
    """The first dimension of the state whose places a tag names."""
    rings = f"pages {name}*S - {name - 1}" if isinstance(name, int) else f"pages {name}"
    return "slots" if name == "S" else rings


def spots(rows: Any, pages: Any) -> Any:
    """The name of pages that are seen as so many pages each."""
    return pages if rows == 1 else f"spots {rows} of {pages}"


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

    def __init__(self, lines: Sequence[Line], dispatched: Iterable[str], on_gpu: bool) -> None:
        self.dispatched, self.on_gpu = frozenset(dispatched), on_gpu
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
        self.most_rows = held.get("batch.prompt_ids", [None])[0]

    def read(self, line: Line, rules: Mapping[str, Callable[[Checker], Any]]) -> Any:
        """What the next line gives: a value, or several."""
        self.name, self.op, self.args, shapes, self.dtypes = line[:5]
        self.shapes = [tuple(shape) for shape in shapes] or [()]
        base = self.op.removeprefix("aten::").partition(".")[0]
        in_place = base.endswith("_") and not base.startswith("__")
        self.base = base.removesuffix("_") if in_place else base
        rule = rules.get(f"aten::{self.base}" if self.op.startswith("aten::") else self.op)
        if rule is None and (in_place or not self.op.startswith("aten::")):
            raise RefusedError(f"{self.op} ({self.name}) has no rule")
        try:
            found = rule(self) if rule else self.unknown("has no rule")
        except UnknownError as error:
            found = error.results
        source = str(self.args.get("self"))[1:]
        if in_place and source not in self.buffers:
            self._spoil(source, found)
        elif self.op.startswith("aten::") and self.base in tables.VIEWS:
            if self.base == "slice" and source in self.buffers:
                self.buffers[self.name] = self.buffers[source]
            else:
                self.memory[self.name] = self.memory.get(source, source)
        self.values[self.name] = found
        return found

    def _spoil(self, name: str, value: Value) -> None:
        """A temporary takes a value: nothing that shares its memory is better from now on."""
        root = self.memory[self.name] = self.memory.get(name, name)
        for other, held in self.values.items():
            if self.memory.get(other, other) == root and isinstance(held, Value):
                kind = max(held.kind, value.kind)
                self.values[other] = Value(held.shape, held.dims, kind, why=value.why or held.why)

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
        return self.seen(held if is_whole else self.values[name])

    def seen(self, found: Any) -> Any:
        """A result as the line's operator reads it."""
        if not isinstance(found, Value) or self.base in tables.CARRIERS:
            return found
        if found.is_conditional:
            return replace(found, kind=Kind.ANY, why=self.because("has rows of another request"))
        if "together" in found.facts and self.op not in tables.REPORTS:
            return replace(found, kind=Kind.ANY, why=self.because("has later rows of its request"))
        return found

    def unknown(self, why: str, *sources: Value) -> NoReturn:
        """Stop at the line: nothing is known of what it gives."""
        raise UnknownError(self.nothing(why, *sources), self.because(why, *sources))

    def nothing(self, why: str, *sources: Value) -> Any:
        """Results of which nothing is known, because of this line or of one before."""
        why = self.because(why, *sources)
        made = [Value(shape, (None,) * len(shape), Kind.ANY, why=why) for shape in self.shapes]
        return made if len(made) > 1 else made[0]

    def because(self, why: str, *sources: Value) -> str:
        """Why nothing is known: this line, or one before."""
        return next(
            (v.why for v in sources if v.kind == Kind.ANY), f"{self.op} ({self.name}) {why}"
        )

    def make(
        self, dims: Sequence[Layout], kind: Kind, tag: tuple[Any, ...] = (), facts: Any = ()
    ) -> Value:
        """The only result."""
        if kind == Kind.ANY:
            self.unknown("", *(v for v in map(self.at, self.args) if isinstance(v, Value)))
        is_place = bool(tag) and tag[0] in tables.PLACES
        kind = Kind.PLACE if is_place else Kind.OWN if kind == Kind.PLACE else kind
        if kind == Kind.OWN and tuple(dims) == (REQUESTS,) and not tag:
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

    def meet(self, *given: Any, facts: Iterable[Any] = ()) -> Value:
        """What is computed element by element of values that name no places."""
        dims, kind, _ = self.join(*given)
        if kind == Kind.PLACE:
            self.unknown("has numbers of places")
        return self.make(dims, kind, (), facts)

    def join(self, *given: Any) -> tuple[list[Layout], Kind, list[Value]]:
        """What is computed element by element: its dimensions, its kind, and the operands.

        Rows of two layouts must not meet, nor rows and numbers that follow from their places.
        """
        values = [v if isinstance(v, Value) else Value((), (), Kind.CONST, ("#", v)) for v in given]
        rank = max(len(v.dims) for v in values)
        dims: list[Layout] = [None] * rank
        for v in values:
            for axis, dim in enumerate(v.dims, rank - len(v.dims)):
                is_only = self.num_reqs == v.shape[axis - rank] == 1
                if dim is not None and dims[axis] not in (None, dim) and not is_only:
                    self.unknown("has rows of two layouts", *values)
                dims[axis] = dims[axis] if dim is None else dim
        values = [self._resolved(v, dims) for v in values]
        if any(v.kind == Kind.ANY or v.is_conditional for v in values):
            self.unknown("has rows that may be another request's", *values)
        kinds = {v.kind for v in values}
        if kinds & {Kind.PAIR, Kind.DIAGONAL} or sum(isinstance(dim, tuple) for dim in dims) > 1:
            return dims, Kind.PAIR, values
        return dims, max(kinds), values

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
        if value.kind == Kind.ANY:
            return value
        if not met:
            is_column = value.tag[:1] == ("iota",) and any(dim is not None for dim in dims)
            if is_column:
                return replace(value, tag=("col", value.tag[1] * (sizes[0] - 1) + 1))
            return value
        if "uniform" in value.facts:
            return replace(value, dims=own)
        if value.tag == ("numbers",) and met == [REQUESTS]:
            return replace(value, dims=own, kind=Kind.PLACE)
        if value.tag[:1] == ("iota",) and len(sizes) == 1 and isinstance(met[0], tuple):
            times = value.tag[1]
            if met[0] == REQUESTS:
                tag = ("request",) if times == 1 else ("start", (("1", times),))
                return replace(value, dims=own, kind=Kind.PLACE, tag=tag)
            if times == 1:
                return replace(value, dims=own, kind=Kind.PLACE, tag=("row", met[0]))
        self.unknown("has rows, and numbers that follow from their places")

    def origin(self, argument: str) -> str:
        """The line of a value of requests that an argument has by row."""
        name = str(self.args[argument])[1:]
        while self.calls[name][1].startswith(("aten::index.", "aten::unsqueeze", "aten::view")):
            name = self.calls[name][2]["self"][1:]
        return name

"""The checker: what is known of a value, how values meet, and the walk over a listing.

What each operator gives is for rules.py, which has them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NoReturn

from mtpc.certificate import tables
from mtpc.certificate.sums import NONE, ONE, Bounds, Sum


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
Sums = Sequence[Sum]
Layout = Any
"""What the places of a dimension are. None: the same in any company. "slots", "pages ...": state.
"bounds": one for each request, and one more. A sum: rows of requests, of which each has so many."""
REQUESTS: Layout = ONE


@dataclass(frozen=True)
class Value:
    """What is known of a tensor.

    Attributes:
        shape: sizes; text where they are open.
        dims: a `Layout` for each dimension.
        kind: how much is known.
        number: what an integer is; None: not followed.
        facts: words, and pairs: ("if", x) and ("else", x), where x holds if a boolean is true, or
            false; ("goal", sum), where the value is known only if the sum is 0 or more.
        why: the operator that made it `any`.
    """

    shape: tuple[Any, ...]
    dims: tuple[Layout, ...]
    kind: Kind = Kind.CONST
    number: Sum | None = None
    facts: frozenset[Any] = frozenset()
    why: str = ""

    def those(self, word: str) -> set[Any]:
        """The facts that are pairs of a word."""
        return {fact[1] for fact in self.facts if isinstance(fact, tuple) and fact[0] == word}

    @property
    def iota(self) -> tuple[str, int]:
        """The part that counts places along a dimension, and how often; or ("", 0)."""
        return next((one for one in self.sum.parts if one[0].startswith("~iota")), ("", 0))

    @property
    def is_count(self) -> bool:
        """Whether each place of a dimension has its own number."""
        return self.kind == Kind.CONST and self.number == Sum.of({self.iota[0]: 1})

    @property
    def sum(self) -> Sum:
        """The number; 0 where it is not followed."""
        return self.number or NONE

    def __str__(self) -> str:
        dims = ", ".join(str(dim or "-") for dim in self.dims)
        return f"{self.kind.name.lower()}[{dims}] {self.sum}".rstrip()


class UnknownError(Exception):
    """Nothing is known of what a line gives; `results` has the kind `any`."""

    def __init__(self, results: Any, why: str) -> None:
        super().__init__(why)
        self.results = results


class RefusedError(Exception):
    """The listing proves nothing; the message names the operator, and its line."""


class Checker:
    """The values of one listing, as far as it is read.

    Args:
        lines: [name, operator, {argument: value}, shapes, dtypes] each.
        dispatched: ATen's operators that the tape calls through PyTorch's dispatcher.
        on_gpu: whether elementwise operators have a thread for each element.

    Raises:
        RefusedError: it is no listing of a step.
    """

    def __init__(self, lines: Sequence[Line], dispatched: Iterable[str], on_gpu: bool) -> None:
        self.dispatched, self.on_gpu = frozenset(dispatched), on_gpu
        self.values: dict[str, Any] = {}  # By line.
        self.buffers: dict[str, str] = {}  # Line -> the state that it is, or is the first part of.
        self.content: dict[str, Value] = {}  # What the step has written to buffers of the batch.
        self.memory: dict[str, str] = {}  # Line -> the first line whose memory it shares.
        self.bounds = Bounds()
        self.calls = {line[0]: line for line in lines}
        accepts = [line[2] for line in lines if line[1] == "accept"]
        held = {line[2].get("name"): line[3][0] for line in lines if line[1] == "get"}
        if len(accepts) != 1 or "batch.state_indices" not in held:
            raise RefusedError(f"{len(accepts)} calls of accept, not one of a step's requests")
        self.active = accepts[0]["active"]
        self.num_reqs = held["batch.state_indices"][0]
        self.most_rows = held.get("batch.prompt_ids", [0])[0]

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
        if found.those("goal"):
            return replace(found, kind=Kind.ANY, why=self.because("has rows of another request"))
        if "together" in found.facts and self.op not in tables.REPORTS:
            return replace(found, kind=Kind.ANY, why=self.because("has later rows of its request"))
        return found

    def unknown(self, why: str, *sources: Value) -> NoReturn:
        """Stop at the line: nothing is known of what it gives."""
        raise UnknownError(self.nothing(why, *sources), self.because(why, *sources))

    def need(self, is_known: bool, why: str, *sources: Value) -> None:
        """Stop at the line, if it is not as a rule needs it."""
        if not is_known:
            self.unknown(why, *sources)

    def nothing(self, why: str, *sources: Value) -> Any:
        """Results of which nothing is known, because of this line or of one before."""
        why = self.because(why, *sources)
        made = [Value(shape, (None,) * len(shape), Kind.ANY, why=why) for shape in self.shapes]
        return made if len(made) > 1 else made[0]

    def because(self, why: str, *sources: Value) -> str:
        """Why nothing is known: this line, or one before."""
        here = f"{self.op} ({self.name}) {why}"
        return next((v.why for v in sources if v.kind == Kind.ANY), here)

    def make(
        self,
        dims: Sequence[Layout],
        kind: Kind,
        named: Sum | None = None,
        facts: Iterable[Any] = (),
    ) -> Value:
        if kind == Kind.ANY:
            self.unknown("", *(v for v in map(self.at, self.args) if isinstance(v, Value)))
        is_place = named is not None and bool(named.places)
        kind = Kind.PLACE if is_place else Kind.OWN if kind == Kind.PLACE else kind
        if f"%{self.name}" == self.active:
            facts = {*facts, ("if", "active"), ("else", "off")}
        if kind == Kind.OWN and tuple(dims) == (REQUESTS,) and named is None:
            named = self.part(dims, [NONE] if "natural" in facts else [], [])
        return Value(self.shapes[0], tuple(dims), kind, named, frozenset(facts))

    def part(self, dims: Sequence[Layout], low: Sums, high: Sums, end: str = "") -> Sum:
        """The line's result as a part of sums, with lower and upper bounds."""
        sizes = zip(reversed(dims), reversed(self.shapes[0]), strict=False)
        differs = any(dim is None and size != 1 for dim, size in sizes)
        return self.bounds.add("~" * differs + self.name + end, low, high)

    def as_bounds(self, value: Any) -> Value | None:
        """Where requests' rows begin, by request, and where the last one's end; None: another."""
        if not isinstance(value, Value) or value.number is None:
            return None
        part, count = value.iota
        if part and value.number == Sum.of({part: count}) and self.num_reqs + 1 in value.shape:
            dims = tuple("bounds" if size != 1 else None for size in value.shape)
            return replace(value, dims=dims, kind=Kind.PLACE, number=ONE.starts() * count)
        return value if "bounds" in value.dims else None

    def meet(self, *given: Any, facts: Iterable[Any] = ()) -> Value:
        """What is computed element by element of values that name no places."""
        dims, kind, _ = self.join(*given)
        if kind == Kind.PLACE:
            self.unknown("has numbers of places")
        return self.make(dims, kind, None, facts)

    def join(self, *given: Any) -> tuple[list[Layout], Kind, list[Value]]:
        """What is computed element by element: its dimensions, its kind, and the operands.

        Rows of two layouts must not meet, nor rows and numbers that follow from their places.
        """
        values = [v if isinstance(v, Value) else scalar(v) for v in given]
        rank = max(len(v.dims) for v in values)
        dims: list[Layout] = [None] * rank
        for v in values:
            for axis, dim in enumerate(v.dims, rank - len(v.dims)):
                is_only = self.num_reqs == v.shape[axis - rank] == 1
                if dim is not None and dims[axis] not in (None, dim) and not is_only:
                    self.unknown("has rows of two layouts", *values)
                dims[axis] = dims[axis] if dim is None else dim
        values = [self._resolved(v, dims[rank - len(v.dims) :]) for v in values]
        if any(v.kind == Kind.ANY or v.those("goal") for v in values):
            self.unknown("has rows that may be another request's", *values)
        kinds = {v.kind for v in values}
        if kinds & {Kind.PAIR, Kind.DIAGONAL} or sum(isinstance(dim, Sum) for dim in dims) > 1:
            return dims, Kind.PAIR, values
        return dims, max(kinds), values

    def _resolved(self, value: Value, dims: Sequence[Layout]) -> Value:
        """An operand whose numbers of places are those of the result's dimensions."""
        part, count = value.iota
        is_count = count > 0 and value.sum - Sum.of({part: count}) in (NONE, ONE)
        is_only = is_count and self.num_reqs == max(value.shape) == 1
        met = [
            new
            for size, old, new in zip(value.shape, value.dims, dims, strict=True)
            if old is None and new is not None and (size != 1 or is_only)
        ]
        if value.kind == Kind.ANY or not met:
            return value
        if "uniform" in value.facts:
            return replace(value, dims=tuple(dims))
        if count and len(met) == 1 and value.kind == Kind.CONST:
            return self.of_rows(value, dims, met[0])
        self.unknown("has rows, and numbers that follow from their places")

    def of_rows(self, value: Value, dims: Sequence[Layout], layout: Layout) -> Value:
        """Numbers of a dimension's places, as those of rows."""
        if not isinstance(layout, Sum) and layout != "bounds":
            self.unknown("has numbers of places")
        part, count = value.iota
        row = ONE.starts() if layout == "bounds" else self.bounds.row(layout)
        named = value.sum - Sum.of({part: count}) + row * count
        return replace(value, dims=tuple(dims), kind=Kind.PLACE, number=named)


def scalar(given: Any) -> Value:
    """A number that is given, as a value."""
    is_whole = isinstance(given, int) or (isinstance(given, float) and given.is_integer())
    return Value((), (), Kind.CONST, NONE + int(given) if is_whole else None)

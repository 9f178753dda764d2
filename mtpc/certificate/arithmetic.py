"""Rules of arithmetic by element, of comparisons, of `where`, and of folds along a dimension."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from mtpc.certificate import tables
from mtpc.certificate.checker import REQUESTS, Checker, Kind, Layout, Value, is_iota
from mtpc.certificate.moves import same_pages
from mtpc.certificate.sums import REQUEST, Sum, layout_of, minus, number, places, plus, start


def _is_exact(c: Checker) -> bool:
    """Whether the bits of an element follow from its operands alone."""
    if c.base in tables.EXACT:
        return True
    if c.base == "pow":
        power, dtype = c.args["exponent"], c.dtypes[0]
        return power == 2 or (power == -0.5 and dtype == "float32") or c.on_gpu
    if c.on_gpu:
        return c.base in tables.THREADS
    return c.base in tables.INTERPRETED and c.op not in c.dispatched


def elementwise(c: Checker) -> Value:
    names = ("other", "self") if c.base == "rsub" else ("self", "other")
    extra = [c.at(name) for name in ("min", "max", "mask", "value", "exponent")]
    dims, kind, values = c.join(*(v for v in (*map(c.at, names), *extra) if v is not None))
    if not _is_exact(c) and kind != Kind.PLACE:
        c.unknown("gives bits that may depend on the place of an element")
    if c.at("other") is None:
        return _of_one(c, dims, kind, values[0])
    one, other = values[:2]
    if kind == Kind.PAIR:
        return _of_two(c, dims, one, other)
    facts = _facts(c, one, other)
    named = _arithmetic(c, dims, one, other)
    if kind == Kind.PLACE and named is None and (not facts or c.base == "__and__"):
        c.unknown("computes with numbers of places")
    return c.make(dims, kind, named, facts)


def _of_two(c: Checker, dims: Sequence[Layout], one: Value, other: Value) -> Value:
    """Rows against requests, or against rows."""
    kinds, are_requests = {one.kind, other.kind}, one.number == other.number == REQUEST
    are_rows = are_requests or (one.number == other.number == _row(c, one, other))
    if Kind.PLACE in kinds and not (are_rows and c.base in tables.COMPARISONS):
        c.unknown("computes with numbers of places", one, other)
    if c.base == "eq" and are_requests:
        return c.make(dims, Kind.DIAGONAL)
    is_masked = c.base in ("mul", "__and__") and Kind.DIAGONAL in kinds and Kind.UPTO not in kinds
    facts = _both(one, other) if is_masked and c.base == "__and__" else ()
    return c.make(dims, Kind.DIAGONAL if is_masked else Kind.PAIR, None, facts)


def _row(c: Checker, one: Value, other: Value) -> Sum | None:
    """The number of a row, if both are such numbers."""
    layout = layout_of(one.number)
    return None if layout is None else plus((start(layout), 1), (c.offset(layout), 1))


def _arithmetic(c: Checker, dims: Sequence[Layout], one: Value, other: Value) -> Sum | None:
    """What the result is as a sum; None: it is not followed."""
    a, b = one.number, other.number
    if c.base == "mul" and b is not None and a == plus((REQUEST, 1), (number(1), 1)):
        return (("numbered 1", 1),) if "on" in other.those("if") else None
    count = dict(b).get("1", 0) if b is not None and set(dict(b)) <= {"1"} else None
    if c.base == "remainder" and count and count > 0 and Kind.PLACE not in (one.kind, other.kind):
        return c.part(dims, [()], [number(count - 1)], is_loose=True)
    moved = one.those("most") | other.those("most")
    if a is None or b is None or moved or c.args.get("alpha", 1) != 1 or _share(a, b, "~"):
        return None
    if c.base == "mul" and count is not None:
        return plus((a, count))
    if c.base in ("add", "sub", "rsub"):
        made = plus((a, 1), (b, 1 if c.base == "add" else -1))
        widths = {part.partition("//")[2] for part, _ in made} - {""}
        return made if len(widths) < 2 else None  # Windows of two widths are not counted together.
    if c.base in ("minimum", "maximum") and places(a) == places(b):
        rests = [minus(given, places(given)) for given in (a, b)]
        return plus((places(a), 1), (_extreme(c, dims, layout_of(a) or (), *rests), 1))
    if c.base == "floor_divide" and count and count > 0:
        whole = tuple((part, n // count) for part, n in a if n % count == 0)
        rest = tuple((part, n) for part, n in a if n % count)
        if rest and not places(rest):
            low = plus((rest, Fraction(1, count)), (number(1), Fraction(1 - count, count)))
            high = plus((rest, Fraction(1, count)))
            return plus((whole, 1), (c.part(dims, [low], [high], end=f"//{count}"), 1))
        return None if rest else whole
    return None


def _share(one: Sum, other: Sum, word: str = "") -> bool:
    return any(part.startswith(word) for part in dict(one).keys() & dict(other).keys())


def _extreme(c: Checker, dims: Sequence[Layout], layout: Sum, one: Sum, other: Sum) -> Sum:
    """The smaller of two numbers of a request, or the larger."""
    holds = c.bounds.holds
    if c.base == "maximum":
        tops = [one, other, *(plus((a, 1), (n, 1)) for a, n in c.accepted(layout))]
        high = [top for top in tops if holds(minus(top, one)) and holds(minus(top, other))]
        return c.part(dims, [one, other], high)
    is_count = one in c.layouts - c.masked  # A request that is on has a row.
    is_count |= holds(minus(one, REQUESTS))
    low = [REQUESTS] if is_count and holds(minus(other, REQUESTS)) else []
    low += [()] if holds(one) and holds(other) else []
    return c.part(dims, low, [one, other], None if is_count else False)


def _of_one(c: Checker, dims: Sequence[Layout], kind: Kind, value: Value) -> Value:
    if c.base in ("to", "_to_copy", "clone", "contiguous", "type_as"):
        is_whole = "float" not in c.dtypes[0]
        named = value.number if is_whole else None
        if kind == Kind.PLACE and named is None:
            c.unknown("computes with numbers of places")
        return c.make(dims, value.kind, named, value.facts)
    named, least, most = value.number, c.args.get("min"), c.args.get("max")
    is_place = kind == Kind.PLACE or (kind == Kind.CONST and named is not None)
    if is_place and c.base == "clamp" and least in (None, 0):
        is_request = "nth" in value.facts and most == c.num_reqs - 1
        moved = {("most", most)} if most is not None and not is_request else ()
        return c.make(dims, kind, named, {*moved, *value.facts} - {"nth"})
    if kind == Kind.PLACE:
        c.unknown("computes with numbers of places")
    if c.base != "clamp" or named is None or "float" in c.dtypes[0]:
        return c.make(dims, kind)
    low = [number(least)] if least is not None else []
    high = [named] if least is None or c.bounds.holds(minus(named, number(least))) else []
    high += [number(most)] if most is not None else []
    is_loose = not all(part.startswith("off(") for part, _ in named)
    return c.make(dims, kind, c.part(dims, low, high, is_loose))


def _both(one: Value, other: Value) -> set[Any]:
    """What holds if two conditions do."""
    is_active = "active" in other.those("if")
    lost = set() if is_active or other.kind == Kind.PAIR else {"anchors"}
    return {f for f in one.facts | other.facts if isinstance(f, str) or f[0] == "if"} - lost


def _facts(c: Checker, one: Value, other: Value) -> set[Any]:
    """What a comparison says where it is true, and where it is not."""
    a, b = one.number, other.number
    if c.base == "__and__":
        return _both(one, other)
    if a is None or b is None or c.base not in tables.COMPARISONS:
        return set()
    if "nth" in one.facts:
        is_live = c.base == "lt" and b == number(c.num_reqs)
        return _if("live", *["active"] * (one.dims[0] in c.masked)) if is_live else set()
    if places(a):
        is_null = _base(a).startswith(("slot", "page")) and not b
        if "kept" in one.facts and b == number(-1) and c.base in ("eq", "ne"):
            word = "else" if c.base == "eq" else "if"
            return {(word, "live"), (word, "active")}
        is_end = layout_of(a) is not None and minus(a, start(layout_of(a) or ())) == layout_of(a)
        is_fit = is_end and c.base == "le" and b == number(c.most_rows or 0)
        return {("else", "off")} if is_fit else {"null"} if is_null else set()
    if _share(a, b) or (places(b) and not places(a)):
        return set()
    more = {"gt": (minus(a, b), -1), "ge": (minus(a, b), 0), "lt": (minus(b, a), -1),
            "le": (minus(b, a), 0)}  # fmt: skip
    if c.base not in more:
        return set()
    gap, least = more[c.base]
    true = plus((gap, 1), (number(1), least))
    false = plus((gap, -1), (number(1), -1 - least))
    return {("if", true), ("else", false), *([("if", "on"), ("else", "off")] if _is_on(c, b, a) else [])}


def _is_on(c: Checker, b: Sum, a: Sum) -> bool:
    """Whether "more than 0" says that a request is on: the number counts its rows, too."""
    if c.base != "gt" or b:
        return False
    counts = [*(c.layouts - c.masked), number(1)]
    return any(c.bounds.holds(minus(a, count)) for count in counts)


def _if(*facts: str) -> set[Any]:
    return {("if", fact) for fact in facts}


def _base(given: Sum | None) -> str:
    """The only part that is a place."""
    found = places(given)
    return found[0][0] if len(found) == 1 else ""


def compare(c: Checker) -> Value:
    """Also: the numbers of rows against the ends, or against one row, of every request."""
    one, other = c.at("self"), c.at("other")
    if isinstance(other, Value) and other.dims == (None, REQUESTS) and one.shape[1:] == (1,):
        is_row = is_iota(one) or (one.number == REQUEST and one.dims[0] == REQUESTS)
        layout = layout_of(other.number)
        if is_row and layout is not None:
            rest = minus(other.number or (), start(layout))
            if c.base == "ge" and rest == layout:
                return c.make((layout, REQUESTS), Kind.PAIR, facts={"ended"})
            if c.base == "eq" and c.anchored(rest, layout):
                return c.make((layout, REQUESTS), Kind.DIAGONAL, facts={"anchors"})
    return elementwise(c)


def where(c: Checker) -> Value:
    condition, one, other = (c.at(name) for name in ("condition", "self", "other"))
    known = [_branch(condition, word) for word in ("if", "else")]
    one, other = (_met(c, v, facts) for v, facts in zip((one, other), known, strict=True))
    given = [v for v in (condition, one, other) if isinstance(v, Value)]
    if len(given) == 3:
        found = _either(c, condition, one, other)
    elif len(given) == 2:
        is_first = isinstance(one, Value)
        found = _replaced(c, condition, *((one, other) if is_first else (other, one)), is_first)
    else:
        found = c.meet(condition)
        ends = [number(given) for given in sorted((one, other))]
        if found.kind in (Kind.CONST, Kind.OWN) and isinstance(one, int) and isinstance(other, int):
            found = replace(found, number=c.part(found.dims, ends[:1], ends[1:], is_loose=True))
    together = {"together"} if any("together" in v.facts for v in given) else set()
    return replace(found, facts=found.facts | together)


def _branch(condition: Value, word: str) -> set[Any]:
    """What holds where a condition is true ("if"), or not ("else")."""
    flag = condition.number or ()
    found = minus(flag, REQUESTS) if word == "if" else minus((), flag)
    return condition.those(word) | ({found} if len(flag) == 1 else set())


def _met(c: Checker, value: Any, known: Collection[Any]) -> Any:
    """A value without the conditions that hold where it is taken."""
    if not isinstance(value, Value):
        return value
    sums = {fact for fact in known if isinstance(fact, tuple)}
    met = {goal for goal in value.those("goal") if c.bounds.holds(goal, sums)}
    taken = {("goal", goal) for goal in met}
    return replace(value, facts=value.facts - taken | {("beyond", goal) for goal in met})


def _replaced(c: Checker, condition: Value, value: Value, other: Any, is_first: bool) -> Value:
    """Elements become a number where a condition holds, or where it does not."""
    known = _branch(condition, "if" if is_first else "else")
    dims, kind, (_, value) = c.join(condition, value)
    named, holds, low, high = value.number, c.bounds.holds, [], []
    if value.kind == Kind.PLACE:
        return _masked(c, dims, value, other, known)
    beyond = {fact for fact in value.facts if fact[0] == "beyond" and is_first and other < 0}
    if kind == Kind.PLACE or named is None or not isinstance(other, int):
        return c.meet(condition, value, facts=beyond)
    if is_first and "off" in condition.those("else") and other == 0:
        low, high = [named], [named]
    elif holds(named) and other >= 0:
        flag = condition.number if not is_first else None
        low = [()]
        high = [plus((named, 1), (flag or (), other))] if other == 0 or flag else []
    part = c.part(dims, low, high) if kind in (Kind.CONST, Kind.OWN) else None
    if part and known & {"on", "active"} and other == 0:
        c.masked.add(part)
    return c.make(dims, kind, part, beyond)


def _masked(
    c: Checker, dims: Sequence[Layout], value: Value, other: Any, known: set[Any]
) -> Value:
    """Numbers of places of which some become 0, which is nobody's, or -1, which is none."""
    (part, count), *others = places(value.number)
    rest = minus(value.number or (), ((part, count),))
    is_state = not others and part.startswith(("slot", "page"))
    if is_state and other == 0 and c.within(rest, number(1 - count), ()):
        return c.make(dims, Kind.PLACE, value.number)
    if is_state and other == -1 and ({"live", "active"} <= known or "kept" in value.facts):
        sums = {("if", fact) for fact in known if isinstance(fact, tuple)}
        return c.make(dims, Kind.PLACE, value.number, {"kept", *sums})
    c.unknown("replaces numbers of places")


def _either(c: Checker, condition: Value, one: Value, other: Value) -> Value:
    if one.those("goal"):
        c.unknown("has rows that may be another request's", one)
    if "accepted" in condition.facts:
        return c.make(one.dims, one.kind, one.number)
    if "anchors" in condition.facts and ("next", condition.dims[0]) in other.facts:
        if c.join(condition, one)[1] not in (Kind.OWN, Kind.UPTO):
            c.unknown("mixes rows", condition, one)
        return c.make(condition.dims, Kind.UPTO)
    dims, kind, _ = c.join(condition, one, other)
    named = same_pages(c, dims, (one, other)) if kind == Kind.PLACE else None
    if named:
        return c.make(dims, kind, named)
    return c.meet(condition, one, other)


def product(c: Checker) -> Value:
    """Small matrices of rows, whose products the interpreter adds up in one order."""
    one, other = c.at("self"), c.at("other") or c.at("mat2")
    if c.on_gpu or c.op in c.dispatched or one.dims[-1] is not None or other.dims[-2] is not None:
        c.unknown("adds in an order that may depend on the rows", one, other)
    one = replace(one, shape=(*one.shape[:-1], 1))
    return c.meet(one, replace(other, shape=(*other.shape[:-2], 1, other.shape[-1])))


def fold(c: Checker) -> Any:
    """What combines the elements of a dimension."""
    value, axes = c.at("self"), c.args.get("dim")
    if c.base == "layer_norm":
        value, axes = c.at("input"), [-1 - axis for axis in range(len(c.args["normalized_shape"]))]
    elif axes is None or axes == []:
        axes = [-1] if c.base in ("topk", "sort") else list(range(len(value.dims)))
    axes = [axis % len(value.dims) for axis in (axes if isinstance(axes, list) else [axes])]
    is_kept = c.args.get("keepdim") or c.base in tables.KEPT
    dims = [dim for axis, dim in enumerate(value.dims) if is_kept or axis not in axes]
    place = _folded_place(c, value, axes, dims)
    if place is not None:
        return place
    if any(value.dims[axis] is not None and value.shape[axis] != 1 for axis in axes):
        c.unknown("combines rows", value)
    if value.kind in (Kind.PLACE, Kind.PAIR, Kind.DIAGONAL, Kind.ANY):
        c.unknown("combines numbers of places", value)
    is_apart = c.base in tables.ROW_BY_ROW and not any(value.dims[min(axes) :])
    by_torch = c.on_gpu or (c.op in c.dispatched and not is_apart)
    if by_torch and c.base in tables.SUMS and value.kind != Kind.CONST and "float" in c.dtypes[0]:
        c.unknown("adds in an order that may depend on the rows")
    made = [Value(shape, tuple(dims), value.kind) for shape in c.shapes]
    return made if len(made) > 1 else c.make(dims, value.kind)


def _folded_place(
    c: Checker, value: Value, axes: list[int], dims: Sequence[Layout]
) -> Value | None:
    """The result where it names places, or is a request's own; None for others."""
    ends = c.as_bounds(value)
    if c.base == "amax" and (ends or _base(value.number) == "numbered 1"):
        layout = layout_of(ends.number) if ends else REQUESTS
        return c.make([None] * len(dims), Kind.PLACE, start(layout or (), "used"))
    if c.base == "cumsum" and value.dims == (REQUESTS,) and value.kind == Kind.OWN:
        return c.make(dims, Kind.PLACE, c.ends(value.number or ()))
    if c.base == "cumsum" and value.kind == Kind.ANY and value.shape == (c.num_reqs,):
        return c.make([REQUESTS], Kind.PLACE, c.ends(c.bounds.add(c.args["self"][1:])))
    if c.base == "sum" and "ended" in value.facts and axes == [1]:
        return c.make(dims, Kind.PLACE, REQUEST, {"nth"})
    is_by_request = value.kind == Kind.DIAGONAL and value.dims[1] == REQUESTS
    if is_by_request and c.base in ("sum", "any") and axes == [1]:
        return c.make(dims, Kind.OWN, None, value.facts & {"anchors"})
    return None

"""Rules of arithmetic by element, of comparisons, of `where`, and of folds along a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from mtpc.certificate import tables
from mtpc.certificate.checker import REQUESTS, Checker, Kind, Layout, Value
from mtpc.certificate.moves import same_pages
from mtpc.certificate.sums import NONE, ONE, Sum


def _is_exact(c: Checker) -> bool:
    """Whether the bits of an element follow from its operands alone."""
    if c.base == "pow":
        power, dtype = c.args["exponent"], c.dtypes[0]
        return power == 2 or (power == -0.5 and dtype == "float32") or c.on_gpu
    is_ours = c.base in (tables.THREADS if c.on_gpu else tables.INTERPRETED)
    return c.base in tables.EXACT or (is_ours and (c.on_gpu or c.op not in c.dispatched))


def elementwise(c: Checker) -> Value:
    names = ("other", "self") if c.base == "rsub" else ("self", "other")
    given = map(c.at, (*names, "min", "max", "mask", "value", "exponent"))
    dims, kind, values = c.join(*(v for v in given if v is not None))
    is_exact = _is_exact(c) or kind == Kind.PLACE
    c.need(is_exact, "gives bits that may depend on the place of an element")
    if c.at("other") is None:
        return _of_one(c, dims, kind, values[0])
    one, other = values[:2]
    if kind == Kind.PAIR:
        return _of_two(c, dims, one, other)
    facts, named = _facts(c, one, other), _arithmetic(c, dims, one, other)
    is_known = kind != Kind.PLACE or named is not None or (facts and c.base != "__and__")
    c.need(bool(is_known), "computes with numbers of places")
    return c.make(dims, kind, named, facts)


def _of_two(c: Checker, dims: Sequence[Layout], one: Value, other: Value) -> Value:
    """Rows against requests, or against rows."""
    kinds, layout = {one.kind, other.kind}, one.sum.layout or NONE
    are_rows = one.number == other.number == c.bounds.row(layout)
    is_known = Kind.PLACE not in kinds or (are_rows and c.base in tables.COMPARISONS)
    c.need(is_known, "computes with numbers of places", one, other)
    is_masked = c.base in ("mul", "__and__") and Kind.DIAGONAL in kinds and Kind.UPTO not in kinds
    is_same = c.base == "eq" and are_rows and layout == REQUESTS
    facts = _facts(c, one, other) if is_masked and c.base == "__and__" else ()
    return c.make(dims, Kind.DIAGONAL if is_masked or is_same else Kind.PAIR, None, facts)


def _arithmetic(c: Checker, dims: Sequence[Layout], one: Value, other: Value) -> Sum | None:
    """What the result is as a sum; None: it is not followed."""
    a, b, count = one.sum, other.sum, other.sum["1"]
    is_number = other.number is not None and b == ONE * count
    if c.base == "mul" and a == ONE.starts() + 1 and "on" in other.those("if"):
        return Sum.of({"numbered 1": 1})
    if c.base == "remainder" and is_number and count > 0 and one.kind < Kind.PLACE:
        return c.bounds.loosen(c.part(dims, [NONE], [ONE * (count - 1)]))
    is_moved = one.those("most") | other.those("most") or c.args.get("alpha", 1) != 1
    if None in (one.number, other.number) or is_moved or a.shares(b, "~"):
        return None
    if c.base in ("add", "sub", "rsub"):
        made = a + b if c.base == "add" else a - b
        widths = {part.partition("//")[2] for part, _ in made.parts} - {""}
        return made if len(widths) < 2 else None  # Windows of two widths are not counted together.
    if c.base == "mul" and is_number:
        return a * count
    if c.base in ("minimum", "maximum") and a.places == b.places:
        return a.places + _extreme(c, dims, a.layout or NONE, a.own, b.own)
    if c.base == "floor_divide" and is_number and count > 0:
        rest = Sum.of({part: n for part, n in a.parts if n % count})
        low, high = ((rest - least) * Fraction(1, count) for least in (count - 1, 0))
        part = c.part(dims, [low], [high], f"//{count}") if rest else NONE
        return None if rest.places else (a - rest) * Fraction(1, count) + part
    return None


def _extreme(c: Checker, dims: Sequence[Layout], layout: Sum, one: Sum, other: Sum) -> Sum:
    """The smaller of two numbers of a request, or the larger."""
    holds, bounds = c.bounds.holds, c.bounds
    if c.base == "maximum":
        tops = (one, other, *bounds.accepted(layout))
        return c.part(dims, [one, other], [t for t in tops if holds(t - one) and holds(t - other)])
    low = [ONE * n for n in (0, 1) if holds(one - n) and holds(other - n)]
    return c.part(dims, low, [one, other])


def _of_one(c: Checker, dims: Sequence[Layout], kind: Kind, value: Value) -> Value:
    named = value.number if "int" in c.dtypes[0] or c.base in ("clone", "contiguous") else None
    c.need(kind != Kind.PLACE or named is not None, "computes with numbers of places")
    if c.base in ("to", "_to_copy", "clone", "contiguous", "type_as"):
        return c.make(dims, value.kind, named, value.facts)
    least, most = c.args.get("min"), c.args.get("max")
    if c.base == "clamp" and named is not None and least in (None, 0) and kind in _PLACED:
        is_request = "nth" in value.facts and most == c.num_reqs - 1
        moved = {("most", most)} if most is not None and not is_request else set()
        return c.make(dims, kind, named, {*moved, *value.facts} - {"nth"})
    c.need(kind != Kind.PLACE, "computes with numbers of places")
    if c.base != "clamp" or named is None:
        return c.make(dims, kind)
    is_above = least is None or c.bounds.holds(named - least)
    high = [*[named] * is_above, *(ONE * n for n in [most] if n is not None)]
    part = c.part(dims, [ONE * n for n in [least] if n is not None], high)
    is_tight = all(name.startswith("off(") for name, _ in named.parts)
    return c.make(dims, kind, part if is_tight else c.bounds.loosen(part))


_PLACED = (Kind.CONST, Kind.PLACE)


def _facts(c: Checker, one: Value, other: Value) -> set[Any]:
    """What a comparison says where it is true, and where it is not."""
    a, b = one.sum, other.sum
    if c.base == "__and__":
        is_kept = "active" in other.those("if") or other.kind == Kind.PAIR
        both = (one.facts | other.facts) - (set() if is_kept else {"anchors"})
        return {fact for fact in both if isinstance(fact, str) or fact[0] == "if"}
    if None in (one.number, other.number) or c.base not in tables.COMPARISONS:
        return set()
    if "nth" in one.facts:
        words = ["live", *["active"] * (one.dims[0] in c.bounds.masked)]
        return {("if", w) for w in words if c.base == "lt" and b == ONE * c.num_reqs}
    if a.places:
        if "kept" in one.facts and b == ONE * -1 and c.base in ("eq", "ne"):
            return {("else" if c.base == "eq" else "if", word) for word in ("live", "active")}
        if c.base == "le" and a.layout and a.own == a.layout and b == ONE * c.most_rows:
            return {("else", "off")}  # Rows that do not fit the bucket are not given.
        is_null = a.places.parts[0][0].startswith(("slot", "page")) and not b
        return {"null"} if is_null else set()
    if b.places or a.shares(b) or c.base in ("eq", "ne"):
        return set()
    gap = (a - b if c.base[0] == "g" else b - a) - (c.base[1] == "t")
    found = {("if", gap), ("else", NONE - gap - 1)}
    if c.base == "gt" and not b:
        if f"%{c.name}" == c.active and len(a.parts) == 1:
            c.bounds.add(a.parts[0][0], [ONE])  # Bounds are those of requests that are on.
        found |= {("else", "off")} if c.bounds.holds(a - 1) else set()
        found |= {("if", "on")} if a in c.bounds.masked else set()
    return found


def compare(c: Checker) -> Value:
    """Also: the numbers of rows against the ends, or against one row, of every request."""
    one, other = c.at("self"), c.at("other")
    if isinstance(other, Value) and other.dims == (None, REQUESTS) and one.shape[1:] == (1,):
        layout = other.sum.layout
        is_row = one.is_count or (one.number, one.dims[0]) == (ONE.starts(), REQUESTS)
        if is_row and c.base == "ge" and other.sum.own == layout:
            return c.make((layout, REQUESTS), Kind.PAIR, facts={"ended"})
        if is_row and c.base == "eq" and layout and other.sum.own in c.bounds.accepted(layout):
            return c.make((layout, REQUESTS), Kind.DIAGONAL, facts={"anchors"})
    return elementwise(c)


def where(c: Checker) -> Value:
    condition, one, other = (c.at(name) for name in ("condition", "self", "other"))
    flag = condition.sum if len(condition.sum.parts) == 1 else None
    true = condition.those("if") | ({flag - 1} if flag else set())
    false = condition.those("else") | ({NONE - flag} if flag else set())
    one, other = _met(c, one, true), _met(c, other, false)
    given = [v for v in (condition, one, other) if isinstance(v, Value)]
    if len(given) == 3:
        found = _either(c, condition, one, other)
    elif isinstance(one, Value):
        found = _replaced(c, condition, one, other, true, "off" in false)
    elif isinstance(other, Value):
        found = _replaced(c, condition, other, one, false, None)
    else:
        found = c.meet(condition)
        if found.kind <= Kind.OWN and isinstance(one, int) and isinstance(other, int):
            low, high = ([ONE * n] for n in sorted((one, other)))
            found = replace(found, number=c.bounds.loosen(c.part(found.dims, low, high)))
    together = {"together"} if any("together" in v.facts for v in given) else set()
    return replace(found, facts=found.facts | together)


def _met(c: Checker, value: Any, known: set[Any]) -> Any:
    """A value without the conditions that hold where it is taken."""
    if not isinstance(value, Value):
        return value
    sums = {fact for fact in known if isinstance(fact, Sum)}
    met = {goal for goal in value.those("goal") if c.bounds.holds(goal, sums)}
    kept = value.facts - {("goal", goal) for goal in met}
    return replace(value, facts=kept | {("beyond", goal) for goal in met})


def _replaced(
    c: Checker, condition: Value, value: Value, new: Any, known: set[Any], by_on: bool | None
) -> Value:
    """Elements become a number: where a condition is true (`by_on` is None), or not. `by_on`:
    it is true wherever a request is on."""
    dims, kind, (_, value) = c.join(condition, value)
    named, low, high = value.sum, [], []
    if value.kind == Kind.PLACE:
        (part, count), *others = named.places.parts
        is_state = not others and part.startswith(("slot", "page"))
        if is_state and new == 0 and c.bounds.within(named.own, ONE * (1 - count), NONE):
            return c.make(dims, kind, named)  # Nobody's slot or page.
        is_kept = new == -1 and ({"live", "active"} <= known or "kept" in value.facts)
        c.need(is_state and is_kept, "replaces numbers of places")
        sums = {("if", fact) for fact in known if isinstance(fact, Sum)}
        return c.make(dims, kind, named, {"kept", *sums})
    beyond = {f for f in value.facts if f[0] == "beyond" and by_on is not None and new < 0}
    if kind > Kind.UPTO or value.number is None or not isinstance(new, int):
        return c.meet(condition, value, facts=beyond)
    flag = condition.sum * new if by_on is None else NONE
    if by_on and new == 0:
        low, high = [named], [named]
    elif c.bounds.holds(named) and new >= 0:
        low, high = [NONE], [named + flag] if new == 0 or flag else []
    made = c.part(dims, low, high)
    c.bounds.masked |= {made} if by_on and new == 0 and {"on", "active"} & known else set()
    return c.make(dims, kind, made, beyond)


def _either(c: Checker, condition: Value, one: Value, other: Value) -> Value:
    c.need(not one.those("goal"), "has rows that may be another request's", one)
    if "accepted" in condition.facts:
        return c.make(one.dims, one.kind, one.number)
    if "anchors" in condition.facts and ("next", condition.dims[0]) in other.facts:
        kind = c.join(condition, one)[1]
        c.need(kind in (Kind.OWN, Kind.UPTO), "mixes rows", condition, one)
        return c.make(condition.dims, Kind.UPTO)
    dims, kind, _ = c.join(condition, one, other)
    named = same_pages(c, dims, (one, other)) if kind == Kind.PLACE else None
    return c.make(dims, kind, named) if named else c.meet(condition, one, other)


def product(c: Checker) -> Value:
    """Small matrices of rows, whose products the interpreter adds up in one order."""
    one, other = c.at("self"), c.at("other") or c.at("mat2")
    is_ours = not c.on_gpu and c.op not in c.dispatched
    is_small = is_ours and one.dims[-1] is None and other.dims[-2] is None
    c.need(is_small, "adds in an order that may depend on the rows", one, other)
    one = replace(one, shape=(*one.shape[:-1], 1))
    return c.meet(one, replace(other, shape=(*other.shape[:-2], 1, other.shape[-1])))


def fold(c: Checker) -> Any:
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
    is_apart = all(value.dims[axis] is None or value.shape[axis] == 1 for axis in axes)
    c.need(is_apart, "combines rows", value)
    c.need(value.kind <= Kind.UPTO, "combines numbers of places", value)
    is_apart = c.base in tables.ROW_BY_ROW and not any(value.dims[min(axes) :])
    by_torch = c.on_gpu or (c.op in c.dispatched and not is_apart)
    is_sum = c.base in tables.SUMS and value.kind != Kind.CONST and "float" in c.dtypes[0]
    c.need(not (is_sum and by_torch), "adds in an order that may depend on the rows")
    made = [Value(shape, tuple(dims), value.kind) for shape in c.shapes]
    return made if len(made) > 1 else c.make(dims, value.kind)


def _folded_place(
    c: Checker, value: Value, axes: list[int], dims: Sequence[Layout]
) -> Value | None:
    """The result where it names places, or is a request's own; None for others."""
    firsts, is_each = c.as_bounds(value), axes == [1] and value.dims[1] == REQUESTS
    if c.base == "amax" and (firsts or str(value.sum) == "1*numbered 1"):
        layout = firsts.sum.layout if firsts else ONE
        return c.make([None] * len(dims), Kind.PLACE, (layout or NONE).starts("used"))
    if c.base == "cumsum" and value.dims == (REQUESTS,) and value.kind == Kind.OWN:
        made = c.calls[c.args["self"][1:]]  # Rows of requests that are on, if no windows' count.
        ends = c.bounds.known.get(made[0], (0, [], []))[1]
        if made[2].get("condition") == c.active and not any("//" in str(end) for end in ends):
            c.bounds.add(made[0], [ONE])
        return c.make(dims, Kind.PLACE, c.bounds.ends(value.sum))
    if c.base == "cumsum" and value.kind == Kind.ANY and value.shape == (c.num_reqs,):
        return c.make(
            [REQUESTS], Kind.PLACE, c.bounds.ends(c.bounds.add(c.args["self"][1:], [ONE]))
        )
    if c.base == "sum" and "ended" in value.facts and is_each:
        return c.make(dims, Kind.PLACE, ONE.starts(), {"nth"})
    if c.base in ("sum", "any") and value.kind == Kind.DIAGONAL and is_each:
        return c.make(dims, Kind.OWN, None, value.facts & {"anchors"})
    return None

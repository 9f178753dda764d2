"""Rules of arithmetic by element, of comparisons, of `where`, and of folds along a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mtpc.certificate import tables
from mtpc.certificate.checker import REQUESTS, Checker, Kind, Layout, Value, spots, sum_of
from mtpc.certificate.lemmas import FACTS, lemma


def _is_exact(c: Checker) -> bool:
    """Whether the bits of an element follow from its operands alone."""
    if c.base in tables.EXACT:
        return True
    if c.base == "pow":
        number, dtype = c.args["exponent"], c.dtypes[0]
        return number == 2 or (number == -0.5 and dtype == "float32") or c.on_gpu
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
    facts = _facts(c, one, other)
    if kind == Kind.PAIR:
        return _of_two(c, dims, one, other, facts)
    tag = _tag(c, one, other)
    if kind == Kind.PLACE and not tag and (not facts or c.base == "__and__"):
        c.unknown("computes with numbers of places")
    return c.make(dims, kind, tag, facts)


def _of_two(c: Checker, dims: Sequence[Layout], one: Value, other: Value, facts: set[Any]) -> Value:
    """Rows against requests, or against rows."""
    kinds = {one.kind, other.kind}
    are_rows = one.tag == other.tag and one.tag[:1] in (("row",), ("request",))
    if Kind.PLACE in kinds and not (are_rows and c.base in tables.COMPARISONS):
        c.unknown("computes with numbers of places", one, other)
    if c.base == "eq" and one.tag == other.tag == ("request",):
        return c.make(dims, Kind.DIAGONAL)
    is_masked = c.base in ("mul", "__and__") and Kind.DIAGONAL in kinds and Kind.UPTO not in kinds
    return c.make(dims, Kind.DIAGONAL, (), facts) if is_masked else c.make(dims, Kind.PAIR)


def _tag(c: Checker, one: Value, other: Value) -> tuple[Any, ...]:
    """What the result of arithmetic names."""
    number = other.tag[1] if other.tag[:1] == ("#",) else None
    if c.args.get("alpha", 1) != 1 or (one.tag[:1] == ("shift",) and one.tag not in c.shifts):
        return ()
    if c.base == "mul" and one.tag == ("numbers",) and "on" in other.facts:
        return ("numbered",)
    if c.base == "mul" and one.tag == ("request",) and number is not None:
        return ("start", (("1", number),))
    if c.base == "add" and c.bounds(one) and c.bounds(other):
        return ("bounds", sum_of(c.bounds(one), c.bounds(other)))
    if one.tag[:1] == ("iota",) and number is not None and c.base == "mul":
        return ("iota", one.tag[1] * number)
    if one.tag == ("iota", 1) and number is not None and c.base == "sub" and number > 0:
        return ("before", number)
    is_whole = one.tag[:1] == ("place",) and number and one.tag[2] % number == 0
    if c.base == "floor_divide" and is_whole:
        return ("page", spots(one.tag[2] // number, one.tag[1]))
    if c.base == "remainder" and number is not None and Kind.PLACE not in (one.kind, other.kind):
        return ("mod", number)
    if c.base == "minimum" and one.tag[:1] == ("cnt",) and "positive" in other.facts:
        c.counts[((c.name, 1),)] = (one.tag[1], None)
        c.single |= {((c.name, 1),)} if "single" in other.facts else set()
    tag = lemma("sub" if c.base == "rsub" else c.base, one, other)
    if one.tag[:1] == ("tail+",) and c.counts.get(one.tag[2]) != (one.tag[1], None):
        return ()
    if c.base == "minimum" and tag and tag[1] not in c.counts:
        return ()
    if tag[:1] == ("window",):
        made = c.windows.get(tag[3], ("", "", "", ""))
        return ("window", *made[1:]) if (made[1], made[3]) == tag[1:3] else ()
    return tag


def _of_one(c: Checker, dims: Sequence[Layout], kind: Kind, value: Value) -> Value:
    if c.base in ("to", "_to_copy", "clone", "contiguous", "type_as"):
        return c.make(dims, value.kind, value.tag, value.facts)
    name, most = value.tag[0] if value.tag else "", c.args.get("max")
    if c.base == "clamp" and c.args["min"] == 0 and name == "off" and most is not None:
        return c.make(dims, kind, ("capped", value.tag[1], most + 1))
    if kind != Kind.PLACE and name != "before":
        return c.make(dims, kind)
    if c.base != "clamp" or c.args["min"] not in (None, 0):
        c.unknown("computes with numbers of places")
    tag = ("request",) if name == "nth" else value.tag
    return c.make(dims, kind, tag, {("most", most)} if most is not None else ())


def _facts(c: Checker, one: Value, other: Value) -> set[Any]:
    """What a comparison says where it is true."""
    number = other.tag[1] if other.tag[:1] == ("#",) else None
    name = one.tag[0] if one.tag else ""
    if c.base == "__and__":
        is_active = other.tag == ("cnt", ((c.active[1:], 1),))
        lost = set() if is_active or other.kind == Kind.PAIR else {"anchors"}
        return set(one.facts | other.facts) - lost
    if c.base == "lt" and name == "nth" and number == c.num_reqs:
        return {"live", "active"} if one.dims[0] in c.windows else {"live"}
    if c.base in ("ne", "eq") and name == "place" and "kept" in one.facts and number == -1:
        return {"live", "active"} if c.base == "ne" else {"nowhere"}
    found = lemma(c.base, one, other, FACTS)
    if found[:1] == ("fits",) and number != c.most_rows:
        return set()
    return {found if found[1:] else found[0]} if found else set()


def compare(c: Checker) -> Value:
    """Also: the numbers of rows against the ends, or against one row, of every request."""
    one, other = c.at("self"), c.at("other")
    if isinstance(other, Value) and other.dims == (None, REQUESTS) and one.shape[1:] == (1,):
        is_iota = one.tag == ("iota", 1) or (one.tag == ("request",) and one.dims[0] == REQUESTS)
        if is_iota and c.base == "ge" and other.tag[:1] == ("end",):
            return c.make((other.tag[1], REQUESTS), Kind.PAIR, facts={"ended"})
        if is_iota and c.base == "eq" and other.tag[:1] == ("anchor",):
            return c.make((other.tag[1], REQUESTS), Kind.DIAGONAL, facts={"anchors"})
    return elementwise(c)


_MASKED = {
    "pos*": ("pos", 2, 0, {"live", "active"}),
    "head": ("cnt", 1, 0, {"on"}),
    "place": ("place", 2, -1, {"live", "active"}),
    "spill": ("place", 2, -1, {"live", "active", "fewer"}),
}
"""What a number names that becomes another one where a condition does not hold: tag -> tag, how
many of its parameters, the other number, what the condition says."""


def where(c: Checker) -> Value:
    condition, one, other = (c.at(name) for name in ("condition", "self", "other"))
    one, other = _met(c, condition, one, "where"), _met(c, condition, other, "unless")
    is_each = isinstance(one, Value) and isinstance(other, Value)
    found = (_either if is_each else _replaced)(c, condition, one, other)
    given = [v for v in (condition, one, other) if isinstance(v, Value)]
    together = {"together"} if any("together" in v.facts for v in given) else set()
    return replace(found, facts=found.facts | together)


def _replaced(c: Checker, condition: Value, one: Any, other: Any) -> Value:
    """Some elements become a number."""
    is_first = isinstance(one, Value)
    value, number = (one, other) if is_first else (other, one)
    if not isinstance(value, Value):
        return c.meet(condition, facts=_sizes(one, other))
    dims, kind, (_, value) = c.join(condition, value)
    name, facts = value.tag[0] if value.tag else "", condition.facts
    tag, count, wanted, needed = _MASKED.get(name, ("", 0, 0, set()))
    if tag and is_first and number == wanted and needed <= facts:
        return c.make(dims, kind, (tag, *value.tag[1 : count + 1]), {"kept"} if number else ())
    if name == "news" and is_first and number == 0 and "on" in facts:
        c.windows[((c.name, 1),)] = value.tag
    known = _kept(c, condition, value, number, is_first)
    if known is not None:
        return c.make(dims, kind, value.tag, known)
    if value.kind == Kind.PLACE:
        c.unknown("replaces numbers of places")
    if name == "cnt" and not is_first:
        c.counts[((c.name, 1),)] = (value.tag[1], c.args["condition"][1:])
    beyond = {fact for fact in value.facts if fact[0] == "beyond" and is_first and number < 0}
    return c.meet(condition, value, facts=beyond)


def _met(c: Checker, condition: Value, value: Any, word: str) -> Any:
    """A value without the conditions that hold where it is taken: under `condition`, or unless."""
    if not isinstance(value, Value):
        return value
    known = {(word, fact) for fact in (*condition.facts, c.origin("condition"))}
    beyond = {("beyond", fact[1]) for _, fact in value.facts & known if fact[0] == "within"}
    return replace(value, facts=value.facts - known | beyond)


def _sizes(one: Any, other: Any) -> set[Any]:
    """What is known of a number that is one of two."""
    return ({"positive"} if min(one, other) > 0 else set()) | (
        {"single"} if max(one, other) == 1 else set()
    )


def _kept(
    c: Checker, condition: Value, value: Value, number: Any, is_first: bool
) -> set[Any] | None:
    """What is known of a value of which some elements become a number that names no place; None
    if nothing is."""
    name, facts = value.tag[0] if value.tag else "", condition.facts
    if name == "place" and number == -1:
        return {"kept"} if ("nowhere" in facts and not is_first) or "kept" in value.facts else None
    is_active = condition.tag == ("cnt", ((c.active[1:], 1),))
    keeps = name in ("slot", "page", "ring") or (name == "len" and is_first and is_active)
    keeps |= name == "cnt" and is_first and ("fits", value.tag[1]) in facts
    return set() if keeps and number == 0 else None


def _either(c: Checker, condition: Value, one: Value, other: Value) -> Value:
    if one.is_conditional:
        c.unknown("has rows that may be another request's", one)
    if "accepted" in condition.facts:
        return c.make(one.dims, one.kind, one.tag)
    if "anchors" in condition.facts and ("next", condition.dims[0]) in other.facts:
        is_own = c.join(condition, one)[1] in (Kind.OWN, Kind.UPTO)
        return (
            c.make(condition.dims, Kind.UPTO) if is_own else c.unknown("mixes rows", condition, one)
        )
    if one.tag[:1] == ("page",) and one.tag == other.tag:
        return c.make(c.join(condition, one, other)[0], Kind.PLACE, one.tag)
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
    bounds = c.bounds(value)
    if c.base == "amax" and (value.tag == ("numbered",) or bounds):
        return c.make([None] * len(dims), Kind.PLACE, ("used", bounds or REQUESTS))
    if c.base == "cumsum" and value.dims == (REQUESTS,) and value.tag[:1] == ("cnt",):
        return c.make(dims, Kind.PLACE, ("end", value.tag[1]))
    if c.base == "cumsum" and value.kind == Kind.ANY and value.shape == (c.num_reqs,):
        return c.make([REQUESTS], Kind.PLACE, ("end", ((c.args["self"][1:], 1),)))
    if c.base == "sum" and "ended" in value.facts and axes == [1]:
        return c.make(dims, Kind.PLACE, ("nth",))
    is_by_request = value.kind == Kind.DIAGONAL and value.dims[1] == REQUESTS
    if is_by_request and c.base in ("sum", "any") and axes == [1]:
        return c.make(dims, Kind.OWN, facts=value.facts & {"anchors"})
    return None

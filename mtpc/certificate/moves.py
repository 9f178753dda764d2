"""Rules of what moves elements: places by number, views, joins, state that is held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from mtpc.certificate import tables
from mtpc.certificate.checker import (
    REQUESTS,
    Checker,
    Kind,
    Layout,
    RefusedError,
    Value,
    pool_of,
    spots,
    sum_of,
)


def index(c: Checker) -> Value:
    """Places of one dimension, or of adjacent ones, by numbers."""
    table = c.at("weight") if c.base == "embedding" else c.at("self")
    if c.base == "index":
        given = c.at("indices")
        axis = next(at for at, one in enumerate(given) if one is not None)
        numbers = given[axis:]
    else:
        axis = c.args["dim"] if c.base == "index_select" else 0
        numbers = [c.at("index") if c.base == "index_select" else c.at("indices")]
    axis %= len(table.dims)
    if None in numbers:
        c.unknown("takes places of dimensions that are apart")
    return taken(c, table, axis, numbers)


def taken(c: Checker, table: Value, axis: int, numbers: list[Value]) -> Value:
    """What numbers take of a dimension of a table, or several numbers of adjacent ones."""
    inner, kind, _ = c.join(*map(_as_own, numbers))
    stop = axis + len(numbers)
    others = [dim for at, dim in enumerate(table.dims) if at != axis and dim is not None]
    is_mixed = any(one.kind == Kind.PLACE for one in numbers[1:]) or kind == Kind.PAIR
    if is_mixed or others or table.kind in (Kind.PAIR, Kind.DIAGONAL, Kind.ANY):
        c.unknown("takes places by numbers of others", table)
    dims = [*table.dims[:axis], *inner, *table.dims[stop:]]
    if "uniform" in numbers[0].facts and table.kind == Kind.CONST and axis == 0:
        return c.make(dims, Kind.CONST, facts={"alike"})
    return _named(c, table, axis, numbers[0], dims, kind)


def _as_own(number: Value) -> Value:
    return replace(number, kind=Kind.OWN if number.kind == Kind.PLACE else number.kind, tag=())


def _named(
    c: Checker, table: Value, axis: int, number: Value, dims: list[Layout], kind: Kind
) -> Value:
    """The same of one number, with what it names."""
    target, bounds = table.dims[axis], c.bounds(table)
    name = number.tag[0] if number.tag else ""
    size = c.num_reqs if name == "request" else table.shape[axis]
    if any(f[0] == "most" and isinstance(size, int) and f[1] < size - 1 for f in number.facts):
        c.unknown("takes places that were moved")
    if bounds and name in ("used", "request", "next") and target is None:
        named = {"used": "used", "request": "start", "next": "end"}[name]
        return c.make(dims, Kind.PLACE, (named, bounds))
    if target is None:
        is_known = number.kind in (Kind.CONST, Kind.OWN, Kind.UPTO)
        kind = max(kind, table.kind)
        return c.make(dims, kind) if is_known else c.unknown("takes by numbers of places")
    if isinstance(target, str) and target != "prompt":
        is_own = name == "slot" if target == "slots" else name == "page"
        is_own &= target == "slots" or (name == "page" and pool_of(number.tag[1]) == target)
        is_own |= name == "place" and pool_of(spots(number.tag[2], number.tag[1])) == target
        return c.make(dims, table.kind, table.tag) if is_own else c.unknown(f"takes of {target}")
    is_only = c.num_reqs == table.shape[axis] == 1
    unless = None if is_only else _row(c, number, target)
    if name == "before" and c.shapes[0] == table.shape:
        dims, unless = [*dims[:axis], target, *dims[axis + 1 :]], ("from", number.tag[1], target)
    if unless is False:
        c.unknown("takes rows that may be another request's", number)
    if table.kind == Kind.UPTO and name not in ("anchor", "fresh", "request"):
        c.unknown("takes rows after the last accepted one")
    kind = Kind.OWN if table.kind == Kind.UPTO and name == "anchor" else table.kind
    only = "where" if name in ("past", "start+", "before") else "unless"
    facts: set[Any] = {(only, unless)} if unless else set()
    if name == "anchor" and "anchors" in table.facts:
        facts = {"accepted"}  # True where the request is on.
    if name == "request":
        return c.make(dims, kind, table.tag, table.facts | facts)
    held = table.tag[0] if table.tag else ""
    some: Any = ("some", *table.tag[1:]) if held in ("row", "some") else ()
    if name in ("start+", "some") and number.dims[-1] is None and number.shape[-1] != 1:
        facts.add("together")
    return c.make(dims, kind if some or kind != Kind.PLACE else Kind.ANY, some, facts)


def _row(c: Checker, number: Value, layout: Layout) -> Any:
    """None if a number is a row of its own request; unless what it may not be; or False."""
    name, *params = number.tag or ("",)
    if layout == "prompt":
        if name != "into":
            return False
        counted, unless = c.counts.get(params[1], (None, ""))
        return unless if counted == params[0] and _packs(c, counted, unless) else False
    if name in ("row", "some", "anchor") and params[0] == layout:
        return None
    if name == "request" and layout == REQUESTS:
        return None
    if name == "past" and params[1] == layout:
        return ("inside", *params)
    fixed = layout[0][1] if len(layout) == 1 and layout[0][0] == "1" else 0
    if name == "into" and params[0] == layout and len(params) == 3 and params[2] <= fixed:
        return None
    if name == "start+" and params[0] == layout:
        is_column = number.dims[-1] is None and number.shape[-1] == params[1]
        return None if params[1] <= fixed else ("within", layout) if is_column else False
    if name == "fresh" and sum_of(layout, params[1]) == params[0]:
        return ("below", *params)
    return False


def _packs(c: Checker, count: Layout, decodes: str) -> bool:
    """Whether a value counts the rows of prompts that the host has packed: `num_input` where a
    request is on, has tokens left, and does not decode."""

    def line(given: Any, op: str) -> Mapping[str, Any]:
        found = c.calls.get(str(given).removeprefix("%"), ("", "", {}))
        return found[2] if found[1].startswith(op) else {}

    counts = line(count[0][0], "aten::where.ScalarOther")
    held = line(line(counts.get("self"), "aten::clamp").get("self"), "get").get("name")
    both, known = line(counts.get("condition"), "aten::__and__"), line(decodes, "aten::__and__")
    negated = line(both.get("other"), "aten::bitwise_not").get("self")
    flag = line(line(known.get("other"), "aten::ne.Scalar").get("self"), "get").get("name")
    found = (held, flag, negated, both.get("self"))
    return found == ("batch.num_input", "batch.is_decoding", f"%{decodes}", known.get("self"))


def slice_(c: Checker) -> Any:
    value, start = c.at("self"), c.args["start"] or 0
    axis = c.args["dim"] % len(value.dims)
    buffer = c.buffers.get(c.args["self"][1:])
    held = c.content.get(buffer or "")
    if held is not None and (axis, start) == (0, 0) and held.shape == c.shapes[0]:
        return held
    if value.dims[axis] is None:
        bounds = c.bounds(value)
        if bounds and value.shape[axis] == c.num_reqs + 1 and c.shapes[0][axis] == c.num_reqs:
            dims = [*value.dims[:axis], REQUESTS, *value.dims[axis + 1 :]]
            tag = ("request",) if (start, bounds) == (0, REQUESTS) else ("start", bounds)
            return c.make(dims, Kind.PLACE, ("end", bounds) if start == 1 else tag)
        lost = bounds or (value.tag[:1] == ("iota",) and start != 0)
        return c.make(value.dims, value.kind, () if lost else value.tag, value.facts)
    if c.shapes[0] == value.shape:
        return value
    part = (
        {0: "first row", 1: "next rows"}.get(start, "")
        if value.kind in (Kind.OWN, Kind.UPTO)
        else ""
    )
    facts = frozenset({(part, c.args["self"], value.dims)})
    return replace(c.nothing("takes rows by number", value), facts=facts)


def cat(c: Checker) -> Any:
    """cat, stack."""
    parts = c.at("tensors")
    axis, is_cat = (c.args["dim"] or 0) % len(c.shapes[0]), c.base == "cat"
    facts: list[Any] = [next(iter(part.facts), ("",)) for part in parts]
    if [fact[0] for fact in facts] == ["next rows", "first row"] and axis == 0:
        (_, one, dims), (_, other, _) = facts
        made, facts = c.nothing("moves rows up"), [("next", dims[0])]
        return replace(made, dims=dims, facts=frozenset(facts)) if one == other else made
    if is_cat and len(parts) == 2 and parts[1].tag[:1] == ("end",):
        is_zero = parts[0].shape == (1,) and "zeros" in parts[0].facts
        return (
            c.make([None], Kind.PLACE, ("bounds", parts[1].tag[1]))
            if is_zero
            else c.unknown("joins")
        )
    parts = [part for part in parts if 0 not in part.shape] or parts
    if is_cat and any(part.dims[axis] is not None for part in parts):
        c.unknown("joins rows", *parts)
    if axis == 1 and _are_tokens(parts[0], is_cat) and any(part.kind == Kind.ANY for part in parts):
        drafts = c.nothing("has drafts that may be any", *parts)
        return replace(drafts, facts=frozenset({"token"}))
    dims, kind, _ = c.join(*(_thin(part, axis) for part in parts) if is_cat else parts)
    if kind == Kind.PLACE:
        is_one = is_cat and parts[0].tag[:1] == ("page",) and len({part.tag for part in parts}) == 1
        return c.make(dims, kind, parts[0].tag) if is_one else c.unknown("joins places")
    return c.make(dims if is_cat else [*dims[:axis], None, *dims[axis:]], kind)


def _are_tokens(first: Value, is_cat: bool) -> bool:
    """Whether each request's last token is joined to drafts, which may be any."""
    return "token" in first.facts if is_cat else (first.kind, first.dims) == (Kind.OWN, (REQUESTS,))


def _thin(value: Value, axis: int) -> Value:
    """A part of a join, as one element along the dimension that grows."""
    shape = (*value.shape[:axis], 1, *value.shape[axis + 1 :])
    return replace(value, shape=shape)


def view(c: Checker) -> Any:
    value, rank = c.at("self"), len(c.at("self").dims)
    dims, facts = list(value.dims), value.facts - {"alike"}
    keeps_tag = c.base in ("transpose", "unsqueeze", "view", "reshape", "expand")
    axis = (c.args.get("dim") or 0) if isinstance(c.args.get("dim"), int | None) else 0
    if c.base in ("transpose", "t"):
        i, j = (c.args["dim0"], c.args["dim1"]) if c.base == "transpose" else (0, 1)
        dims[i], dims[j] = dims[j], dims[i]
    elif c.base == "unsqueeze":
        dims.insert(axis % (rank + 1), None)
    elif c.base in tables.DIVIDES:
        axes = [at % rank for at in c.args.get("dims", [axis])]
        is_one = c.base == "select" and value.shape[axes[0]] == 1
        if any(dims[at] is not None for at in axes) and not is_one:
            c.unknown("divides rows", value)
        if c.base in ("select", "unbind"):
            del dims[axes[0]]
    elif c.base == "expand":
        dims = [None] * (len(c.shapes[0]) - rank) + dims
    else:
        found = _spots(c, value) or regroup(dims, value.shape, c.shapes[0], c.num_reqs)
        if found is None:
            c.unknown("mixes rows with other dimensions", value)
        if fewer_rows(dims, found):
            facts, keeps_tag = facts | {"together"}, False
        elif fewer_rows(found, dims):
            facts -= {"together"}
        dims = found
    tag = value.tag if keeps_tag else ()
    if c.base == "expand" and value.shape[:1] == (1,) and value.kind == Kind.CONST:
        facts |= {"alike"} if len(c.shapes[0]) == rank else set()
    if value.kind == Kind.ANY or (value.kind == Kind.PLACE and not tag):
        c.unknown("moves numbers of places", value)
    if len(c.shapes) > 1:
        return [Value(shape, tuple(dims), value.kind, (), facts) for shape in c.shapes]
    return c.make(dims, value.kind, tag, facts)


def _spots(c: Checker, value: Value) -> list[Layout] | None:
    """The dimensions of pages that are seen as several pages each; None for other views."""
    count, _, pages = str(c.shapes[0][0]).partition("*")
    is_pages = str(value.dims[0]).startswith(("pages", "slots")) and pages == str(value.shape[0])
    if not is_pages or not count.isdigit() or value.shape[1] % int(count):
        return None
    return [pool_of(spots(int(count), pages)), *[None] * (len(c.shapes[0]) - 1)]


def constant(c: Checker) -> Value:
    if c.base != "arange":
        facts = {"uniform", "zeros"} if "zeros" in c.base else {"uniform"}
        like = c.at("self") if c.base.endswith("_like") else None
        return c.make(like.dims if like else [None] * len(c.shapes[0]), Kind.CONST, (), facts)
    start, end, step = c.args.get("start") or 0, c.args["end"], c.args.get("step") or 1
    tag = {(0, 1): ("iota", 1), (1, 1): ("numbers",)}.get((start, step), ())
    if (end, step) == (-1, -1):
        tag = ("desc", start + 1)
    elif (step, -start) == (1, end):
        tag = ("under", end)
    return c.make([None], Kind.CONST, tag)


def gather(c: Checker) -> Value:
    """gather, scatter_: along a dimension that is no row."""
    given = [v for v in map(c.at, ("self", "index", "src")) if isinstance(v, Value)]
    axis = c.args["dim"]
    if any(v.dims[axis] is not None and v.shape[axis] != 1 for v in given):
        c.unknown("moves rows by number", *given)
    return c.meet(*(replace(v, shape=given[0].shape) for v in given))


def part(c: Checker) -> Any:
    """getitem: one of several results; `Checker` holds a single one by itself."""
    found = c.at("self")
    return found[c.args["index"]] if isinstance(found, list) else found


def get(c: Checker) -> Any:
    """State that the step holds, or a weight."""
    name, shape = str(c.args["name"]), c.shapes[0]
    room, _, own = name.partition(".")
    rest = (None,) * (len(shape) - 1)
    if room in ("state", "kv", "batch", "cross"):
        c.buffers[c.name] = name
    if room in ("state", "kv"):
        first = "slots" if str(shape[0]) == "S" else f"pages {shape[0]}"
        tag = ("page", "N") if own == "block_table" else ()
        return Value(shape, (first, *rest), Kind.PLACE if tag else Kind.OWN, tag)
    if room not in ("batch", "cross"):
        return Value(shape, (None,) * len(shape))
    if own == "state_indices":
        return c.make((REQUESTS,), Kind.PLACE, ("slot",))
    if own in ("num_input", "is_decoding", "next_prompt_id"):
        return c.make((REQUESTS,), Kind.OWN)
    if own == "prompt_ids":
        return c.make(("prompt",), Kind.OWN)
    if own in ("token_mask", "draft_mask"):
        return c.make(((("1", shape[0] // c.num_reqs),), *rest), Kind.OWN)
    return c.nothing("is what another step left")


def copy(c: Checker) -> Value:
    """copy_: into a buffer of the batch, whose first rows it fills; or into a temporary."""
    buffer, source = c.buffers.get(c.args["self"][1:]), c.at("src")
    if buffer is None:
        return c.meet(c.at("self"), source)
    if not buffer.startswith("batch.") or source.shape != c.shapes[0]:
        raise RefusedError(f"{c.op} ({c.name}) writes {buffer}")
    c.content[buffer] = source
    for other, root in c.memory.items():
        if c.buffers.get(root) == buffer and other not in c.buffers:
            c.values[other] = c.nothing("has overwritten it")
    return source


def put(c: Checker) -> Value:
    """index_copy_: rows of requests to their slots; or columns of a temporary by numbers."""
    target, numbers, source = c.at("self"), c.at("index"), c.at("source")
    buffer = c.buffers.get(c.args["self"][1:])
    if buffer is None:
        if numbers.kind != Kind.CONST or target.dims[c.args["dim"]] is not None:
            c.unknown("puts rows by numbers")
        return c.meet(target, replace(source, shape=c.shapes[0]))
    if target.dims[0] != "slots" or c.args["dim"] != 0 or numbers.tag != ("slot",):
        raise RefusedError(f"{c.op} ({c.name}) writes places of {buffer} by number")
    if buffer == "state.token_ids" and "token" in source.facts:
        return Value(target.shape, target.dims, Kind.OWN)  # Its first column is: drafts may be any.
    if (
        source.kind not in (Kind.OWN, Kind.CONST)
        or source.dims[0] != REQUESTS
        or any(source.dims[1:])
    ):
        raise RefusedError(source.why or f"{c.op} ({c.name}) writes {source} to {buffer}")
    return Value(target.shape, target.dims, Kind.OWN)


def regroup(
    dims: Sequence[Layout], old: Sequence[Any], new: Sequence[Any], requests: int
) -> list[Layout] | None:
    """The dimensions of a reshaped tensor; None where rows are mixed with others.

    Rows stay together behind what stands before them: as they are, or as others of their requests.
    """
    made: list[Layout] = [None] * len(new)
    marked = [axis for axis, dim in enumerate(dims) if dim is not None]
    if len(marked) != 1:
        return None if marked and old != new else list(dims)[: len(new)] if marked else made
    axis, layout = marked[0], dims[marked[0]]
    places = [at for at in range(len(new)) if _size(new[:at]) == _size(old[:axis])]
    same = [at for at in places if new[at] == old[axis]]
    if same:
        end = len(new) - len(old) + axis
        is_end = end in same and new[end + 1 :] == old[axis + 1 :]
        made[end if is_end else axis if axis in same else same[0]] = layout
        return made
    if not isinstance(layout, tuple) or layout[0][0] != "1" or len(layout) > 1:
        return None
    for at in places:
        if new[at] % requests == 0:
            made[at] = (("1", new[at] // requests),)
            return made
    return None


def fewer_rows(old: Sequence[Layout], new: Sequence[Layout]) -> bool:
    """Whether rows of a request have become columns of one."""
    one, other = (next((dim for dim in dims if dim is not None), None) for dims in (old, new))
    return one != other and isinstance(one, tuple) and other is not None and other < one


def _size(sizes: Sequence[Any]) -> Any:
    """How many elements dimensions have; open sizes by name."""
    return prod(n for n in sizes if isinstance(n, int)), [n for n in sizes if isinstance(n, str)]

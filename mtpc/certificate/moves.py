"""Rules of what moves elements: places by number, views, joins, state that is held."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from mtpc.certificate import tables
from mtpc.certificate.checker import REQUESTS, Checker, Kind, Layout, RefusedError, Value
from mtpc.certificate.sums import NONE, ONE, SLOT, Sum


def index(c: Checker) -> Value:
    """Places of one dimension, or of adjacent ones, by numbers."""
    table, axis = c.at("weight" if c.base == "embedding" else "self"), c.args.get("dim") or 0
    numbers = c.at("indices") if c.base != "index_select" else [c.at("index")]
    if c.base == "index":
        axis = next(at for at, one in enumerate(numbers) if one is not None)
        numbers = numbers[axis:]
    numbers = numbers if isinstance(numbers, list) else [numbers]
    c.need(None not in numbers, "takes places of dimensions that are apart")
    return taken(c, table, axis % len(table.dims), numbers)


def taken(c: Checker, table: Value, axis: int, numbers: list[Value]) -> Value:
    """What numbers take of a dimension of a table, or several numbers of adjacent ones."""
    kinds = [Kind.OWN if v.kind == Kind.PLACE else v.kind for v in numbers]
    own = [replace(v, kind=k, number=None) for v, k in zip(numbers, kinds, strict=True)]
    inner, kind, _ = c.join(*own)
    value, target, size = numbers[0], table.dims[axis], table.shape[axis]
    others = [dim for at, dim in enumerate(table.dims) if at != axis and dim is not None]
    is_mixed = any(one.kind == Kind.PLACE for one in numbers[1:]) or kind == Kind.PAIR
    is_apart = not is_mixed and not others and table.kind <= Kind.PLACE
    c.need(is_apart, "takes places by numbers of others", table)
    dims = [*table.dims[:axis], *inner, *table.dims[axis + len(numbers) :]]
    if "uniform" in value.facts and table.kind == Kind.CONST and axis == 0:
        return c.make(dims, Kind.CONST, facts={"alike"})
    is_moved = any(isinstance(size, int) and most < size - 1 for most in value.those("most"))
    c.need(not is_moved, "takes places that were moved")
    ends = c.as_bounds(table)
    if ends and ends.sum.layout:
        layout, first = ends.sum.layout, ONE.starts()
        named = {first: layout.starts(), first + 1: c.bounds.ends(layout)}.get(value.sum)
        named = layout.starts("used") if value.sum == ONE.starts("used") else named
        if named:
            return c.make(dims, Kind.PLACE, named)
    if target is None:
        c.need(value.kind < Kind.PLACE, "takes by numbers of places")
        return c.make(dims, max(kind, table.kind))
    if isinstance(target, str) and target != "prompt":
        c.need(owned(c, value, target), f"takes of {target}")
        return c.make(dims, table.kind, table.number, table.facts & {"natural"})
    if value.kind == Kind.CONST and c.shapes[0] == table.shape and value.number:
        value = c.of_rows(value, (target,), target)
        dims = [*table.dims[:axis], target, *table.dims[axis + 1 :]]
    return _of_rows(c, table, target, value, dims, c.num_reqs == size == 1)


def _of_rows(
    c: Checker, table: Value, target: Layout, value: Value, dims: list[Layout], is_only: bool
) -> Value:
    """What numbers take of a table's rows, each of which must be its request's own."""
    named, holds, kind, loose = value.sum, c.bounds.holds, table.kind, c.bounds.is_loose
    layout = named.layout or NONE if target == "prompt" else target
    rest = named - layout.starts()
    goals = {goal for goal in (rest, layout - 1 - rest) if not holds(goal)}
    is_own = goals <= {rest} or rest == Sum.of({value.iota[0]: 1})
    is_own = _is_packed(c, layout) if target == "prompt" else is_own
    is_known = is_own and value.number is not None and not rest.places and not loose(rest)
    c.need(is_only or is_known, "takes rows that may be another request's", value)
    before = any(holds(last - rest) for last in c.bounds.accepted(layout))
    facts: set[Any] = set() if is_only else {("goal", goal) for goal in goals}
    if kind == Kind.UPTO:
        own = next((dim for dim in value.dims if isinstance(dim, Sum)), NONE)
        before = before or is_only
        is_same = rest == c.bounds.row(own).own - (own - layout)
        c.need(before or is_same, "takes rows after the last accepted one")
        kind = Kind.OWN if before else kind
    if "anchors" in table.facts and rest in c.bounds.accepted(layout):
        facts = {"accepted"}  # True where the request is on.
    if named == ONE.starts():
        return c.make(dims, kind, table.number, table.facts | facts)
    is_wide = bool(value.dims) and value.dims[-1] is None and value.shape[-1] != 1
    if is_wide and rest not in goals and not before:
        facts.add("together")
    held, some = table.sum.layout, None
    if held is not None and c.bounds.within(table.sum - held.starts(), NONE, held - 1):
        some = held.starts() + c.part(dims, [NONE], [held - 1])
    return c.make(dims, Kind.ANY if kind == Kind.PLACE and some is None else kind, some, facts)


def _is_packed(c: Checker, count: Sum) -> bool:
    """Whether a value counts the rows of prompts that the host has packed: see `tables.PACKED`."""

    def shown(given: Any) -> str:
        if str(given)[:1] != "%":
            return str(given)
        _, op, args, *_ = c.calls[given[1:]]
        base = op.removeprefix("aten::").partition(".")[0]
        return (
            str(args["name"]) if op == "get" else f"{base}({', '.join(map(shown, args.values()))})"
        )

    name = next(iter(dict(count.parts)), "")
    is_one = count == Sum.of({name: 1}) and name in c.calls
    return is_one and re.fullmatch(tables.PACKED, shown(f"%{name}")) is not None


def owned(c: Checker, value: Value, pool: str, per: int = 1) -> bool:
    """Whether numbers name places of the request's own slot, of its own pages, or of nobody's.

    A ring of n pages of slot s is the n before page n * s, and this one.
    """
    name, _, spots = pool.partition("/")
    ring = re.fullmatch(r"pages (\d+)\*S - \d+", name)
    pages, per = int(ring[1]) if ring else 1, per * int(spots or 1)
    owner = "slot S" if ring or name == "slots" else f"page {name.removeprefix('pages ')}"
    rest = value.sum - Sum.of({owner: pages * per})
    low, high = ONE * (per - pages * per), ONE * (per - 1)
    return not rest.places and c.bounds.within(rest, low, high, value.those("if"))


def slice_(c: Checker) -> Any:
    value, first = c.at("self"), c.args["start"] or 0
    axis = c.args["dim"] % len(value.dims)
    held = c.content.get(c.buffers.get(c.args["self"][1:], ""))
    if held is not None and (axis, first) == (0, 0) and held.shape == c.shapes[0]:
        return held
    if value.dims[axis] in (None, "bounds"):
        ends = c.as_bounds(value)
        layout = ends.sum.layout if ends else None
        if layout and c.shapes[0][axis] == c.num_reqs == value.shape[axis] - 1:
            dims = [*value.dims[:axis], REQUESTS, *value.dims[axis + 1 :]]
            return c.make(dims, Kind.PLACE, c.bounds.ends(layout) if first else layout.starts())
        is_moved = first != 0 and any(part[0] == "~" for part, _ in value.sum.parts)
        is_known = value.kind != Kind.PLACE or not (is_moved or value.number is None or ends)
        c.need(is_known, "moves numbers of places", value)
        return c.make(value.dims, value.kind, None if is_moved else value.number, value.facts)
    if c.shapes[0] == value.shape:
        return value
    is_own = value.kind in (Kind.OWN, Kind.UPTO)
    part = {0: "first row", 1: "next rows"}.get(first, "") if is_own else ""
    facts = frozenset({(part, c.args["self"], value.dims)})
    return replace(c.nothing("takes rows by number", value), facts=facts)


def cat(c: Checker) -> Any:
    """cat, stack."""
    parts = c.at("tensors")
    axis, is_cat = (c.args["dim"] or 0) % len(c.shapes[0]), c.base == "cat"
    facts: list[Any] = [next(iter(part.facts), ("",)) for part in parts]
    if [fact[0] for fact in facts] == ["next rows", "first row"] and axis == 0:
        (_, one, dims), (_, other, _) = facts
        made = c.nothing("moves rows up")
        facts = [("next", dims[0])] if one == other else []
        return replace(made, dims=dims if one == other else made.dims, facts=frozenset(facts))
    layout = parts[-1].sum.layout
    if is_cat and len(parts) == 2 and layout:
        is_zero = parts[0].shape == (1,) and "zeros" in parts[0].facts
        is_end = (parts[1].dims, parts[1].sum) == ((REQUESTS,), c.bounds.ends(layout))
        named = layout.starts() if is_zero and is_end else c.unknown("joins")
        return c.make(["bounds"], Kind.PLACE, named)
    parts = [part for part in parts if 0 not in part.shape] or parts
    is_apart = not is_cat or all(part.dims[axis] is None for part in parts)
    c.need(is_apart, "joins rows", *parts)
    first = parts[0]  # Each request's last token may be joined to any drafts.
    is_ids = "token" in first.facts or (first.kind, first.dims) == (Kind.OWN, (REQUESTS,))
    if axis == 1 and is_ids and any(part.kind == Kind.ANY for part in parts):
        drafts = c.nothing("has drafts that may be any", *parts)
        return replace(drafts, facts=frozenset({"token"}))
    if is_cat:
        parts = [replace(v, shape=(*v.shape[:axis], 1, *v.shape[axis + 1 :])) for v in parts]
    dims, kind, _ = c.join(*parts)
    named = same_pages(c, dims, parts) if is_cat and kind == Kind.PLACE else None
    c.need(kind != Kind.PLACE or named is not None, "joins places")
    return c.make(dims if is_cat else [*dims[:axis], None, *dims[axis:]], kind, named)


def same_pages(c: Checker, dims: Sequence[Layout], values: Sequence[Value]) -> Sum | None:
    """A place of the pages that all values have places of; None if these differ."""
    owner = values[0].sum.places
    last = ONE * (sum(count for _, count in owner.parts) - 1)
    is_page = [part[:4] for part, _ in owner.parts] == ["page"]
    if not is_page or not all(c.bounds.within(v.sum - owner, NONE, last) for v in values):
        return None
    return owner + c.part(dims, [NONE], [last])


def view(c: Checker) -> Any:
    value, rank = c.at("self"), len(c.at("self").dims)
    dims, facts = list(value.dims), value.facts - {"alike"}
    named = value.number if c.base in tables.FOLLOWED else None
    axis = (c.args.get("dim") or 0) if isinstance(c.args.get("dim"), int | None) else 0
    if c.base in ("transpose", "t"):
        i, j = c.args.get("dim0", 0), c.args.get("dim1", 1)
        dims[i], dims[j] = dims[j], dims[i]
    elif c.base == "unsqueeze":
        dims.insert(axis % (rank + 1), None)
    elif c.base in tables.DIVIDES:
        axes = [at % rank for at in c.args.get("dims", [axis])]
        is_one = c.base == "select" and value.shape[axes[0]] == 1
        c.need(is_one or not any(dims[at] for at in axes), "divides rows", value)
        if c.base in ("select", "unbind"):
            del dims[axes[0]]
    elif c.base == "expand":
        dims = [None] * (len(c.shapes[0]) - rank) + dims
        is_alike = value.shape[:1] == (1,) and value.kind == Kind.CONST and len(dims) == rank
        facts |= {"alike"} if is_alike else set()
    else:
        found = _spots(c, value) or regroup(dims, value.shape, c.shapes[0], c.num_reqs)
        if found is None:
            c.unknown("mixes rows with other dimensions", value)
        if fewer_rows(dims, found):
            facts, named = facts | {"together"}, None
        elif fewer_rows(found, dims):
            facts -= {"together"}
        dims = found
    is_known = value.kind != Kind.ANY and (value.kind != Kind.PLACE or named is not None)
    c.need(is_known, "moves numbers of places", value)
    if len(c.shapes) > 1:
        return [Value(shape, tuple(dims), value.kind, None, facts) for shape in c.shapes]
    return c.make(dims, value.kind, named, facts)


def _spots(c: Checker, value: Value) -> list[Layout] | None:
    """The dimensions of pages that are seen as several pages each; None for other views."""
    count, _, pages = str(c.shapes[0][0]).partition("*")
    is_pages = str(value.dims[0]).startswith(("pages", "slots")) and pages == str(value.shape[0])
    if not is_pages or not count.isdigit() or value.shape[1] % int(count):
        return None
    return [f"{value.dims[0]}/{count}", *[None] * (len(c.shapes[0]) - 1)]


def constant(c: Checker) -> Value:
    if c.base != "arange":
        facts = {"uniform", "zeros"} if "zeros" in c.base else {"uniform"}
        like = c.at("self") if c.base.endswith("_like") else None
        return c.make(like.dims if like else [None] * len(c.shapes[0]), Kind.CONST, None, facts)
    first, step, size = c.args.get("start") or 0, c.args.get("step") or 1, c.shapes[0][0]
    if not all(isinstance(n, int) for n in (first, step, size)):
        return c.make([None], Kind.CONST)
    iota = c.bounds.add(f"~iota.{c.name}", [NONE], [ONE * (size - 1)])
    return c.make([None], Kind.CONST, iota * step + first)


def gather(c: Checker) -> Value:
    """gather, scatter_: along a dimension that is no row."""
    given = [v for v in map(c.at, ("self", "index", "src")) if isinstance(v, Value)]
    axis = c.args["dim"]
    is_apart = all(v.dims[axis] is None or v.shape[axis] == 1 for v in given)
    c.need(is_apart, "moves rows by number", *given)
    return c.meet(*(replace(v, shape=given[0].shape) for v in given))


def part(c: Checker) -> Any:
    """getitem: one of several results; `Checker` holds a single one by itself."""
    found = c.at("self")
    return found[c.args["index"]] if isinstance(found, list) else found


def get(c: Checker) -> Any:
    """State that the step holds, or a weight."""
    name, shape = str(c.args["name"]), c.shapes[0]
    room, _, own = name.partition(".")
    dims: list[Layout] = [None] * len(shape)
    if room not in ("state", "kv", "batch", "cross"):
        return c.make(dims, Kind.CONST)
    c.buffers[c.name] = name
    if room in ("state", "kv"):
        dims[0] = "slots" if str(shape[0]) == "S" else f"pages {shape[0]}"
        pages = Sum.of({"page N": 1}) if own == "block_table" else None
        return c.make(dims, Kind.OWN, pages, {"natural"} if own in tables.NATURAL else ())
    if own not in tables.GIVEN:
        return c.nothing("is what another step left")
    dims[0] = "prompt" if own == "prompt_ids" else ONE * (shape[0] // c.num_reqs)
    return c.make(dims, Kind.OWN, SLOT if own == "state_indices" else None)


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
        is_apart = numbers.kind == Kind.CONST and target.dims[c.args["dim"]] is None
        c.need(is_apart, "puts rows by numbers")
        return c.meet(target, replace(source, shape=c.shapes[0]))
    if (target.dims[0], c.args["dim"], numbers.number) != ("slots", 0, SLOT):
        raise RefusedError(f"{c.op} ({c.name}) writes places of {buffer} by number")
    is_ids = buffer == "state.token_ids" and "token" in source.facts
    is_own = source.kind <= Kind.OWN and source.dims[0] == REQUESTS and not any(source.dims[1:])
    if not is_ids and not is_own:  # The first column of ids is the request's: drafts may be any.
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
    end = len(new) - len(old) + axis
    if same:
        is_end = end in same and new[end + 1 :] == old[axis + 1 :]
        made[end if is_end else axis if axis in same else same[0]] = layout
        return made
    is_fixed = isinstance(layout, Sum) and dict(layout.parts).keys() == {"1"}
    for at in places if is_fixed else ():
        if new[at] % requests == 0:
            made[at] = ONE * (new[at] // requests)
            return made
    return None


def fewer_rows(old: Sequence[Layout], new: Sequence[Layout]) -> bool:
    """Whether rows of a request have become columns of one."""
    one, other = (next((dim for dim in dims if dim is not None), None) for dims in (old, new))
    return isinstance(one, Sum) and isinstance(other, Sum) and other.parts < one.parts


def _size(sizes: Sequence[Any]) -> Any:
    """How many elements dimensions have; open sizes by name."""
    return prod(n for n in sizes if isinstance(n, int)), [n for n in sizes if isinstance(n, str)]

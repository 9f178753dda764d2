"""Rules of what moves elements: places by number, views, joins, state that is held."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from mtpc.certificate import tables
from mtpc.certificate.checker import REQUESTS, Checker, Kind, Layout, RefusedError, Value
from mtpc.certificate.sums import REQUEST, SLOT, Sum, layout_of, minus, number, places, plus, start


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
    others = [dim for at, dim in enumerate(table.dims) if at != axis and dim is not None]
    is_mixed = any(one.kind == Kind.PLACE for one in numbers[1:]) or kind == Kind.PAIR
    if is_mixed or others or table.kind in (Kind.PAIR, Kind.DIAGONAL, Kind.ANY):
        c.unknown("takes places by numbers of others", table)
    dims = [*table.dims[:axis], *inner, *table.dims[axis + len(numbers) :]]
    value, target, size = numbers[0], table.dims[axis], table.shape[axis]
    if "uniform" in value.facts and table.kind == Kind.CONST and axis == 0:
        return c.make(dims, Kind.CONST, facts={"alike"})
    if any(isinstance(size, int) and most < size - 1 for most in value.those("most")):
        c.unknown("takes places that were moved")
    ends = c.as_bounds(table)
    layout = layout_of(ends.number) if ends else None
    if layout is not None and value.number in (REQUEST, plus((REQUEST, 1), (REQUESTS, 1))):
        return c.make(dims, Kind.PLACE, c.ends(layout) if value.number != REQUEST else start(layout))
    if layout is not None and value.number == start(REQUESTS, "used"):
        return c.make(dims, Kind.PLACE, start(layout, "used"))
    if target is None:
        if value.kind not in (Kind.CONST, Kind.OWN, Kind.UPTO):
            c.unknown("takes by numbers of places")
        return c.make(dims, max(kind, table.kind))
    if isinstance(target, str) and target != "prompt":
        if not owned(c, value, target):
            c.unknown(f"takes of {target}")
        return c.make(dims, table.kind, table.number, table.facts & {"natural"})
    if value.kind == Kind.CONST and c.shapes[0] == table.shape and value.number:
        value = c.of_rows(value, (target,), target)
        dims = [*table.dims[:axis], target, *table.dims[axis + 1 :]]
    return _of_rows(c, table, target, value, dims, c.num_reqs == size == 1)


def _as_own(value: Value) -> Value:
    return replace(value, kind=Kind.OWN if value.kind == Kind.PLACE else value.kind, number=None)


def _of_rows(
    c: Checker, table: Value, target: Layout, value: Value, dims: list[Layout], is_only: bool
) -> Value:
    """What numbers take of a table's rows, each of which must be its request's own."""
    named, holds, kind = value.number, c.bounds.holds, table.kind
    layout = layout_of(named) or () if target == "prompt" else target
    rest = minus(named or (), start(layout))
    goals = {goal for goal in (rest, minus(minus(layout, REQUESTS), rest)) if not holds(goal)}
    before = any(holds(minus(plus((one, 1), (n, 1)), rest)) for one, n in c.accepted(layout))
    is_all = _is_wide(value) and rest not in goals and not before
    facts: set[Any] = {"together"} if is_all else set()
    is_known = named is not None and not places(rest) and not c.is_loose(rest)
    is_column = len(rest) == 1 and rest[0][0].startswith("~iota")
    is_own = _is_packed(c, layout) if target == "prompt" else goals <= {rest} or is_column
    if is_only:
        rest, goals = (), set()
    elif not is_known or not is_own:
        c.unknown("takes rows that may be another request's", value)
    facts |= {("goal", goal) for goal in goals}
    if kind == Kind.UPTO:
        own = next((dim for dim in value.dims if isinstance(dim, tuple)), ())
        is_same = own and rest == minus(c.offset(own), minus(own, layout))
        if not (before or is_only or is_same):
            c.unknown("takes rows after the last accepted one")
        kind = Kind.OWN if before or is_only else kind
    if "anchors" in table.facts and c.anchored(rest, layout):
        facts = {"accepted"}  # True where the request is on.
    if named == REQUEST:
        return c.make(dims, kind, table.number, table.facts | facts)
    return c.make(dims, *_some(c, table, dims, kind), facts)


def _is_wide(value: Value) -> bool:
    """Whether there are several numbers for each row."""
    return bool(value.dims) and value.dims[-1] is None and value.shape[-1] != 1


def _some(c: Checker, table: Value, dims: Sequence[Layout], kind: Kind) -> tuple[Kind, Any]:
    """The kind, and the number, of what is in other rows of the request."""
    held = layout_of(table.number)
    if held is not None:
        last = minus(held, REQUESTS)
        if c.within(minus(table.number or (), start(held)), (), last):
            return Kind.PLACE, plus((start(held), 1), (c.part(dims, [()], [last], None), 1))
    return Kind.ANY if kind == Kind.PLACE else kind, None


def _is_packed(c: Checker, count: Sum) -> bool:
    """Whether a value counts the rows of prompts that the host has packed: `num_input` where a
    request is on, has tokens left, and does not decode."""

    def shown(given: Any) -> str:
        if str(given)[:1] != "%":
            return str(given)
        _, op, args, *_ = c.calls[given[1:]]
        if op == "get":
            return str(args["name"])
        base = op.removeprefix("aten::").partition(".")[0]
        return f"{base}({', '.join(map(shown, args.values()))})"

    packed = (
        r"where\(__and__\((.+), bitwise_not\(__and__\(\1, ne\(batch\.is_decoding, 0\)\)\)\), "
        r"clamp\(batch\.num_input, \w+, \w+\), 0\)"
    )
    (part, times), *others = count or (("", 0),)
    is_one = not others and times == 1 and part in c.calls
    return is_one and re.fullmatch(packed, shown(f"%{part}")) is not None


def owned(c: Checker, value: Value, pool: str, per: int = 1) -> bool:
    """Whether numbers name places of the request's own slot, of its own pages, or of nobody's.

    A ring of n pages of slot s is the n before page n * s, and this one.
    """
    name, _, spots = pool.partition("/")
    ring = re.fullmatch(r"pages (\d+)\*S - \d+", name)
    pages, per = int(ring[1]) if ring else 1, per * int(spots or 1)
    owner = "slot S" if ring or name == "slots" else f"page {name.removeprefix('pages ')}"
    rest = minus(value.number or (), ((owner, pages * per),))
    ends = number(per - pages * per), number(per - 1)
    return not places(rest) and c.within(rest, *ends, value.those("if"))


def slice_(c: Checker) -> Any:
    value, first = c.at("self"), c.args["start"] or 0
    axis = c.args["dim"] % len(value.dims)
    buffer = c.buffers.get(c.args["self"][1:])
    held = c.content.get(buffer or "")
    if held is not None and (axis, first) == (0, 0) and held.shape == c.shapes[0]:
        return held
    if value.dims[axis] in (None, "bounds"):
        ends = c.as_bounds(value)
        layout = layout_of(ends.number) if ends else None
        if layout is not None and c.shapes[0][axis] == c.num_reqs == value.shape[axis] - 1:
            dims = [*value.dims[:axis], REQUESTS, *value.dims[axis + 1 :]]
            return c.make(dims, Kind.PLACE, c.ends(layout) if first == 1 else start(layout))
        is_moved = first != 0 and any(part[0] == "~" for part, _ in value.number or ())
        if value.kind == Kind.PLACE and (is_moved or value.number is None or ends):
            c.unknown("moves numbers of places", value)
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
        made, facts = c.nothing("moves rows up"), [("next", dims[0])]
        return replace(made, dims=dims, facts=frozenset(facts)) if one == other else made
    layout = layout_of(parts[-1].number)
    if is_cat and len(parts) == 2 and layout is not None:
        is_zero = parts[0].shape == (1,) and "zeros" in parts[0].facts
        is_end = parts[1].dims == (REQUESTS,) and parts[1].number == c.ends(layout)
        return c.make(["bounds"], Kind.PLACE, start(layout)) if is_zero and is_end else c.unknown("joins")
    parts = [part for part in parts if 0 not in part.shape] or parts
    if is_cat and any(part.dims[axis] is not None for part in parts):
        c.unknown("joins rows", *parts)
    if axis == 1 and _are_tokens(parts[0], is_cat) and any(part.kind == Kind.ANY for part in parts):
        drafts = c.nothing("has drafts that may be any", *parts)
        return replace(drafts, facts=frozenset({"token"}))
    dims, kind, _ = c.join(*(_thin(part, axis) for part in parts) if is_cat else parts)
    if kind == Kind.PLACE:
        named = same_pages(c, dims, parts) if is_cat else None
        return c.make(dims, kind, named) if named else c.unknown("joins places")
    return c.make(dims if is_cat else [*dims[:axis], None, *dims[axis:]], kind)


def same_pages(c: Checker, dims: Sequence[Layout], values: Sequence[Value]) -> Sum | None:
    """A place of the pages that all values have places of; None if these differ."""
    found = {places(value.number) for value in values}
    (owner, *others), *more = found if all(found) else [((("", 1),), ())]
    if others or more or not owner[0].startswith("page"):
        return None
    last = number(owner[1] - 1)
    rests = [minus(value.number or (), (owner,)) for value in values]
    is_own = all(c.within(rest, (), last) for rest in rests)
    return plus(((owner,), 1), (c.part(dims, [()], [last], None), 1)) if is_own else None


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
    keeps_number = c.base in ("transpose", "unsqueeze", "view", "reshape", "expand")
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
            facts, keeps_number = facts | {"together"}, False
        elif fewer_rows(found, dims):
            facts -= {"together"}
        dims = found
    named = value.number if keeps_number else None
    if c.base == "expand" and value.shape[:1] == (1,) and value.kind == Kind.CONST:
        facts |= {"alike"} if len(c.shapes[0]) == rank else set()
    if value.kind == Kind.ANY or (value.kind == Kind.PLACE and named is None):
        c.unknown("moves numbers of places", value)
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
    iota = c.bounds.add(f"~iota.{c.name}", [()], [number(size - 1)])
    return c.make([None], Kind.CONST, plus((iota, step), (number(first), 1)))


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
        if own == "block_table":
            return Value(shape, (first, *rest), Kind.PLACE, (("page N", 1),))
        facts = frozenset({"natural"} if own in tables.NATURAL else ())
        return Value(shape, (first, *rest), Kind.OWN, None, facts)
    if room not in ("batch", "cross"):
        return Value(shape, (None,) * len(shape))
    if own == "state_indices":
        return c.make((REQUESTS,), Kind.PLACE, SLOT)
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
    if target.dims[0] != "slots" or c.args["dim"] != 0 or numbers.number != SLOT:
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
    if not isinstance(layout, tuple) or [part for part, _ in layout] != ["1"]:
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

"""The rule of kernels: each argument has the rows, requests, pages or slots that its name says."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from mtpc.certificate import moves, tables
from mtpc.certificate.checker import (
    REQUESTS,
    Checker,
    Kind,
    Layout,
    RefusedError,
    UnknownError,
    Value,
    is_iota,
)
from mtpc.certificate.moves import owned
from mtpc.certificate.sums import SLOT, Sum, layout_of, minus, number, places, plus, start

_REPORTS = (*tables.WRITES["accept"], *tables.WRITES["write_logprobs"])


def kernel(c: Checker) -> Any:
    """The results: of the rows' requests alone, if every argument is.

    Raises:
        RefusedError: it emits something else, or keeps it, or writes to places that it may not.
    """
    spots = c.at("slot_mapping")
    if isinstance(spots, Value) and "kept" not in spots.facts:
        raise RefusedError(spots.why or f"{c.op} ({c.name}) writes to {spots}: not masked places")
    try:
        made = _results(c, *tables.KERNELS[c.op])
    except UnknownError as error:
        if c.op in tables.WRITES:
            raise RefusedError(str(error)) from None
        raise
    for name in tables.WRITES.get(c.op, ()):
        _report(c, name)
    return made if len(made) > 1 else made[0]


def _results(c: Checker, names: tuple[str, ...], features: int) -> list[Value]:
    read = {name: c.at(name) for name in c.args if name != "places"}
    if c.at("places") is not None:
        read["logits"] = _placed(c)
    given = [v for v in map(read.get, names) if isinstance(v, Value) and "uniform" not in v.facts]
    if c.num_reqs == 1:
        given = _only_row(c, given)
    if c.at("rows") is not None:
        given = [_in_use(c, v) if "alike" in v.facts else v for v in given]
    lead = 1 if features < 0 else len(given[0].dims) - features
    dims = given[0].dims[:lead]
    layouts: list[Layout] = [dim for dim in dims if dim is not None] or [None]
    if any(v.kind == Kind.ANY for v in given):
        c.unknown("", *given)
    if any(v.kind == Kind.PLACE and "kept" not in v.facts for v in given):
        c.unknown("computes with numbers of places")
    is_const = (
        c.op not in tables.WRITES and {v.kind for v in given} == {Kind.CONST} and not any(dims)
    )
    is_split = any(v.dims[:lead] != dims or any(v.dims[lead:]) for v in given)
    if not is_const and (is_split or len(layouts) != 1 or not isinstance(layouts[0], tuple)):
        c.unknown("gets " + ", ".join(map(str, given)))
    for name, value in read.items():
        for one in value if isinstance(value, list) else [value]:
            if name not in names and isinstance(one, Value):
                wrong = _wrong(c, name, one, layouts[0])
                if wrong:
                    c.unknown(f"gets {name} as {one}: {wrong}", one)
    kind = max(Kind.OWN if v.kind == Kind.PLACE else v.kind for v in given)
    if kind == Kind.UPTO and c.op in tables.WHOLE:
        c.unknown("reads rows after the last accepted one")
    made = [Value(s, (*dims, *[None] * (len(s) - lead)), kind) for s in c.shapes]
    return [_named(c, number, value) for number, value in enumerate(made)]


def _placed(c: Checker) -> Value:
    """The logits of each row, which `places` takes as `index_select` does."""
    as_moved = copy(c)
    as_moved.base = "index_select"
    logits, places = as_moved.at("logits"), as_moved.at("places")
    as_moved.shapes = [(*places.shape, *logits.shape[1:])]
    try:
        found: Value = c.seen(moves.taken(as_moved, logits, 0, [places]))
    except UnknownError as error:
        c.unknown(str(error))
    return found


def _in_use(c: Checker, value: Value) -> Value:
    """Rows that are all alike, as those of the requests that the argument `rows` counts."""
    used = c.at("rows").number or ()
    layout = number(value.shape[0] // c.num_reqs)
    if used != start(layout, "used") or value.shape[0] % c.num_reqs:
        return value
    return replace(value, dims=(layout, *value.dims[1:]), kind=Kind.OWN)


def _only_row(c: Checker, given: list[Value]) -> list[Value]:
    """Arguments of a step of one request: its only row is along any dimension of size 1, and so
    along the first argument's."""
    if c.op in ("count_tokens", "write_logprobs"):
        return [replace(v, dims=(REQUESTS, *[None] * (len(v.dims) - 1))) for v in given]
    single = [all(n == 1 for n, dim in zip(v.shape, v.dims, strict=True) if dim) for v in given]
    if not single[0] or 1 not in given[0].shape:
        return given
    at = next((n for n, dim in enumerate(given[0].dims) if dim), given[0].shape.index(1))
    return [
        replace(v, dims=(*[None] * at, REQUESTS, *[None] * (len(v.dims) - at - 1)))
        if is_single
        and v.kind in (Kind.OWN, Kind.UPTO, Kind.PLACE)
        and v.shape[at : at + 1] == (1,)
        else v
        for v, is_single in zip(given, single, strict=True)
    ]


def _named(c: Checker, index: int, value: Value) -> Value:
    """A result with what it names."""
    first = (REQUESTS, *[None] * (len(value.shape) - 1))
    if c.op == "choose_slots":
        rows = c.at("index_cache").shape[1]
        entry = c.part(value.dims, [()], [number(rows - 1)], None)
        named = plus((c.at("block_table").number, rows), (entry, 1))
        return replace(value, kind=Kind.PLACE, number=named)
    if c.op in tables.ANCHORED:
        return Value(value.shape, first, Kind.OWN)
    if c.op != "accept":
        return value
    part = c.bounds.add(f"{c.name}.{index}", [()])
    if index:
        return Value(value.shape, first, Kind.OWN, part)
    layout = layout_of(c.as_bounds(c.at("query_start_loc")).number) or ()
    c.bounds.add(part[0][0], [], [minus(layout, REQUESTS)])
    c.anchors[part] = [layout]
    for goal in c.at("ids").those("beyond"):  # No draft is accepted that is not verified.
        (column,) = [one for one, _ in goal if one[0] == "~"]
        rest = plus((goal, 1), (((column, 1),), 1))
        c.bounds.add(part[0][0], [], [rest])
        c.anchors[part].append(plus((rest, 1), (REQUESTS, 1)))
    return Value(value.shape, first, Kind.PLACE, plus((start(layout), 1), (part, 1)))


def _wrong(c: Checker, name: str, value: Value, layout: Layout) -> str:
    """Why an argument is not the one that a row, or its request, may read; "" if it is."""
    first, named = value.dims[0] if value.dims else None, value.number
    if name in _REPORTS or (value.kind == Kind.CONST and name not in tables.OWNED):
        return ""
    by_row = _is_by_row(c)
    if name == "query_start_loc":
        layout = c.at("ids").dims[0] if c.op == "accept" else layout
        ends = c.as_bounds(value)
        is_own = by_row or (ends is not None and ends.number == start(layout))
        return "" if is_own else "not the bounds of its rows"
    if name in ("state_slots", "state_indices", "row_slots"):
        owners = layout if name == "row_slots" else REQUESTS
        return "" if (named, first) == (SLOT, owners) else "not slots"
    if name == "sees_fresh":
        is_own = (value.kind, value.dims) == (Kind.DIAGONAL, (layout, layout))
        return "" if is_own else "not rows of one request"
    if name == "chosen_entries":
        entries = c.at("entries")
        is_own = first == layout and owned(c, value, entries.dims[0], entries.shape[1])
        return "" if is_own else "not of its slot"
    if name == "anchors":
        is_own = layout_of(named) == layout and c.anchored(minus(named, start(layout)), layout)
        return "" if is_own else "not the last accepted rows"
    if name == "rows":
        is_each = named == start(REQUESTS, "used") and c.bounds.holds(minus(REQUESTS, layout))
        return "" if is_each or named == start(layout, "used") else "not the rows in use"
    if name == "block_table":
        owners = layout if by_row else REQUESTS
        is_page = value.kind == Kind.PLACE and first == owners
        return "" if is_page else "not the pages"
    if name == "seq_lens":
        is_length = first == REQUESTS and c.bounds.holds(minus(named or (), layout))
        is_length |= by_row and (value.kind, first) == (Kind.OWN, layout)
        return "" if is_length else "not lengths"
    if isinstance(first, str):
        place = c.at("slot_mapping") or c.at("block_table")
        if not isinstance(place, Value):
            return "" if first == "slots" else "not by its own pages"
        per = c.at(name).shape[1] if "slot_mapping" in c.args else 1
        return "" if owned(c, place, first, per) else "not by its own places"
    if name == "ids" and c.op == "accept":
        return "" if value.kind == Kind.OWN and isinstance(first, tuple) else "not its rows"
    is_own = value.kind == Kind.OWN and isinstance(first, tuple) and first[0][0] == "1"
    return "" if is_own else "not its request's"


def _is_by_row(c: Checker) -> bool:
    """Whether each row attends by itself, to pages of one row."""
    starts, query = c.at("query_start_loc"), c.at("q") or c.at("query")
    if not isinstance(starts, Value) or not isinstance(query, Value):
        return False
    return is_iota(starts) and starts.shape[0] == query.shape[0] + 1


def _report(c: Checker, name: str) -> None:
    """What a kernel writes to the batch has its values from now on."""
    given = str(c.args[name])[1:]
    buffer = c.buffers.get(given, "")
    if buffer.startswith("batch."):
        shape = tuple(c.calls[given][3][0])
        width = c.at("chosen").shape[0] // c.num_reqs if c.op == "accept" else 0
        part = None
        if name == "num_accepted":
            part = c.bounds.add(f"{c.name}.{name}", [()], [number(width - 1)])
        c.content[buffer] = Value(shape, (REQUESTS, *[None] * (len(shape) - 1)), Kind.OWN, part)

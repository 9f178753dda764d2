"""The rule of kernels: each argument has the rows, requests, pages or slots that its name says."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from mtpc.certificate import moves, tables
from mtpc.certificate.checker import REQUESTS, Checker, Kind, RefusedError, UnknownError, Value
from mtpc.certificate.sums import NONE, ONE, SLOT, Sum


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
        raise RefusedError(str(error)) if c.op in tables.WRITES else error from None
    for name in tables.WRITES.get(c.op, ()):
        _report(c, name)
    return made if len(made) > 1 else made[0]


def _results(c: Checker, names: tuple[str, ...], features: int) -> list[Value]:
    read = {name: c.at(name) for name in c.args if name != "places"}
    if c.at("places") is not None:
        read["logits"] = _placed(c)
    given = [v for v in map(read.get, names) if isinstance(v, Value) and "uniform" not in v.facts]
    given = _only_row(c, given) if c.num_reqs == 1 else given
    given = [_in_use(c, v) if "alike" in v.facts else v for v in given]
    lead = 1 if features < 0 else len(given[0].dims) - features
    dims = given[0].dims[:lead]
    layout = next((dim for dim in dims if dim is not None), None)
    c.need(all(v.kind != Kind.ANY for v in given), "", *given)
    are_numbers = all(v.kind != Kind.PLACE or "kept" in v.facts for v in given)
    c.need(are_numbers, "computes with numbers of places")
    is_const = c.op not in tables.WRITES and not any(dims) and not any(v.kind for v in given)
    is_whole = all(v.dims[:lead] == dims and not any(v.dims[lead:]) for v in given)
    is_rows = is_whole and sum(map(bool, dims)) == 1 and isinstance(layout, Sum)
    c.need(is_rows or is_const, "gets " + ", ".join(map(str, given)))
    for name in read.keys() - names:
        for v in read[name] if isinstance(read[name], list) else [read[name]]:
            is_right = not isinstance(v, Value) or _is_right(c, name, v, layout)
            c.need(is_right, f"gets {name} as {v}: not what its rows, or requests, may read", v)
    kind = max(Kind.OWN if v.kind == Kind.PLACE else v.kind for v in given)
    is_early = kind != Kind.UPTO or c.op not in tables.WHOLE
    c.need(is_early, "reads rows after the last accepted one")
    made = [Value(s, (*dims, *[None] * (len(s) - lead)), kind) for s in c.shapes]
    return [_named(c, number, value) for number, value in enumerate(made)]


def _placed(c: Checker) -> Value:
    """The logits of each row, which `places` takes as `index_select` does."""
    logits, places, moved = c.at("logits"), c.at("places"), copy(c)
    moved.shapes = [(*places.shape, *logits.shape[1:])]
    try:
        found: Value = c.seen(moves.taken(moved, logits, 0, [places]))
        return found
    except UnknownError as error:
        c.unknown(str(error))


def _in_use(c: Checker, value: Value) -> Value:
    """Rows that are all alike, as those of the requests that the argument `rows` counts."""
    layout, used = ONE * (value.shape[0] // c.num_reqs), c.at("rows")
    if used is None or used.sum != layout.starts("used") or value.shape[0] % c.num_reqs:
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
    for n, v in enumerate(given):
        if single[n] and Kind.OWN <= v.kind <= Kind.PLACE and v.shape[at : at + 1] == (1,):
            dims = tuple(REQUESTS if axis == at else None for axis in range(len(v.dims)))
            given[n] = replace(v, dims=dims)
    return given


def _named(c: Checker, index: int, value: Value) -> Value:
    """A result with what it names."""
    of_requests = Value(value.shape, (REQUESTS, *[None] * (len(value.shape) - 1)), Kind.OWN)
    if c.op == "choose_slots":
        rows = c.at("index_cache").shape[1]
        entry = c.part(value.dims, [NONE], [ONE * (rows - 1)])
        return replace(value, kind=Kind.PLACE, number=c.at("block_table").sum * rows + entry)
    if c.op != "accept":
        return of_requests if c.op in tables.ANCHORED else value
    part = c.bounds.add(f"{c.name}.{index}", [NONE])
    if index:
        return replace(of_requests, number=part)
    ends = c.as_bounds(c.at("query_start_loc"))
    layout = (ends.sum.layout if ends else None) or NONE
    highs = [layout - 1]
    for goal in c.at("ids").those("beyond"):  # No draft is accepted that is not verified.
        columns = [part for part, n in goal.parts if part.startswith("~iota") and n == -1]
        highs += [goal + Sum.of({part: 1}) for part in columns]
    c.bounds.add(f"{c.name}.{index}", [], highs)
    c.bounds.anchors[part] = [high + 1 for high in highs]
    return replace(of_requests, kind=Kind.PLACE, number=layout.starts() + part)


def _is_right(c: Checker, name: str, value: Value, layout: Any) -> bool:
    """Whether an argument is one that a row, or its request, may read."""
    first, named, holds = value.dims[0] if value.dims else None, value.sum, c.bounds.holds
    if name in tables.OUTPUTS or (value.kind == Kind.CONST and name not in tables.OWNED):
        return True
    if layout is None:
        return False
    starts, query = c.at("query_start_loc"), c.at("q") or c.at("query")
    by_row = isinstance(starts, Value) and starts.is_count and isinstance(query, Value)
    by_row = by_row and starts.shape[0] == query.shape[0] + 1  # Each row attends by itself.
    if isinstance(first, str) and name not in tables.OWNED and first != "bounds":
        place = c.at("slot_mapping") or c.at("block_table")
        per = value.shape[1] if "slot_mapping" in c.args else 1
        return first == "slots" if place is None else moves.owned(c, place, first, per)
    if name == "query_start_loc":
        ends, read = c.as_bounds(value), c.at("ids").dims[0] if c.op == "accept" else layout
        is_own = ends is not None and isinstance(read, Sum) and ends.sum == read.starts()
        return by_row or is_own
    if name == "chosen_entries":
        entries = c.at("entries")
        return first == layout and moves.owned(c, value, entries.dims[0], entries.shape[1])
    if name == "rows":
        is_each = named == ONE.starts("used") and holds(ONE - layout)
        return is_each or named == layout.starts("used")
    if name == "seq_lens":
        is_own = by_row and (value.kind, first) == (Kind.OWN, layout)
        return is_own or (first == REQUESTS and holds(named - layout))
    if name == "ids" and c.op == "accept":
        return value.kind == Kind.OWN and isinstance(first, Sum)
    slot, pages = (named, first) == (SLOT, REQUESTS), layout if by_row else REQUESTS
    return {
        "state_slots": slot,
        "state_indices": slot,
        "row_slots": (named, first) == (SLOT, layout),
        "sees_fresh": (value.kind, value.dims) == (Kind.DIAGONAL, (layout, layout)),
        "anchors": named.layout == layout and named.own in c.bounds.accepted(layout),
        "block_table": (value.kind, first) == (Kind.PLACE, pages),
    }.get(name, value.kind == Kind.OWN and first is not None and "1" in dict(first.parts))


def _report(c: Checker, name: str) -> None:
    """What a kernel writes to the batch has its values from now on."""
    given = str(c.args[name])[1:]
    buffer = c.buffers.get(given, "")
    if buffer.startswith("batch."):
        shape = tuple(c.calls[given][3][0])
        width = c.at("chosen").shape[0] // c.num_reqs if c.op == "accept" else 0
        is_count = name == "num_accepted"
        part = c.bounds.add(f"{c.name}.{name}", [NONE], [ONE * (width - 1)]) if is_count else None
        dims = (REQUESTS, *[None] * (len(shape) - 1))
        c.content[buffer] = Value(shape, dims, Kind.OWN, part)

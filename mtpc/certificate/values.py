"""What the checker knows of a value, and how dimensions and integers follow from others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from mtpc.certificate.tables import LEMMAS

KINDS = CONST, OWN, UPTO, PLACE, DIAGONAL, PAIR, ANY = (
    "const", "own", "upto", "place", "diagonal", "pair", "any",
)  # fmt: skip
"""const: the same in any company. own: a request's alone, the one that the row belongs to. upto: so
in its rows up to the last accepted one. place: a number that names a place. diagonal, pair: of two
requests; the first is 0 where they are not one. any: nothing is known."""
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
        kind: one of `KINDS`.
        tag: what an integer names, and of what: see `tables.LEMMAS`.
        facts: what is known where a boolean is true; conditions under which a value is known.
        why: the operator that made it `any`.
    """

    shape: tuple[Any, ...]
    dims: tuple[Layout, ...]
    kind: str = CONST
    tag: tuple[Any, ...] = ()
    facts: frozenset[Any] = frozenset()
    why: str = ""

    @property
    def is_conditional(self) -> bool:
        """Whether rows may be another request's where a condition does not hold."""
        return any(fact[0] in ("unless", "where") for fact in self.facts)

    def __str__(self) -> str:
        dims = ", ".join("-" if dim is None else text_of(dim) for dim in self.dims)
        return f"{self.kind}[{dims}] {' '.join(map(text_of, self.tag))}".rstrip()


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


def lemma(
    op: str, one: Value, other: Value, known: Sequence[Sequence[str]] = LEMMAS
) -> tuple[Any, ...]:
    """The tag of a sum, a product or a minimum, by the first lemma that fits; () if none does."""
    for name, left, right, result in known:
        if name != op:
            continue
        for tag in _tags(one):
            for second in _tags(other):
                bound: dict[str, Any] = {}
                if _binds(left, tag, bound) and _binds(right, second, bound):
                    head, *params = result.split(":")
                    made = [_bound(param, bound) for param in params]
                    return (head, *made)
    return ()


def _bound(param: str, bound: dict[str, Any]) -> Any:
    """A letter of a result, or the sum of two."""
    one, _, other = param.partition("+")
    return sum_of(bound[one], bound[other]) if other else bound.get(one, one)


def _tags(value: Value) -> list[tuple[Any, ...]]:
    """What a lemma may take a value for."""
    if value.tag == ("request",):
        return [value.tag, ("row", REQUESTS), ("start", REQUESTS)]
    return [value.tag] if value.tag else []


def _binds(pattern: str, tag: tuple[Any, ...], bound: dict[str, Any]) -> bool:
    """Whether a tag fits a pattern; binds the pattern's letters."""
    name, *params = pattern.split(":")
    if tag[0] == "#":
        return (name == "n" and bound.setdefault("n", tag[1]) == tag[1]) or name == str(tag[1])
    if name != tag[0] or len(params) != len(tag) - 1:
        return False
    return all(
        bound.setdefault(p, value) == value for p, value in zip(params, tag[1:], strict=True)
    )


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

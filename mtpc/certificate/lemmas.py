"""What integers name: lemmas of arithmetic, and of comparisons."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mtpc.certificate.checker import REQUESTS, Value, sum_of


def _lemmas(text: str) -> tuple[tuple[str, ...], ...]:
    """Operator, left, right and result of each."""
    return tuple(re.findall(r"(\w+) (\S+) (\S+) = (\S+)", text))


LEMMAS = _lemmas("""
add cnt:C row:L = pos+:C:L           sub pos+:C:L start:L = pos*:C:L  sub pos:C:L col:n = pos:C:L
add start:L pos:C:L = past+:C:L      sub past+:C:L cnt:C = past:C:L   sub len:C:L cnt:L = head:C
sub end:L start:L = cnt:L            sub end:L cnt:L = start:L        sub end:L cnt:C = tail:L:C
add tail:L:C row:C = tail+:L:C       sub tail+:L:C start:C = some:L   sub end:L 1 = last:L
add wins:C:n row:W = wins+:C:n:W     sub row:L start:L = off:L        add start:P off:L = into:P:L
sub row:M end:E = fresh:M:E          add anchor:L end:M = anchor:L+M  add start:L col:n = start+:L:n
minimum start+:L:n last:L = some:L   add start:M capped:L:n = into:M:L:n
sub anchor:L desc:n = back:L         maximum back:L start:L = anchor:L
add cnt:L cnt:M = len:L:M            add request 1 = next             sub slot 1 = slot-
mul slot- n = ring-:n                add ring-:n 1 = ring:n           add ring:n mod:n = page:n
mul page:X n = page*:X:n             add page*:X:n mod:n = place:X:n  mul slot n = page*:S:n
add start:L taken:n = start+:L:n     mul window:C:L:n n = opens:C:L:n
add start:L anchor:M = shift:L:M     sub shift:L:M start:M = anchor:L
floor_divide cnt:C n = wins:C:n      floor_divide len:C:L n = wine:C:L:n
sub wine:C:L:n wins:C:n = news:C:L:n sub wins+:C:n:W start:W = window:C:n:W
add opens:C:L:n col:n = pos:C:L      add opens:C:L:n under:n = pos:C:L
add page*:X:m window:C:L:n = spill:X:m
""")
"""What integers name, by operator: operator, left, right = result; the first that fits.

`start`, `end`: where the rows of a request begin and end in a layout, and `cnt`: their number;
`row`: the row that holds the number; `some`: one of the request's; `anchor`: the last accepted one,
or one before it; `off`: a number below `cnt`; `col:n`, `mod:n`: below n; `desc:n`: n - 1 and down;
`under:n`: -n and up, below n; `taken:n`: drafts that are accepted, below n; `tail:L:C`: where the
last C rows of L begin; `into:P:L`: a row of P if L has no more; `fresh:M:E`: a row of M less E,
unless it is one of E; `last`: the last row; `len`: a length with that many rows; `ring:n`: the
first of n pages of a slot; `place`: of a row in pages; `pos:C:L`: C and a row's offset, or less,
and 0 where the request is off, as in `pos*` it need not be; `past:C:L`: the row that is there, if C
is no more; `head:C`: C where the request is on; `capped:L:n`: `off:L`, or n - 1 if that is less;
`into:M:L:n`: so far into M; `shift:L:M`: a row of L and where M begins; `wins`, `wine`: how many
windows of n positions are closed before and after the rows of L; `news`: the difference;
`window:C:L:n`: the number of one that the rows close; `opens`: its first position; `spill`: the
place of a row in pages, or behind them.
"""
FACTS = _lemmas("""
ge pos:C:L cnt:C = inside:C:L        lt off:L cnt:C = below:L:C       lt col:n cnt:L = within:L
ge off:L n = from:n:L                le end:L n = fits:L              lt window:C:L:r n = fewer
gt len:C:L 0 = on                    ne slot 0 = null                 eq slot 0 = null
ge page:X 0 = null                   ne page:X 0 = null               eq page:X 0 = null
""")
"""What comparisons say where they are true: a position is that of a row, an offset is below C, a
column below the number of rows, an offset n or more, the rows fit, a window below a number; a
request is on, a place is the null page or scratch slot, or is not."""


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

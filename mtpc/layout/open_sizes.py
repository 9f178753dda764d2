"""Open sizes: sizes of shared state that a compiled step does not fix.

They get their values when the step is bound to tensors. A size that depends on them is text, a sum
of products: "5*S+-4" is 5 S - 4. The names are those of the symbols in `layout.buffers`, which a
warm start does not import.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from types import MappingProxyType

from mtpc.errors import CacheError
from mtpc.plan import Plan

Size = int | str
"""A number, or a sum of products as above."""

SIZES = BLOCKS, PAGES, SLOTS = "M", "N", "S"
"""Blocks of a request, pages of a pool, request slots; the names of open sizes."""
_FACTOR = rf"(?:-?\d{{1,15}}|{BLOCKS}|{PAGES}|{SLOTS})"
_TERM = rf"{_FACTOR}(?:\*{_FACTOR})*"
_SUM = re.compile(rf"{_TERM}(?:\+{_TERM})*")


NO_SIZES: Mapping[str, int] = MappingProxyType({})
"""For steps without open sizes."""


def shared_sizes(plan: Plan) -> dict[str, int]:
    """The open sizes of a program, as planned."""
    return {
        BLOCKS: plan.blocks_per_request(plan.max_len),
        PAGES: plan.num_pages,
        SLOTS: max(plan.batch_buckets) + 1,
    }


def is_size_text(value: object) -> bool:
    """Whether a value is the text of a size that depends on open sizes."""
    return isinstance(value, str) and _SUM.fullmatch(value) is not None


def size_of(size: Size, sizes: Mapping[str, int]) -> int:
    """The number of a size, which may be text in the open sizes.

    Raises:
        CacheError: the text is not a size.
    """
    if isinstance(size, int):
        return size
    if not is_size_text(size):
        raise CacheError(f"a step has the size {size[:60]!r}; run `mtpc cache verify`")
    terms = (term.split("*") for term in size.split("+"))
    return sum(prod(sizes[f] if f in SIZES else int(f) for f in term) for term in terms)

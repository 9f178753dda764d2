"""Traits: what passes and checkers need to know of an operator, and its schema does not say.

An operator's traits are declared with it, as data. A backend's kernel of it, such as
`mtpc_cpu::NAME`, has the traits of `mtpc::NAME`. Those of ATen's operators are one table here. So
no pass keeps a list of names for what is true of an operator by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._ops import OpOverload
from torch.library import CustomOpDef

Reach = Literal["row", "earlier", "request", "all", "dims"]
"""What a row of the results may depend on, of the arguments that have rows: `row`: the same row;
`earlier`: it and the earlier ones of its request; `request`: all rows of its request; `all`: any
row; `dims`: it follows from `Dims`."""
Arithmetic = Literal["moves", "elements", "compares", "sums"]
"""What an operator computes, the last that applies. `moves`: it copies numbers, or makes some;
`elements`: arithmetic on elements, and sums of integers; `compares`: it finds the largest or
smallest of several; `sums`: it adds floating-point numbers, so the order of additions is part of
the result."""
Dims = Literal[
    "broadcast", "same", "cast", "reshape", "swap", "add", "drop", "along", "reduce", "join",
    "matmul", "linear", "look_up",
]  # fmt: skip
"""How the dimensions of a result follow from those of the inputs. `broadcast`: they align at the
last; `same`: they are the first input's; `cast`: so too, and only the dtype changes; `swap`: two
change places; `add`, `drop`: one comes, one goes; `along`: the operator works along one; `reduce`:
it combines some to one element each; `join`: inputs follow each other along one; `matmul` and
`linear` are products; `look_up`: rows of a table."""
SUM: Literal["sum"] = "sum"


@dataclass(frozen=True)
class Cut:
    """A way to share a call among ranks.

    Attributes:
        arguments: those of which each rank has a part -> the dimension that is cut. What a call
            leaves out does not count; of all other arguments every rank has the whole.
        result: the dimension along which the result is cut; `SUM`: each rank has a summand of it;
            None: there is none.
    """

    arguments: Mapping[str, int]
    result: int | Literal["sum"] | None


@dataclass(frozen=True)
class Traits:
    """What is true of an operator by itself.

    `rows`, `requests`, `pages` and `slots` name arguments, separated by spaces. What they leave out
    every row reads whole: weights, numbers.

    Attributes:
        reach: see `Reach`.
        arithmetic: see `Arithmetic`.
        rows: arguments whose leading dimensions are rows, each for the same row of the results.
        requests: arguments with an entry for each request.
        pages: caches, of which a request reads and writes its own pages.
        slots: arguments with a row for each request slot, of which a request has its own.
        features: how many last dimensions of the first of `rows` belong to a row; None: all but
            the first.
        skips_idle: whether rows of requests that are off, and of none, are never read.
        chooses: whether the result is a choice, on which all ranks must agree.
        writes_as: the operator whose writes it does, if it is made of that one and others.
        gated: the operator that computes its result and `silu_and_mul` of it.
        cuts: the ways to share a call among ranks.
        dims: see `Dims`; of operators without named rows.
    """

    reach: Reach
    arithmetic: Arithmetic
    rows: str = ""
    requests: str = ""
    pages: str = ""
    slots: str = ""
    features: int | None = 1
    skips_idle: bool = False
    chooses: bool = False
    writes_as: str | None = None
    gated: str | None = None
    cuts: tuple[Cut, ...] = ()
    dims: Dims | None = None

    def row_dims(self, first: torch.Tensor) -> int:
        """How many leading dimensions of the first of `rows` are rows."""
        return 1 if self.features is None else first.dim() - self.features


UNKNOWN = Traits("all", "sums")
"""The traits of an operator that declares none: whatever it may do, this is true of it."""
_DECLARED: dict[str, Traits] = {}
"""Of operators by name. As torch's own register of operators, it grows where they are declared."""
_ALSO: dict[str, str] = {}
"""Operators of backends whose names are not those of the operators that they compute -> these."""


def operator(
    traits: Traits,
    result: str | Callable[..., Any] | None = None,
    mutates_args: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Declare the operator `mtpc::NAME`; NAME is the name of the function, its reference.

    `result` makes its results, uninitialised and dense, of arguments by their names; or is the name
    of the argument that its only result is like; None: it has none. `mutates_args` are the
    arguments that it writes, as `torch.library.custom_op` has them.
    """
    make = (lambda like: like.new_empty(like.shape)) if isinstance(result, str) else result

    def declare(reference: Callable[..., Any]) -> CustomOpDef:
        name, signature = reference.__name__, inspect.signature(reference)
        _DECLARED[name] = traits
        made = torch.library.custom_op(f"mtpc::{name}", reference, mutates_args=mutates_args)
        if make is None:
            return made
        read = [result] if isinstance(result, str) else [*inspect.signature(make).parameters]

        def fake(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return make(*(given.arguments[argument] for argument in read))

        made.register_fake(fake)
        return made

    return declare


def share_traits(name: str, reference: OpOverload) -> None:
    """Declare that a backend's operator `name` is one of several ways to compute a reference.

    Args:
        name: without its namespace.
        reference: an overload of `mtpc::`.
    """
    _ALSO[name] = reference.overloadpacket.__name__


def with_features(x: torch.Tensor, features: int) -> torch.Tensor:
    """The result of linears of x [..., K]: [..., features]."""
    return x.new_empty((*x.shape[:-1], features))


def largest_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of a maximum of x [..., N]: its values, and its places, int64."""
    return x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1], dtype=torch.int64)


_ATEN: tuple[tuple[Arithmetic, Dims | None, str], ...] = (
    ("elements", "broadcast", "floor_divide __and__ __or__"),
    ("moves", "cast", "to _to_copy type_as"),
    ("moves", "same", "alias clone.default contiguous detach"),
    ("moves", "reshape", "view.default reshape flatten.using_ints unflatten.int"),
    ("moves", "swap", "transpose.int"),
    ("moves", "add", "unsqueeze stack"),
    ("moves", "drop", "squeeze.dim select.int"),
    ("moves", "along", "slice.Tensor chunk split_with_sizes index_select"),
    ("moves", "join", "cat.default"),
    ("moves", "look_up", "embedding"),
    ("moves", None, "as_strided constant_pad_nd copy_ expand flatten full_like gather index "
     "index_copy_ index_put_ movedim new_empty new_full new_zeros ones_like permute repeat "
     "repeat_interleave scatter scatter_ select slice split squeeze t transpose unbind unflatten "
     "_unsafe_view view zeros_like"),
    ("compares", "reduce", "amax amin"),
    ("compares", None, "all any argmax argmin max min sort topk"),
    ("sums", "reduce", "mean.dim sum.dim_IntList"),
    ("sums", "matmul", "matmul"),
    ("sums", "linear", "linear"),
)  # fmt: skip
"""Arithmetic, dimensions, and names of ATen's operators; a name without an overload is for all.
Elementwise ones are found by torch's tag: the table has those that lack it."""
_CHOICES = ("argmax.default", "max.dim")
_ELEMENTS = Traits("dims", "elements", dims="broadcast")
_ATEN_TRAITS = {
    name: Traits("dims", arithmetic, dims=dims)
    for arithmetic, dims, names in _ATEN
    for name in names.split()
} | dict.fromkeys(_CHOICES, Traits("dims", "compares", chooses=True))


def declared() -> list[str]:
    """The names of all operators that are declared so far."""
    return sorted(_DECLARED)


def traits_of(target: Any) -> Traits:
    """The traits of what a node calls; `UNKNOWN` where nothing declares them."""
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return UNKNOWN
    name = target._schema.name.partition("::")[2]
    if target.namespace != "aten":
        is_ours = target.namespace.startswith("mtpc")
        return _DECLARED.get(_ALSO.get(name, name), UNKNOWN) if is_ours else UNKNOWN
    by_name = _ELEMENTS if torch.Tag.pointwise in target.tags else _ATEN_TRAITS.get(name, UNKNOWN)
    return _ATEN_TRAITS.get(f"{name}.{target._overloadname}", by_name)


def is_view(target: Any) -> bool:
    """Whether the result of what a node calls may be in the memory of an argument that it does not
    write, by the operator's schema."""
    if not isinstance(target, OpOverload):
        return False
    aliases = [result.alias_info for result in target._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def counts_rows(target: Any) -> bool:
    """Whether an operator can be told how many leading rows are in use, by an argument `rows`."""
    return isinstance(target, OpOverload) and any(
        one.name == "rows" and one.has_default_value() for one in target._schema.arguments
    )

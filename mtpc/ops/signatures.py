"""Python signatures from operator schemas, for functions that replace the references."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from inspect import Parameter, Signature
from types import MappingProxyType
from typing import Any

from torch import Tensor, fx

_TYPES: dict[str, Any] = {
    "Tensor": Tensor,
    "Optional[Tensor]": Tensor | None,
    "List[Tensor]": Sequence[Tensor],
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
}
_RESULTS: tuple[Any, ...] = (None, Tensor)


def signature_of(reference: Any, taken: Iterable[str]) -> Signature:
    """The Python signature of a reference, the overload of an operator, with the arguments that a
    replacement takes. Those without a default must be among them.

    Raises:
        TypeError: the operator has no argument of a name, or needs one that is not taken.
    """
    schema, taken = reference._schema, list(taken)
    parameters = [
        Parameter(
            argument.name,
            Parameter.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if argument.has_default_value() else Parameter.empty,
            annotation=_TYPES[str(argument.type)],
        )
        for argument in schema.arguments
        if argument.name in taken or not argument.has_default_value()
    ]
    if [parameter.name for parameter in parameters] != taken:
        raise TypeError(f"{schema} cannot be called with {', '.join(taken)}")
    count = len(schema.returns)
    result = tuple[(Tensor,) * count] if count > 1 else _RESULTS[count]  # type: ignore[misc]
    return Signature(parameters, return_annotation=result)


def with_signature(function: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """A function of any arguments that shows this signature to `torch.library`."""
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def written_by(reference: Any) -> tuple[str, ...]:
    """The arguments that an operator writes."""
    arguments = reference._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)


def given_to(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults left out."""
    return {**dict(zip(defaults_of(node.target), node.args, strict=False)), **node.kwargs}


@cache
def defaults_of(overload: Any) -> Mapping[str, Any]:
    """The default of every argument of an operator overload by name, in the schema's order; None
    for those that have none. Passes ask for each call again and again, and a schema is slow."""
    return MappingProxyType({a.name: a.default_value for a in overload._schema.arguments})


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """As `given_to`, with (fake) values in place of nodes."""
    return dict(fx.node.map_aggregate(given_to(node), value_of))


def value_of(argument: Any) -> Any:
    """An argument of a call; for a node, its (fake) value."""
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument

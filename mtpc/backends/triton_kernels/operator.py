"""How an operator says what it launches, and which calls it cannot take.

A file in `ops` holds the kernels of one operator, or of several that share them, and their plans:
functions with the decorator `@operator` and with the operator's name and arguments. Wrappers,
fakes, limits and lists of names follow from the plan and from the reference's schema.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from mtpc.backends.triton_kernels import ELEMENTS
from mtpc.backends.triton_kernels.configs import BATCH_INVARIANT, apply_configs
from mtpc.backends.triton_kernels.launch import NO_CHOICE, Launch
from mtpc.layout import dtype_name
from mtpc.ops import references
from mtpc.ops.attention import LARGEST_CODE
from mtpc.ops.signatures import arguments_of, signature_of

Plan = tuple[list[Launch], Tensor | tuple[Tensor, ...] | None]
"""The launches of an operator, in order, and its results. Nothing is launched yet."""
Limit = Callable[[Mapping[str, Any]], str | None]
"""From arguments by name, with fake tensors: why a kernel cannot take them, or None if it can."""
_MAX_HEAD_DIM = 1024
"""A row of a head must fit into registers, as part of a tile."""


def attention_limit(call: Mapping[str, Any]) -> str | None:
    """Why a head of the first argument is too wide; None where it is not."""
    dim = next(iter(call.values())).shape[-1]
    return f"head dim {dim}; it takes up to {_MAX_HEAD_DIM}" if dim > _MAX_HEAD_DIM else None


@dataclass(frozen=True)
class Operator:
    """An operator with Triton kernels.

    Attributes:
        function: the plan. It takes the reference's arguments, by its names. It may leave out those
            that have a default there: then the operator does not take them. An argument that is
            annotated `None` takes no tensor. A plan whose order of sums depends on how many rows
            there are has one more argument, `batch_invariant`, which forbids that. Launches whose
            grid is empty, as it is of no rows, are left out.
        limit: why it cannot take a call.
        any_element: whether it takes any floating-point dtype, and not only `ELEMENTS`.
        codes: whether caches or weights may be codes, which may be float8.
        row_bound: why a row's sums depend on other rows, even with `batch_invariant`; None where
            they do not.
    """

    function: Callable[..., Plan]
    limit: Limit
    any_element: bool
    codes: bool
    row_bound: str | None

    @property
    def name(self) -> str:
        """Its name, without a namespace."""
        return self.function.__name__

    @cached_property
    def reference(self) -> Any:
        """The overload of `mtpc::NAME`."""
        return references()[self.name]

    @cached_property
    def signature(self) -> inspect.Signature:
        """The reference's arguments that the plan takes."""
        taken = inspect.signature(self.function).parameters
        return signature_of(self.reference, [name for name in taken if name != BATCH_INVARIANT])

    @cached_property
    def _depends_on_rows(self) -> bool:
        """Whether the order of a row's sums depends on the number of rows, unless forbidden."""
        return BATCH_INVARIANT in inspect.signature(self.function).parameters

    def plan(self, *args: Any, configs: str = "", **kwargs: Any) -> Plan:
        """The launches, in the configurations that `configs` names, and the results.

        Args:
            *args: the reference's, real or fake.
            configs: as `apply_configs` takes them, or `BATCH_INVARIANT`.
            **kwargs: the reference's.

        Raises:
            BackendError: they are not configurations of these launches, or a tensor has a layout
                that the kernels cannot take.
        """
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        is_fixed = configs == BATCH_INVARIANT
        fixed = {BATCH_INVARIANT: True} if is_fixed and self._depends_on_rows else {}
        launches, out = self.function(**bound.arguments, **fixed)
        launches = [launch for launch in launches if all(launch.grid)]
        if is_fixed:
            return [replace(launch, choice=NO_CHOICE) for launch in launches], out
        return apply_configs(launches, configs), out

    def refuses(self, node: fx.Node) -> str | None:
        """Why it cannot take a call; None where it can."""
        tensors = [a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta["val"], Tensor)]
        call = arguments_of(node)
        for name, parameter in inspect.signature(self.function).parameters.items():
            if parameter.annotation == "None" and call.get(name) is not None:
                return f"it takes no {name}"
        for tensor in () if self.any_element else tensors:
            is_code = self.codes and tensor.dtype in LARGEST_CODE
            if tensor.is_floating_point() and tensor.dtype not in ELEMENTS and not is_code:
                return (
                    f"{dtype_name(tensor.dtype)}; it takes {', '.join(map(dtype_name, ELEMENTS))}"
                )
        return self.limit(call)


def operator(
    limit: Limit = lambda call: None,
    any_element: bool = False,
    codes: bool = False,
    row_bound: str | None = None,
) -> Callable[[Callable[..., Plan]], Operator]:
    """Make an operator from its plan; see `Operator`."""
    return lambda function: Operator(function, limit, any_element, codes, row_bound)

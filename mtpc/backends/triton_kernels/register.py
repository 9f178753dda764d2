"""The kernels as operators of torch; importing this needs Triton and registers them.

Each exists twice, and collectives once, as the latter. `mtpc_triton::` leaves its launches visible
to Inductor, which plans their memory and compiles them itself. `mtpc_loaded::` launches as a plain
Triton program does, so that Triton uses the code objects that it finds in its cache (`loading`),
and a launch may begin early (`launch`). Both take the reference's arguments that the plan takes,
and `configs`, which says how kernels that have a choice are run ("" runs them by default).
"""

from __future__ import annotations

from inspect import Parameter
from typing import Any

from torch.library import custom_op, triton_op

from mtpc.backends.triton_kernels.launch import run
from mtpc.backends.triton_kernels.operator import Operator
from mtpc.backends.triton_kernels.ops import OPERATORS
from mtpc.ops.collectives import is_collective
from mtpc.ops.signatures import with_signature, written_by

_CONFIGS = Parameter("configs", Parameter.KEYWORD_ONLY, default="", annotation=str)


def _register(operator: Operator) -> None:
    def launch(*args: Any, **kwargs: Any) -> Any:
        launches, out = operator.plan(*args, **kwargs)
        run(launches)
        return out

    def fake(*args: Any, configs: str = "", **kwargs: Any) -> Any:
        return operator.reference(*args, **kwargs)

    taken = operator.signature.parameters
    parameters = [*taken.values(), _CONFIGS]
    function = with_signature(launch, operator.signature.replace(parameters=parameters))
    written = tuple(name for name in written_by(operator.reference) if name in taken)
    if not is_collective(operator.reference):  # Inductor would copy the memory that ranks share.
        triton_op(f"mtpc_triton::{operator.name}", function, mutates_args=written)
    loaded = custom_op(f"mtpc_loaded::{operator.name}", function, mutates_args=written)
    loaded.register_fake(fake)


for _operator in OPERATORS.values():
    _register(_operator)

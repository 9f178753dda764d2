"""Compares every operator that has a Triton kernel with its reference, on the measured device."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import util
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import mtpc.backends.gpu.ops  # noqa: F401  (it and mtpc.ops register the references)
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.op_inputs import CALLS, LENGTHS, Arguments, Inputs
from benchmarks.gpu.rows import Row
from mtpc.backends.check_device import capability_of
from mtpc.backends.torch_experts import FUNCTIONS, takes
from mtpc.layout import dtype_name
from mtpc.ops.attention import LARGEST_CODE

TOLERANCE = {
    torch.bfloat16: 1.6e-2,  # Two roundings of 2^-8: ours and the reference's.
    torch.float16: 2e-3,
    torch.float32: 1e-4,  # Sums of hundreds of products, in another order.
    torch.float64: 1e-9,  # Logarithms and exponentials are the device's library's.
}
"""Of |found - wanted| / (1 + |wanted|), by dtype: the result's, or the call's where that is looser,
for a state in float32 comes of rows in bfloat16. Integers are equal."""

_BY_TORCH = "bfloat16, PyTorch's grouped products"
"""The engine of rows of what may replace our kernels (`torch_experts`)."""


@dataclass(frozen=True)
class OpSet:
    """The operators that are compared with the references.

    Attributes:
        what: description for the rows.
        has_kernels: whether these are the Triton kernels, on a device or in Triton's interpreter.
            If not, the references are compared with themselves, which only tests the calls.
    """

    what: str
    has_kernels: bool

    @classmethod
    def of(cls, machine: Machine) -> OpSet:
        """The best that a machine has."""
        if not machine.is_dry:
            return cls("Triton on the device", True)
        if util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1":
            return cls("Triton's interpreter", True)
        return cls("the reference itself: no Triton, or TRITON_INTERPRET is not 1", False)

    def names(self) -> tuple[str, ...]:
        """Of the ops: those that are bound to kernels, where there are any."""
        if not self.has_kernels:
            return tuple(CALLS)
        return tuple(reference._opname for reference in _table())

    def overload(self, name: str) -> Any:
        """The kernel's op; the reference where there is none."""
        reference = getattr(torch.ops.mtpc, name).default
        return _table()[reference] if self.has_kernels else reference

    def run(self, name: str, arguments: Arguments, every: bool) -> Iterator[list[Tensor]]:
        """The results by default, or in every configuration."""
        for configs in self.configs(name, arguments) if every else [""]:
            yield _run(self.overload(name), arguments, configs)

    def configs(self, name: str, arguments: Arguments) -> list[str]:
        """By default, and in every other way to run a call, one kernel changed at a time."""
        if not self.has_kernels:
            return [""]
        from mtpc.backends.triton_kernels.configs import configs_of
        from mtpc.backends.triton_kernels.launch import vendor_here
        from mtpc.backends.triton_kernels.plans import plan

        launches, _ = plan(name, *arguments)
        return [""] + [
            f"{x.name}:{config}" for x in launches for config in configs_of(x, vendor_here())[1:]
        ]


def _table() -> dict[Any, Any]:
    from mtpc.backends.triton_kernels import kernel_table, load_kernels

    load_kernels()
    return kernel_table()


def op_rows(machine: Machine) -> Iterator[Row]:
    """The rows of all checks, not filled yet."""
    for name in OpSet.of(machine).names():
        for dtype in CALLS[name][1] if name in CALLS else (torch.bfloat16,):
            yield Row("ops", machine.name, name, dtype_name(dtype), 3, len(LENGTHS))
    if machine.is_dry or takes(capability_of(torch.device(machine.device))) is None:
        for function in FUNCTIONS:
            yield Row("ops", machine.name, function.__name__, _BY_TORCH, 3, len(LENGTHS))


def check_op(machine: Machine, row: Row) -> Row:
    """Fill a row: run all calls of its operator and dtype, and all configurations for one."""
    is_torchs = row.engine == _BY_TORCH
    ops, dtype = OpSet.of(machine), torch.bfloat16 if is_torchs else getattr(torch, row.engine)
    if row.shape not in CALLS:
        row.passed, row.note = False, "gpu/op_inputs.py has no call of this op"
        return row
    make, dtypes = CALLS[row.shape]
    worst, count = 0.0, 0
    for arguments in make(Inputs(dtype)):
        moved = tree_map_only(Tensor, lambda t: t.to(machine.device), arguments)
        wanted = _run(getattr(torch.ops.mtpc, row.shape).default, moved, "")
        by_kernels = ops.run(row.shape, moved, dtype == dtypes[0])
        for results in _by_torch(row.shape, moved) if is_torchs else by_kernels:
            worst, count = max(worst, difference(results, wanted, dtype)), count + 1
    row.passed = worst <= 1
    row.note = (
        f"{_BY_TORCH if is_torchs else ops.what}: {count} calls, the largest difference "
        f"{worst:.2g} of the tolerance "
        f"({', '.join(f'{dtype_name(t)} {bound:g}' for t, bound in TOLERANCE.items())})"
    )
    return row


def _by_torch(name: str, arguments: Arguments) -> Iterator[list[Tensor]]:
    """By grouped products, launched one by one."""
    yield [next(function for function in FUNCTIONS if function.__name__ == name)(*arguments)]


def _run(overload: Any, arguments: Arguments, configs: str) -> list[Tensor]:
    """Run a call on copies; returns its results and the arguments that it writes."""
    copied = tree_map_only(Tensor, torch.clone, arguments)
    out = overload(*copied, **({"configs": configs} if configs else {}))
    schema = overload._schema.arguments[: len(copied)]
    pairs = zip(copied, schema, strict=True)
    written = [a for a, s in pairs if s.is_write and a is not None]
    results = [] if out is None else [out] if isinstance(out, Tensor) else [*out]
    return [*results, *written]


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor], dtype: torch.dtype) -> float:
    """The largest of a call in a dtype, in tolerances: at most 1 is as it should be; infinite where
    one has a NaN that the other has not, or integers differ. Codes may be neighbours, or
    differ as bfloat16 rounds a row's largest: torch divides by a number in another way on a GPU."""
    worst, of_call = 0.0, TOLERANCE.get(dtype, 0.0)
    for a, b in zip(found, wanted, strict=True):
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
            return float("inf")
        if a.dtype in LARGEST_CODE:
            x, y = a.float(), b.float()
            step = 1.0 if a.dtype == torch.int8 else (y.abs() / 8).clamp(min=448 / 2**8)
            worst = max(worst, float(((x - y).abs() / step).max()))
        elif not a.is_floating_point():
            worst = worst if torch.equal(a, b) else float("inf")
        elif a.numel():
            x, y = (t.double().nan_to_num(0.0) for t in (a, b))
            error = (x - y).abs() / (1 + y.abs())
            is_wide = a.dtype == torch.float64  # Only what does not depend on the call's dtype.
            bound = TOLERANCE[a.dtype] if is_wide else max(TOLERANCE[a.dtype], of_call)
            worst = max(worst, float(error.max()) / bound)
    return worst

"""Host memory, planned before anything is built and again before anything is bound.

weights that are packed or joined + KV pages and other state <= free memory

Weights that the kernels read as they are stored stay in the mapped files. They need no memory of
their own, because the system can drop and read them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtpc.backends.package import signature_bytes
from mtpc.errors import CapacityError
from mtpc.layout import Layout
from mtpc.layout.slot_state import snapshots_nbytes
from mtpc.plan import Plan
from mtpc.program.processes import free_bytes
from mtpc.program.step_cache import Steps
from mtpc.weights.packing import can_pack, held_bytes
from mtpc.weights.quantise import spec_by_scheme

if TYPE_CHECKING:
    from mtpc.program.compiler import StepCompiler

ALLOWANCE = 256 << 20
"""Bytes for results between calls, and for the rows that are being packed."""
_GIB = 2**30


@dataclass(frozen=True)
class HostNeed:
    """Bytes that a program takes.

    Attributes:
        weights: copies of weights in the kernels' form.
        buffers: KV pages, other state and its snapshots; 0 where a host has them.
    """

    weights: int
    buffers: int

    def check(self, plan: Plan, free: int | None) -> None:
        """Refuse a program that does not fit.

        Args:
            plan: as it is compiled.
            free: bytes that this process can still have; None if the system does not say.

        Raises:
            CapacityError: it needs more.
        """
        need = self.weights + self.buffers + ALLOWANCE
        if free is None or need <= free:
            return
        advice = "run it on a larger machine, which can start from what `mtpc build` makes here"
        if self.weights + ALLOWANCE < free:
            advice = "lower max_len, batch_buckets, num_pages or snapshot_bytes"
        buckets = ",".join(map(str, plan.batch_buckets))
        raise CapacityError(
            f"the model does not fit this machine's memory: it needs {need / _GIB:.1f} GiB "
            f"({self.weights / _GIB:.1f} of weights, {self.buffers / _GIB:.1f} of KV pages and "
            f"other state for max_len {plan.max_len} and batch_buckets "
            f"{buckets}), and {free / _GIB:.1f} GiB are free; {advice}"
        )


def need_of_steps(steps: Steps, plan: Plan, owns_buffers: bool) -> HostNeed:
    """What compiled steps take, according to their records.

    Args:
        steps: all of one program.
        plan: of the program.
        owns_buffers: whether the program has its own state.
    """
    weights: dict[str, int] = {}
    for step in steps.values():
        record = step.record
        made = {n for n, recipe in record.stored.items() if not isinstance(recipe, str)}
        for name, signature in record.package.tensors.items():
            if name in record.derived or name in made:
                weights[name] = held_bytes(signature_bytes(signature))
    layouts = [step.layout for step in steps.values()]
    buffers = _buffers(layouts, plan) if owns_buffers else 0
    return HostNeed(sum(weights.values()), buffers)


def need_of_model(compiler: StepCompiler, owns_buffers: bool) -> HostNeed:
    """What the steps of a model will take, before any is traced.

    Args:
        compiler: of the model, whose weights may be without values.
        owns_buffers: whether the program has its own state.
    """
    layouts = [compiler.layout(key) for key in compiler.keys]
    buffers = _buffers(layouts, compiler.plan) if owns_buffers else 0
    return HostNeed(_copies(compiler), buffers)


def check_model(compiler: StepCompiler, owns_buffers: bool) -> None:
    """Refuse to build for a machine on which the result cannot run; see `HostNeed.check`."""
    need_of_model(compiler, owns_buffers).check(compiler.plan, free_bytes())


def _copies(compiler: StepCompiler) -> int:
    """Bytes of the weights that are packed, or made of several stored ones."""
    loaded, share, total = compiler.loaded, compiler.share, 0
    headers, tables = loaded.headers, loaded.tables
    for name, tensor in loaded.weights().items():
        is_table = id(tensor) in tables
        is_joined = headers is not None and headers.origin(tensor) is None
        scheme = compiler.plan.quantize
        spec = compiler.weights.spec(name) or spec_by_scheme(scheme, name, tensor)
        held = tensor.numel() if share is None else share.held(name, tensor)
        if spec is not None and not is_table:
            total += spec.nbytes(held)
        elif is_joined or (can_pack(tensor) and not is_table):
            total += held * tensor.itemsize
    return total


def _buffers(layouts: Sequence[Layout], plan: Plan) -> int:
    """Bytes of the shared buffers and of their snapshots, once, and of each step's own."""
    shared: dict[str, int] = {}
    own = 0
    for layout in layouts:
        for name, spec in layout.items():
            if spec.shared:
                shared[name] = layout.nbytes(name)
            else:
                own += layout.nbytes(name)
    return own + sum(shared.values()) + snapshots_nbytes(layouts[0], plan)

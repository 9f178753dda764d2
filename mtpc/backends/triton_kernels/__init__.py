"""Triton kernels for GPUs, NVIDIA's and AMD's, in an op namespace of their own.

`mtpc_triton::` has the operators of `mtpc.ops` and `mtpc.backends.gpu.ops` that have a plan
in `ops` here. `mtpc_loaded::` has the same operators, launched by Triton itself: for code that was
compiled elsewhere, and for launches that may begin before the one before them has ended (`launch`).
Both take the arguments of the references and compute the same. This module does not import Triton,
which only torch's builds for GPUs bring along; all other modules here do.

What the kernels guarantee:

- Grids depend on the bucket's sizes only. Lengths, block tables and slots are read on the device,
  so one captured graph serves every length up to max_len.
- There are no atomics but the flags of exchanges (`ops/exchanges.py`), so a result has the same
  bits in every run. In one bucket, a row's bits of attention and of recurrent state do not depend
  on other requests, on the rows and the context of its own request, or on whether the row was
  replayed.
- They read only cache positions that some row attends to, and only weights of experts that some row
  chose.

Sums are float32; sums of int8 products are int32, those of probabilities float64. Elements are
bfloat16, float16 or float32.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import fx

import mtpc.backends.gpu.ops  # noqa: F401  (declares the operators)
from mtpc.backends.bindings import Binding, Configure, Limits, by_default
from mtpc.capture.graph import StepGraph
from mtpc.errors import BackendError
from mtpc.ops import references
from mtpc.ops.signatures import arguments_of, written_by

ELEMENTS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of elements that the kernels take."""
NAMESPACES = ("mtpc_triton", "mtpc_loaded")
"""Namespaces of the operators."""
_ADVICE = (
    "Triton comes with torch's builds for CUDA and ROCm; on a machine without GPU: pip install "
    "triton"
)


def load_kernels() -> None:
    """Make torch.ops.mtpc_triton exist in this process; later calls do nothing.

    Raises:
        BackendError: there is no Triton.
    """
    try:
        import_module("mtpc.backends.triton_kernels.register")
    except ImportError as error:
        if not (error.name or "").startswith("triton"):
            raise
        raise BackendError(f"the GPU kernels need Triton: {error}. {_ADVICE}") from error


def kernel_table(namespace: str = "mtpc_triton") -> dict[Any, Any]:
    """Reference overload -> our overload, for every operator that has kernels.

    Collectives have theirs in `mtpc_loaded` alone. It is empty until `load_kernels` is called.
    """
    ours, loaded = getattr(torch.ops, namespace), torch.ops.mtpc_loaded
    return {
        reference: getattr(ours if hasattr(ours, name) else loaded, name).default
        for name, reference in references().items()
        if hasattr(loaded, name)
    }


def kernel_bindings(
    namespace: str,
    limits: Limits,
    configure: Configure,
    library: str = "triton",
    expected: bool = True,
) -> tuple[Binding, ...]:
    """A candidate for each operator that has kernels.

    Args:
        namespace: one of `NAMESPACES`.
        limits: as in `Binding`, and so are the others.
        configure: chooses how each is run.
        library: its name in notes.
        expected: whether a refusal is noted.

    Raises:
        BackendError: there is no Triton.
    """
    load_kernels()
    return tuple(
        Binding(library, reference, target, limits, expected, configure)
        for reference, target in kernel_table(namespace).items()
    )


def early_bindings(configure: Configure) -> tuple[Binding, ...]:
    """A candidate for each operator that has kernels, for steps whose launches may begin early.
    Inductor would not let them.

    Args:
        configure: chooses how each is run; made by `plans.early_in_few_rows`.

    Raises:
        BackendError: there is no Triton.
    """
    load_kernels()  # It says what is missing.
    from mtpc.backends.triton_kernels.plans import has_early_launches

    def limit(node: fx.Node, graph: StepGraph) -> str | None:
        return refuses(node, graph) if has_early_launches(graph) else "its step has many rows"

    return kernel_bindings("mtpc_loaded", limit, configure, expected=False)


def triton_bindings(configure: Configure = by_default) -> tuple[Binding, ...]:
    """A candidate for each operator that has kernels, and others for writes of float8.

    Kernels see float8 as bytes. Inductor copies a whole pool before a launch of its own writes such
    a view of it, so Triton launches these.

    Args:
        configure: chooses how each is run.

    Raises:
        BackendError: there is no Triton.
    """
    writes = kernel_bindings(
        "mtpc_loaded", _refuse_all_but_float8_writes, configure, expected=False
    )
    return writes + kernel_bindings("mtpc_triton", refuses, configure)


def _refuse_all_but_float8_writes(node: fx.Node, graph: StepGraph) -> str | None:
    call = arguments_of(node)
    written = [call.get(name) for name in written_by(node.target)]
    is_float8 = any(t is not None and t.dtype == torch.float8_e4m3fn for t in written)
    return refuses(node, graph) if is_float8 else "it writes no float8"


def call_launches(node: fx.Node) -> list[Any]:
    """The launches of a call of ours, in a fake mode; of any other node none."""
    if str(node.target).partition(".")[0] not in NAMESPACES:
        return []
    from mtpc.backends.triton_kernels.plans import node_launches

    return node_launches(node)


def invariantly(node: fx.Node, graph: StepGraph) -> tuple[str, tuple[str, ...]]:
    """`Configure` for steps whose rows must not depend on how many there are."""
    from mtpc.backends.triton_kernels.configs import BATCH_INVARIANT

    return BATCH_INVARIANT, ()


def row_bound(node: fx.Node) -> str | None:
    """Why a row's sums in a call of our kernels depend on other rows, however they are configured;
    None where they do not."""
    from mtpc.backends.triton_kernels.plans import operator_of

    return operator_of(node).row_bound


def refuses(node: fx.Node, graph: StepGraph) -> str | None:
    """Why our kernels cannot take a call of a reference; None where they can."""
    from mtpc.backends.triton_kernels.plans import operator_of

    return operator_of(node).refuses(node)

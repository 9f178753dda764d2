"""Our Triton kernels as candidates for binding, with what they cannot take."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from mtpc.backends.bindings import Binding
from mtpc.backends.triton_kernels import ELEMENTS, kernel_table, load_kernels
from mtpc.capture.graph import StepGraph
from mtpc.layout import dtype_name

_MAX_HEAD_DIM = 1024
"""A row of a head must fit into registers, as part of a tile."""


_EXPERTS_ARGUMENTS = 5
"""Of `mtpc::experts`, up to the choices' weights; a limit stands behind them."""


def triton_bindings() -> tuple[Binding, ...]:
    """A candidate for each op that has a kernel.

    Raises:
        BackendError: there is no Triton.
    """
    load_kernels()
    return tuple(
        Binding("triton", reference, target, _refuses)
        for reference, target in kernel_table().items()
    )


def _refuses(node: fx.Node, graph: StepGraph) -> str | None:
    tensors = [a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta["val"], Tensor)]
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.dtype not in ELEMENTS:
            return f"{dtype_name(tensor.dtype)}; it takes {', '.join(map(dtype_name, ELEMENTS))}"
    first = tensors[0]
    if node.target is torch.ops.mtpc.experts.default and len(node.args) > _EXPERTS_ARGUMENTS:
        return "experts with a limit; it takes plain SwiGLU"
    if "attention" in str(node.target) and first.shape[-1] > _MAX_HEAD_DIM:
        return f"head dim {first.shape[-1]}; it takes up to {_MAX_HEAD_DIM}"
    return None

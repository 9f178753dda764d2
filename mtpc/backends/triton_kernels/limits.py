"""Our Triton kernels as candidates for binding, with what they cannot take."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

from mtpc.backends.bindings import Binding, Configure, by_default
from mtpc.backends.triton_kernels import ELEMENTS, kernel_table, load_kernels
from mtpc.capture.graph import StepGraph
from mtpc.layout import dtype_name
from mtpc.weights.packing import LARGEST

_MAX_HEAD_DIM = 1024
"""A row of a head must fit into registers, as part of a tile."""
_MAX_INDEX_QUERY = 64 * 128
"""Numbers of an indexer's query, which a program has whole."""
_MAX_KEY_DIM = 256
"""Of the gated delta rule, which has whole columns of its state in registers."""
_MAX_INPUTS = (2**31 - 1) // LARGEST**2
"""Products of int8 that an int32 sum surely holds."""
_MAX_NORM = 16_384
"""Numbers of a row that is normed in registers: 32 a thread."""
_MAX_STREAMS = 64
"""Rows of a matrix that is normalised in registers."""
_ANY_DTYPE = ("count_tokens", "sample", "write_logprobs")
"""Operators that compute in float64, from logits of any kind."""


def triton_bindings(configure: Configure = by_default) -> tuple[Binding, ...]:
    """A candidate for each op that has a kernel.

    Args:
        configure: chooses how each is run.

    Raises:
        BackendError: there is no Triton.
    """
    load_kernels()
    return tuple(
        Binding("triton", reference, target, refuses, configure=configure)
        for reference, target in kernel_table().items()
    )


def refuses(node: fx.Node, graph: StepGraph) -> str | None:
    """Why our kernels cannot take a call, or None."""
    tensors = [a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta["val"], Tensor)]
    name = str(node.target).removeprefix("mtpc.").removesuffix(".default")
    for tensor in () if name in _ANY_DTYPE else tensors:
        if tensor.is_floating_point() and tensor.dtype not in ELEMENTS:
            return f"{dtype_name(tensor.dtype)}; it takes {', '.join(map(dtype_name, ELEMENTS))}"
    return _SIZES[name](node, tensors) if name in _SIZES else None


def _attention(node: fx.Node, tensors: list[Tensor]) -> str | None:
    dim = tensors[0].shape[-1]
    return f"head dim {dim}; it takes up to {_MAX_HEAD_DIM}" if dim > _MAX_HEAD_DIM else None


def _choose_slots(node: fx.Node, tensors: list[Tensor]) -> str | None:
    heads, dim = tensors[0].shape[1:]
    if heads * dim > _MAX_INDEX_QUERY:
        return f"{heads} heads of {dim}; it takes {_MAX_INDEX_QUERY} numbers a row"
    return None


def _gated_delta(node: fx.Node, tensors: list[Tensor]) -> str | None:
    dim = tensors[4].shape[2]
    if dim > _MAX_KEY_DIM:
        return f"key head dim {dim}; it takes up to {_MAX_KEY_DIM}"
    return None


def _norm(node: fx.Node, tensors: list[Tensor]) -> str | None:
    width = tensors[0].shape[-1]
    return f"rows of {width}; it takes up to {_MAX_NORM}" if width > _MAX_NORM else None


def _quantised_linear(node: fx.Node, tensors: list[Tensor]) -> str | None:
    return _int8_sums(tensors[0].shape[-1])


def _quantised_experts(node: fx.Node, tensors: list[Tensor]) -> str | None:
    hidden, both = tensors[0].shape[-1], tensors[2].shape[-1]
    return _int8_sums(max(hidden, both // 2))


def _int8_sums(inputs: int) -> str | None:
    if inputs > _MAX_INPUTS:
        return f"{inputs} inputs; its int32 sums hold {_MAX_INPUTS}"
    return None


def _sinkhorn(node: fx.Node, tensors: list[Tensor]) -> str | None:
    size, epsilon = tensors[0].shape[-1], node.args[2]
    if size > _MAX_STREAMS:
        return f"matrices of {size} rows; it takes up to {_MAX_STREAMS}"
    if not isinstance(epsilon, float) or epsilon <= 0:
        return f"epsilon {epsilon}; it takes one above 0"
    return None


_SIZES: dict[str, Callable[[fx.Node, list[Tensor]], str | None]] = {
    "add_rms_norm": _norm,
    "choose_slots": _choose_slots,
    "draft_entry": _norm,
    "gated_delta_rule": _gated_delta,
    "latent_attention": _attention,
    "paged_attention": _attention,
    "quantised_experts": _quantised_experts,
    "quantised_linear": _quantised_linear,
    "rms_norm": _norm,
    "rotate": _attention,
    "sinkhorn": _sinkhorn,
}
"""Limits of size, by operator."""

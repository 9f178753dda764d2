"""Experts by PyTorch's grouped products, as candidates for `mtpc::experts`.

Choices are sorted by expert on the device, each product has all rows of all experts at once, and
the results go back to their rows. A binding puts these ATen calls into the step, where Inductor
fuses the gathers, the activation and the sum. They are taken where a measurement on the device says
that they are faster than mtpc's kernels (`triton_kernels.tuning.Tuner.prefers`).

`F.grouped_mm` reads where groups end on the device alone: on NVIDIA's devices of compute
capability 9 and 10, in bfloat16. In all else PyTorch goes through the groups one by one, and copies
their ends to the host, which no capture permits (its `_grouped_mm_cuda`, in GroupedBlas.cpp, and
`_grouped_mm_fallback`, in GroupedMMUtils.h). It is built for 9.0 and 10.0, takes fewer than 1,024
groups (GroupMM.cu), and strides and addresses at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from mtpc.backends.bindings import Binding, Limits
from mtpc.backends.expand import Function, expand
from mtpc.capture.graph import StepGraph, operators
from mtpc.layout import dtype_name
from mtpc.ops import references
from mtpc.ops.collectives import is_collective
from mtpc.ops.experts import squared_relu, swiglu
from mtpc.ops.signatures import arguments_of

CAPABILITIES = ((9, 0), (10, 0))
LEAST_ROWS = 32
"""Fewer rows are never tried: mtpc's kernels then take the time of the weights' bytes."""
_GROUPS = 1023
_BYTES = 16

Race = Callable[[Function, fx.Node, StepGraph], tuple[bool, tuple[str, ...]]]
"""(function, call, graph) -> whether the function is faster than the kernels, and notes."""


def torch_bindings(capability: tuple[int, int] | None, race: Race) -> tuple[Binding, ...]:
    """Candidates, to stand before mtpc's kernels, for a compute capability of NVIDIA's. `race`
    measures."""
    return tuple(
        Binding(
            "torch", references()[function.__name__], references()[function.__name__],
            _limits(capability), expected=False, wins=partial(race, function),
            expand=partial(expand, function=function),
        )
        for function in FUNCTIONS
    )  # fmt: skip


def takes(capability: tuple[int, int] | None) -> str | None:
    """Why a device does not multiply by groups without its host; None where it does."""
    if capability in CAPABILITIES:
        return None
    found = "no device of NVIDIA's" if capability is None else f"capability {_dotted(capability)}"
    return f"{found}; it takes compute capability {' and '.join(map(_dotted, CAPABILITIES))}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _limits(capability: tuple[int, int] | None) -> Limits:
    def refuses(node: fx.Node, graph: StepGraph) -> str | None:
        x, first, down = list(arguments_of(node).values())[:3]
        if reason := takes(capability):
            return reason
        if x.shape[0] < LEAST_ROWS:
            return f"{x.shape[0]} rows; it takes {LEAST_ROWS} or more"
        if len(down) > _GROUPS:
            return f"{len(down)} experts; it takes up to {_GROUPS}"
        if any(is_collective(target) for _, target in operators(graph.graph)):
            return "ranks agree on the calls of a step, and each would measure for itself"
        for tensor in (x, first, down):
            if reason := _unfit(tensor):
                return reason
        return None

    return refuses


def _unfit(tensor: Tensor) -> str | None:
    """Why it is no operand; None where it is one. Rows are gathered, so their strides are free."""
    if tensor.dtype != torch.bfloat16:
        return f"{dtype_name(tensor.dtype)}; it takes bfloat16"
    each = _BYTES // tensor.dtype.itemsize
    if tensor.shape[-1] % each:
        return f"rows of {tensor.shape[-1]} numbers; it takes multiples of {each}"
    if tensor.dim() == 3 and (not tensor.is_contiguous() or tensor.storage_offset() % each):
        return (
            f"a weight with strides {tuple(tensor.stride())} at {tensor.storage_offset()}; it "
            f"takes contiguous ones at multiples of {each}"
        )
    return None


def experts(
    x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor,
    limit: float = 0.0, limit_input: bool = False, gelu: bool = False,
) -> Tensor:  # fmt: skip
    activate = partial(swiglu, limit=limit, limit_input=limit_input, gelu=gelu)
    return _by_groups(x, gate_up, down, expert_ids, expert_weights, activate)


def relu2_experts(
    x: Tensor, up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor
) -> Tensor:
    return _by_groups(x, up, down, expert_ids, expert_weights, squared_relu)


FUNCTIONS: tuple[Function, ...] = (experts, relu2_experts)
"""Named after the operators."""


def _by_groups(
    x: Tensor, first: Tensor, down: Tensor, ids: Tensor, scales: Tensor,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """The weighted sum of the chosen experts' down(activate(first(x))), in the experts' order.

    Choices of no expert count as E and come last. No product is computed for them: what is in the
    memory of their rows may be NaN, so it is masked, and not multiplied by zero.
    """
    count, (num_rows, picks) = len(down), ids.shape
    ids, order = ids.masked_fill((ids < 0) | (ids > count), count).int().sort(1)
    chosen, pick = ids.flatten().sort(stable=True)
    each = torch.arange(count, dtype=torch.int32, device=x.device)
    ends = torch.searchsorted(chosen, each, right=True, out_int32=True)
    hidden = activate(F.grouped_mm(x[pick // picks], first.transpose(1, 2), offs=ends))
    parts = F.grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    places = torch.arange(len(pick), device=x.device)
    parts = parts[torch.empty_like(pick).scatter(0, pick, places)].view(num_rows, picks, -1)
    parts = parts.masked_fill((ids == count)[..., None], 0)
    return (parts * scales.gather(1, order).float()[..., None]).sum(1).to(x.dtype)

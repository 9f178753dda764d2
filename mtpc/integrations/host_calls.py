"""Layers of a host as calls in a step graph, which run the host's modules when the step runs.

A graph holds operators and numbers. So a call has the number of a module, and the process has the
module. Nothing of the module is traced: it may launch any kernel, and exchange values among ranks.
"""

from __future__ import annotations

import copy
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from mtpc.errors import GraphError
from mtpc.integrations.draft import TracedDraft
from mtpc.integrations.layer_sites import LinearSite
from mtpc.models.hf import MTPLayer

_MODULES: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
"""The modules that graphs of this process call. Whoever makes a graph keeps them."""
_NUMBERS = count()


@torch.library.custom_op("mtpc::call_host", mutates_args=())
def call_host(operands: list[Tensor], module: int, width: int, dtype: torch.dtype) -> Tensor:
    """Run a module of the host.

    Args:
        operands: the module's arguments; the first dimension of each is T.
        module: the module's number.
        width: features of the result.
        dtype: dtype of the result.

    Returns:
        [T, width], contiguous.

    Raises:
        GraphError: the module is gone, or returns something else.
    """
    found = _MODULES.get(module)
    if found is None:
        raise GraphError(
            f"a graph calls module {module} of its host, which is gone; keep the draft and the "
            "head as long as the graph"
        )
    out: Tensor = found(*operands)
    if out.shape != (len(operands[0]), width) or out.dtype != dtype:
        raise GraphError(
            f"{type(found).__name__} of the host returned {tuple(out.shape)} of {out.dtype}; "
            f"expected {(len(operands[0]), width)} of {dtype}"
        )
    return out.contiguous()


@call_host.register_fake
def _(operands: list[Tensor], module: int, width: int, dtype: torch.dtype) -> Tensor:
    return operands[0].new_empty((operands[0].shape[0], width), dtype=dtype)


class HostCall(nn.Module):
    """A module of the host, for a trace: its parameters and its operators stay out of the graph.

    Args:
        module: maps operands, of T rows each, to [T, width].
        width: features of the result.
        dtype: dtype of the result; None: that of the first operand.
    """

    def __init__(self, module: nn.Module, width: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.width, self.dtype, self.number = width, dtype, next(_NUMBERS)
        _MODULES[self.number] = module

    def forward(self, first: Tensor, *more: Tensor) -> Tensor:
        """[..., in] -> [..., width]; or ids [T], or several operands, of T rows each."""
        rows = first.flatten(0, -2) if first.dim() > 2 else first
        dtype = self.dtype or first.dtype
        out: Tensor = torch.ops.mtpc.call_host([rows, *more], self.number, self.width, dtype)
        return out.view(*first.shape[:-1], self.width) if first.dim() > 2 else out


@torch.no_grad()
def with_host_calls(draft: TracedDraft, like: Tensor) -> MTPLayer:
    """The draft's layer, over the same tensors, in which each mark calls the host's module.

    Latent attention multiplies by the weight of its expansion. So the host's expansion becomes a
    plain layer, whose weight is what the host makes of unit vectors, as it may be quantised there.

    Args:
        draft: the draft, with its weights loaded.
        like: has the dtype and the device of that weight.
    """
    tensors = (*draft.layer.parameters(), *draft.layer.buffers())
    layer = copy.deepcopy(draft.layer, {id(tensor): tensor for tensor in tensors})
    expansions = {id(site.expansion): site.latent_rank for site in draft.sites}
    for name, hosted in draft.hosted.items():
        site, rank = hosted.site, expansions.get(id(hosted.module))
        width = site.width if isinstance(site, LinearSite) else site.hidden_size
        made: nn.Module = HostCall(hosted.module, width)
        if rank is not None:
            made = nn.Linear(rank, width, bias=False, device="meta")
            units = torch.eye(rank, dtype=like.dtype, device=like.device)
            weight = hosted.module(units).T.contiguous()
            made.weight = nn.Parameter(weight, requires_grad=False)
        layer.set_submodule(name, made)
    return layer

"""What makes logits: of the target's features, and of an MTP layer's."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

if TYPE_CHECKING:
    from mtpc.models.family import MTPWiring
    from mtpc.models.hf import MTPLayer


class OwnHead(nn.Module):
    """Features [..., H] -> logits [..., V], by the forward of a causal LM around its decoder.

    It scales, caps or norms them as the class does.
    """

    def __init__(self, model: nn.Module, decoder: str):
        super().__init__()
        self.model = copy.copy(model)
        self.model._modules = {**model._modules, decoder: _Given(model.get_submodule(decoder))}

    def forward(self, features: Tensor) -> Tensor:
        is_flat = features.dim() == 2
        rows = features[None] if is_flat else features
        logits: Tensor = self.model(inputs_embeds=rows, use_cache=False).logits
        return logits[0] if is_flat else logits


class _Given(nn.Module):
    """In place of a decoder: has its numbers, as a scale of logits, and gives what it is given."""

    def __init__(self, decoder: nn.Module):
        super().__init__()
        vars(self).update({n: v for n, v in vars(decoder).items() if isinstance(v, int | float)})

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(inputs_embeds)


class _Output:
    """A decoder's output with hidden states alone; what else a class may have is None."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return getattr(self, index)
        return (self.last_hidden_state,)[index]


_ALONE = frozenset(
    {"mm", "addmm", "t", "view", "_unsafe_view", "slice", "select", "unsqueeze", "alias", "detach"}
)
"""What a forward around a decoder calls that does no more than multiply by the head."""


def _is_head_alone(own: OwnHead, weight: Tensor) -> bool:
    """Whether a class's forward gives the head's product as it is; seen on the meta device."""
    tensors = (*own.named_parameters(), *own.named_buffers())
    held = {name: tensor.detach().to("meta") for name, tensor in tensors}
    features = torch.empty((2, weight.shape[1]), dtype=weight.dtype, device="meta")
    with torch.no_grad():
        graph = make_fx(lambda rows: functional_call(own, held, (rows,)))(features).graph
    called = (node.target for node in graph.nodes if node.op == "call_function")
    return {getattr(each, "overloadpacket", each).__name__ for each in called} <= _ALONE


def target_head(model: Any, wiring: MTPWiring) -> nn.Module:
    """What makes logits of the target's features."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    name = next((name for name, child in model.named_children() if child is decoder), None)
    # A multimodal model has the decoder deeper inside, and its own forward places images.
    own = None if name is None else OwnHead(model, name)
    if own is not None and not (head is not None and _is_head_alone(own, head.weight)):
        head = own
    return nn.Sequential(decoder.norm, head) if wiring.first_features == "before" else head


def head_of(model: Any, layer: MTPLayer) -> nn.Module:
    """The output head that reads an MTP layer: hidden state after its norm [T, H] -> [T, V]."""
    own = layer.head if layer.wiring.head == "own" else None
    return own or model.get_output_embeddings()


def draft_head(model: Any, layer: MTPLayer) -> nn.Module:
    """What makes logits of an MTP layer's features."""
    head = head_of(model, layer)
    if layer.wiring.next_features == "before":
        return nn.Sequential(final_norm_of(model.get_decoder(), layer), head)
    return head


def final_norm_of(decoder: Any, layer: MTPLayer) -> nn.Module:
    """The norm after an MTP layer's block: its own or, where it stores none, the target's.

    The identity where the layer has no norm.
    """
    own = layer.wiring.final_norm != "" or layer.wiring.stream_head
    return layer.final_norm if own else decoder.norm

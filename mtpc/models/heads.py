"""What makes logits: of the target's features, and of an MTP layer's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from mtpc.models.family import MTPWiring
    from mtpc.models.hf import MTPLayer


class NormedHead(nn.Module):
    """Features before a norm [T, H] -> logits [T, V]."""

    def __init__(self, norm: nn.Module, head: nn.Module):
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.norm(features))


class CappedHead(nn.Module):
    """Features [T, H] -> logits [T, V] between -cap and cap, rounded where transformers rounds."""

    def __init__(self, head: nn.Module, cap: float):
        super().__init__()
        self.head, self.cap = head, cap

    def forward(self, features: Tensor) -> Tensor:
        return torch.tanh(self.head(features) / self.cap) * self.cap


def target_head(model: Any, wiring: MTPWiring) -> nn.Module:
    """What makes logits of the target's features."""
    head = model.get_output_embeddings()
    cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    if cap is not None:
        head = CappedHead(head, cap)
    if wiring.first_features == "before":
        return NormedHead(model.get_decoder().norm, head)
    return head


def head_of(model: Any, layer: MTPLayer) -> nn.Module:
    """The output head that reads an MTP layer: hidden state after its norm [T, H] -> [T, V]."""
    own = layer.head if layer.wiring.head == "own" else None
    return own or model.get_output_embeddings()


def draft_head(model: Any, layer: MTPLayer) -> nn.Module:
    """What makes logits of an MTP layer's features."""
    head = head_of(model, layer)
    if layer.wiring.next_features == "before":
        return NormedHead(final_norm_of(model.get_decoder(), layer), head)
    return head


def final_norm_of(decoder: Any, layer: MTPLayer) -> nn.Module:
    """The norm after an MTP layer's block: its own or, where it stores none, the target's.

    The identity where the layer has a stream head and no norm.
    """
    own = layer.wiring.final_norm or layer.wiring.stream_head
    return layer.final_norm if own else decoder.norm

"""What a target says of texts, by transformers' own forward: beside what the engine writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from helpers.uncached import logits_of, target_features
from mtpc.tuning.store import Rows


@torch.no_grad()
def layer_inputs(model: Any, ids: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Inputs of a decoder's layers, whose number stands for its norm, [B, L, n H]; and logits."""
    decoder, found = model.get_decoder(), dict[int, Tensor]()
    watched: list[nn.Module] = [*decoder.layers, decoder.norm]

    def note(index: int) -> Any:
        def hook(module: nn.Module, args: Any, given: dict[str, Any]) -> None:
            found[index] = args[0] if args else given["hidden_states"]

        return hook

    handles = [
        watched[i].register_forward_pre_hook(note(i), with_kwargs=True) for i in sorted(layers)
    ]
    logits = logits_of(model, target_features(model, ids))
    for handle in handles:
        handle.remove()
    return torch.cat([found[i] for i in sorted(layers)], -1), logits


def told(model: Any, ids: Tensor, count: int = 64, said: int | None = None) -> Rows:
    """What a run keeps of texts [B, L]: the `count` most probable tokens at the last `said`
    positions, or at all."""
    fed, logits = layer_inputs(model, ids, (len(model.get_decoder().layers),))
    top = logits.float().log_softmax(-1)[:, -(said or ids.shape[1]) :].topk(count)
    return Rows(ids, fed, top.indices.int(), top.values)

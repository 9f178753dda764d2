"""What a text shows of a model's weights: how much errors of each cost.

An error E of a weight changes what its layer puts out by E x. To second order that costs half of
(the sum over tokens of g^T E x)^2 in nats of KL divergence, where g is the gradient, at the layer's
output, of the loss of tokens that the model itself draws. `Sensitivity` keeps this by parts: second
moments of the inputs, in which a token counts as much as its gradient is large; and a scale, in
which is how much more tokens cost together than apart, as where attention adds up values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mtpc.errors import CheckpointError
from mtpc.models.load import family_of, read_target
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.rounding import Sensitivity, moments_width

WINDOW = 512
"""Tokens that see each other."""
_ROWS = 32
"""Tokens that are drawn at once."""


@torch.enable_grad()
def sensitivities(
    checkpoint: Checkpoint,
    ids: Tensor,
    tell: Callable[[str, float], None] = lambda stage, fraction: None,
) -> dict[str, Sensitivity]:
    """How much errors of the embedding and of each linear layer of a target cost.

    Experts that transformers holds as stacks, and MTP layers, have none, nor has a layer that no
    token reaches.

    Args:
        checkpoint: of plain weights.
        ids: tokens of a text, at least `WINDOW`; transformers' own model runs over them.
        tell: called with progress.

    Returns:
        By the name of the weight. An embedding that is the head as well has the head's.

    Raises:
        CheckpointError: a layer's inputs are gone before their gradients are known.
    """
    model: Any = read_target(checkpoint, family_of(checkpoint), "bfloat16").requires_grad_(False)
    layers = {
        f"{name}.weight": _Layer(name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding = _Embedding(table)
    draws = torch.Generator().manual_seed(0)
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    for done, window in enumerate(windows):
        tell(f"calibrate by {windows.numel()} tokens", done / len(windows))
        logits = model(window[None], use_cache=False).logits[0]
        logits.backward(_drawn_gradient(logits.detach(), draws))
    count = windows.numel()
    found = {name: layer.found(count) for name, layer in layers.items() if layer.weight > 0}
    is_tied = head is not None and head.weight is table.weight
    name_of = {module: f"{name}.weight" for name, module in model.named_modules()}
    found[name_of[table]] = found[name_of[head]] if is_tied else embedding.found(count)
    return found


def _drawn_gradient(logits: Tensor, draws: torch.Generator) -> Tensor:
    """The gradient of the loss of tokens that are drawn from logits [T, vocabulary]."""
    found = torch.empty_like(logits)
    for some, gradient in zip(logits.split(_ROWS), found.split(_ROWS), strict=True):
        probabilities = some.float().softmax(-1)
        up_to = probabilities.cumsum(-1)
        at = torch.rand(len(some), 1, generator=draws) * up_to[:, -1:]
        drawn = torch.searchsorted(up_to, at, right=True).clamp_(max=logits.shape[1] - 1)
        gradient.copy_(probabilities.scatter_add_(1, drawn, -torch.ones_like(at)))
    return found


class _Layer:
    """Adds up what one linear layer shows."""

    def __init__(self, name: str, module: nn.Linear):
        width = moments_width(module.in_features)
        self._moments = torch.zeros(module.in_features // width, width, width)
        self._name, self.weight, self._together, self._apart = name, 0.0, 0.0, 0.0
        module.register_forward_hook(self._hear)

    def _hear(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        given = inputs[0].detach()
        output.register_hook(partial(self._add, given, given._version))

    def _add(self, inputs: Tensor, version: int, gradient: Tensor) -> None:
        if inputs._version != version:
            raise CheckpointError(
                f"cannot calibrate: the model writes over the inputs of {self._name}; quantise "
                "without --calibration"
            )
        inputs, gradient = inputs.flatten(0, -2), gradient.flatten(0, -2)
        of_pairs = (gradient @ gradient.T).float()
        of_token, both = of_pairs.diagonal(), of_pairs * (inputs @ inputs.T)
        rows = inputs.float() * of_token.sqrt()[:, None]
        blocks = rows.unflatten(-1, self._moments.shape[:2]).permute(1, 2, 0)
        self._moments.baddbmm_(blocks, blocks.transpose(1, 2))
        self.weight += float(of_token.sum())
        self._together += float(both.sum())
        self._apart += float(both.trace())

    def found(self, tokens: int) -> Sensitivity:
        """The means over so many tokens."""
        scale = self.weight * self._together / self._apart / tokens
        return Sensitivity(self._moments / self.weight, scale)


class _Embedding:
    """Adds up what an embedding shows: how much each place of its rows counts."""

    def __init__(self, table: nn.Embedding):
        self._places = torch.zeros(table.embedding_dim)
        table.register_forward_hook(self._hear)

    def _hear(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.requires_grad_().register_hook(self._add)

    def _add(self, gradient: Tensor) -> None:
        self._places += gradient.flatten(0, -2).float().square().sum(0)

    def found(self, tokens: int) -> Sensitivity:
        """The means over so many tokens, each of which has one row."""
        return Sensitivity(self._places.view(-1, 1, 1) / tokens, 1.0)

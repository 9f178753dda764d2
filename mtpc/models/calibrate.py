"""What a text shows of the inputs of linear layers: their second moments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mtpc.models.load import family_of, read_target
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.rounding import moments_width

WINDOW = 512
"""Tokens that see each other."""


@torch.no_grad()
def second_moments(
    checkpoint: Checkpoint,
    ids: Tensor,
    tell: Callable[[str, float], None] = lambda stage, fraction: None,
) -> dict[str, Tensor]:
    """Second moments of the inputs of each linear layer of a target, as `quantise` takes them.

    Experts that transformers holds as stacks, and MTP layers, have none.

    Args:
        checkpoint: of plain weights.
        ids: tokens of a text, at least `WINDOW`; transformers' own model runs over them.
        tell: called with progress.

    Returns:
        float32 [K / B, B, B] by the name of the weight. An embedding that is the head as well has
        the head's.
    """
    model: Any = read_target(checkpoint, family_of(checkpoint), "bfloat16")
    sums, moments = dict[str, Tensor](), _Moments()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            width = moments_width(module.in_features)
            total = sums[f"{name}.weight"] = torch.zeros(module.in_features // width, width, width)
            module.register_forward_pre_hook(partial(moments.add, total))
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and head.weight is table.weight
    if isinstance(head, nn.Linear):
        _cut(head)
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    for done, window in enumerate(windows):
        tell(f"calibrate by {windows.numel()} tokens", done / len(windows))
        model(window[None], use_cache=False)
    if is_tied:
        of = {module: f"{name}.weight" for name, module in model.named_modules()}
        sums[of[table]] = sums[of[head]]
    return {name: total / windows.numel() for name, total in sums.items()}


def _cut(head: nn.Linear) -> None:
    """Leave one row of a head: what it makes of its inputs is not read."""
    head.weight = nn.Parameter(head.weight[:1])
    head.bias = None if head.bias is None else nn.Parameter(head.bias[:1])


class _Moments:
    """Adds up second moments. Layers that read the same tensor in turn have them computed once."""

    def __init__(self) -> None:
        self._read = self._found = torch.empty(0)
        self._version = -1

    def add(self, total: Tensor, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Add those of a layer's inputs to its total."""
        if inputs[0] is not self._read or inputs[0]._version != self._version:
            rows = inputs[0].flatten(0, -2).float().unflatten(-1, total.shape[:2])
            blocks = rows.permute(1, 2, 0)
            self._read, self._found = inputs[0], blocks @ blocks.transpose(1, 2)
            self._version = inputs[0]._version  # It may be written to before another layer.
        total += self._found

"""What a text shows of the inputs of linear layers: their second moments."""

from __future__ import annotations

from collections.abc import Callable
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
    sums: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            width = moments_width(module.in_features)
            sums[f"{name}.weight"] = torch.zeros(module.in_features // width, width, width)
            module.register_forward_pre_hook(_adding(sums[f"{name}.weight"]))
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    for done, window in enumerate(windows):
        tell(f"calibrate by {windows.numel()} tokens", done / len(windows))
        model(window[None], use_cache=False)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is table.weight:
        of = {module: f"{name}.weight" for name, module in model.named_modules()}
        sums[of[table]] = sums[of[head]]
    return {name: total / windows.numel() for name, total in sums.items()}


def _adding(total: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    """A hook that adds the second moments of a layer's inputs."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, -2).float().unflatten(-1, total.shape[:2])
        blocks = rows.permute(1, 2, 0)
        total.baddbmm_(blocks, blocks.transpose(1, 2))

    return hook

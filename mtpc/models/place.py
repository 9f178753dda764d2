"""Moving a model to a device: all of it, or a rank's part."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from mtpc.errors import OptionError
from mtpc.models.load import LoadedModel
from mtpc.models.mtp_layers import share_copies


def place(loaded: LoadedModel, device: str, cut: Collection[str] = ()) -> LoadedModel:
    """Move a model that mtpc owns to a device.

    Args:
        loaded: its modules are changed.
        device: as torch names it.
        cut: names of weights that stay on the host, because the device gets parts of them.

    Raises:
        OptionError: the user's model object is on another device; mtpc does not move it.
    """
    here, there = loaded.target.get_input_embeddings().weight.device, torch.device(device)
    if here.type == there.type and there.index in (None, here.index):
        return loaded
    if not loaded.owned:
        raise OptionError(
            f"the model object is on {here}; this backend runs on {device}; move the model by "
            f"model.to({device!r}), or pass the checkpoint's directory"
        )
    loaded = hold_back(loaded, cut, device)
    for module in (loaded.target, *loaded.mtp_layers):
        module.to(device)
    share_copies(loaded.mtp_layers, loaded.target)
    return loaded


def hold_back(loaded: LoadedModel, names: Collection[str], device: str) -> LoadedModel:
    """This model with placeholders on a device for some weights, which stay where they are.

    A placeholder is NaN, without memory for each of its numbers. So steps are traced as if the
    device had the weight, no two placeholders are equal, and a step that reads one is noticed.

    Args:
        loaded: its modules are changed.
        names: of its weights.
        device: of the placeholders.
    """
    held = {name: tensor for name, tensor in loaded.weights().items() if name in names}
    whole = {name: tensor.detach() for name, tensor in held.items()}
    for tensor in held.values():
        one = tensor.new_full((1,) * tensor.dim(), torch.nan, device=device)
        tensor.data = one.expand(tensor.shape)
    return replace(loaded, held_back=whole) if held else loaded

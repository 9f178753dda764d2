"""Moving a model to a device."""

from __future__ import annotations

import torch

from mtpc.errors import OptionError
from mtpc.models.load import LoadedModel
from mtpc.models.mtp_layers import share_copies


def place(loaded: LoadedModel, device: str) -> LoadedModel:
    """Move a model that mtpc owns, whose modules are changed, to a device.

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
    for module in (loaded.target, *loaded.mtp_layers):
        module.to(device)
    share_copies(loaded.mtp_layers, loaded.target)
    return loaded

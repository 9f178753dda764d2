"""The vision tower of a checkpoint: transformers' own module, run eagerly."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.layout.buffers import image_specs
from mtpc.models import FAMILIES
from mtpc.models.family import VisionParts
from mtpc.models.load import LoadedModel, find_family, quiet_transformers
from mtpc.models.mtp_layers import check_tensors
from mtpc.models.read_config import describing
from mtpc.weights.checkpoint import Checkpoint, check_finite


def image_buffers(loaded: LoadedModel) -> tuple[BufferSpec, ...]:
    """Buffers that images add to a model's steps.

    Raises:
        UnsupportedModelError: the model takes no images, or not with these MTP layers.
    """
    family, checkpoint = loaded.family, loaded.checkpoint
    if family.vision is None:
        known = ", ".join(each.name for each in FAMILIES if each.vision)
        raise UnsupportedModelError(
            f"images=True with {family.name}, of which mtpc runs text only; expected one of {known}"
        )
    if checkpoint is None or not checkpoint.names(family.vision.prefix):
        raise UnsupportedModelError(
            f"images=True with {loaded.source}, which has no vision tower: no tensor is named "
            f"{family.vision.prefix}*; leave images out"
        )
    if loaded.chain_window:
        raise UnsupportedModelError(
            f"images=True with {len(loaded.mtp_layers)} chained MTP layers; expected one"
        )
    return image_specs(loaded.config.hidden_size, family.position_grids, loaded.dtype)


class VisionTower:
    """Makes embeddings of images, and the rotary positions of prompts with images.

    Args:
        checkpoint: holds the tower's tensors.
        dtype: of the tower and of the embeddings.
        device: where it runs.

    Attributes:
        image_token_id: the token that stands for a part of an image.

    Raises:
        UnsupportedModelError: mtpc does not know the model's tower.
        CheckpointError: the tower's tensors or its config are missing, misshapen or not finite.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str):
        family = find_family(checkpoint.config.get("architectures") or [])
        if family.vision is None:
            raise UnsupportedModelError(f"{family.name} has no vision tower that mtpc knows")
        what = f"the vision tower of {checkpoint.directory}"
        try:
            self._model = _empty_model(checkpoint, family.vision)
            prefix = family.vision.prefix
            stored = {
                n.removeprefix(prefix): checkpoint.tensor(n) for n in checkpoint.names(prefix)
            }
            check_tensors(self._model.visual, stored, what)
            with quiet_transformers():
                tower = type(self._model.visual).from_pretrained(
                    None,
                    config=self._model.config.vision_config,
                    state_dict=stored,
                    dtype=dtype,
                    local_files_only=True,
                )
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"transformers cannot load {what}: {type(error).__name__}: {error}; download the "
                "checkpoint again, or correct its config.json"
            ) from error
        check_finite(tower.named_parameters(), what)
        self._model.visual = tower.to(device)
        self.image_token_id = int(self._model.config.image_token_id)

    @torch.no_grad()
    def embed(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        """Embeddings of images, one image after the other: [tokens, H].

        Args:
            pixel_values: [patches, width], of transformers' image processor.
            grid_thw: int64 [images, 3], patches of each image in time, height and width.
        """
        device = next(self._model.visual.parameters()).device
        found = self._model.get_image_features(
            pixel_values.to(device), grid_thw.to(device), return_dict=True
        )
        return torch.cat(found.pooler_output)

    def num_tokens(self, grid_thw: Tensor) -> list[int]:
        """How many tokens each image has."""
        merged = self._model.visual.spatial_merge_size**2
        return [int(count) // merged for count in grid_thw.prod(1)]

    def positions(self, is_image: Tensor, grid_thw: Tensor) -> tuple[Tensor, int]:
        """Rotary positions of a prompt's tokens.

        Args:
            is_image: bool [length], which tokens are of images.
            grid_thw: as for `embed`.

        Returns:
            int32 [length, 3], what to add to the place of each token; and what to add after them.
        """
        ids = torch.zeros(1, len(is_image), dtype=torch.int64)
        kinds = is_image.int()[None]
        positions, delta = self._model.get_rope_index(ids, kinds, image_grid_thw=grid_thw)
        places = torch.arange(len(is_image))[:, None]
        return (positions[:, 0].t() - places).int(), int(delta)


def _empty_model(checkpoint: Checkpoint, vision: VisionParts) -> Any:
    """transformers' model without memory; its language model has one layer, which nothing runs."""
    config_class = getattr(transformers, vision.hf_config_class)
    config = config_class(**describing(checkpoint.config))
    text = config.text_config
    text.num_hidden_layers, text.layer_types = 1, text.layer_types[:1]
    with torch.device("meta"):
        return getattr(transformers, vision.hf_class)(config).eval()

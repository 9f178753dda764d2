"""The vision towers of checkpoints: transformers' own modules, run eagerly.

Two kinds differ in what transformers' image processors make of an image. *Grids*: the patches of
one picture, whose places are coordinates of the rotary embedding. *Crops*: the whole picture and
crops of it, each in a square, with marks between their tokens; positions are those of text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.layout.buffers import image_specs
from mtpc.models.family import VisionParts
from mtpc.models.load import LoadedModel, find_family, quiet_transformers
from mtpc.models.mtp_layers import check_tensors
from mtpc.models.read_config import describing
from mtpc.models.refused_config import are_too_many
from mtpc.weights.checkpoint import Checkpoint, check_finite, listing

_LOADING = {"missing_keys": "missing", "unexpected_keys": "unexpected", "mismatched_keys": "shape"}


def image_buffers(loaded: LoadedModel) -> tuple[BufferSpec, ...]:
    """Buffers that images add to a model's steps.

    Raises:
        UnsupportedModelError: the model takes no images.
    """
    family, checkpoint = loaded.family, loaded.checkpoint
    if family.vision is None:
        from mtpc.models import FAMILIES  # Not above: that opens them all.

        known = ", ".join(each.name for each in FAMILIES if each.vision)
        raise UnsupportedModelError(
            f"images=True with {family.name}, of which mtpc runs text only; expected one of {known}"
        )
    for prefixes in family.vision.modules.values():
        if checkpoint is None or not any(map(checkpoint.names, prefixes)):
            raise UnsupportedModelError(
                f"images=True with {loaded.source}, which has no vision tower: no tensor is named "
                f"{prefixes[0]}*; leave images out"
            )
    config, window = loaded.config, loaded.chain_window
    return image_specs(config.hidden_size, family.position_grids, window, loaded.dtype)


@dataclass(frozen=True)
class ImagePatches:
    """What transformers' image processor makes of one image: `tensors` for the tower, by the names
    that both have for them, and the image's tokens in a prompt: image tokens, one for each
    embedding, and marks."""

    tensors: Mapping[str, Tensor]
    ids: list[int]


class VisionTower:
    """Makes embeddings of images, and the rotary positions of prompts with images.

    The token `image_token_id` stands for a part of an image.

    Raises:
        CheckpointError: the tower's tensors or its config are missing, misshapen or not finite.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        vision: VisionParts,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        what = f"the vision tower of {checkpoint.directory}"
        try:
            self._model = _empty_model(checkpoint, vision)
            for name, prefixes in vision.modules.items():
                stored = {
                    n.removeprefix(prefix): checkpoint.tensor(n)
                    for prefix in prefixes
                    for n in checkpoint.names(prefix)
                }
                module = _loaded(getattr(self._model, name), stored, dtype, what)
                check_finite(module.named_parameters(), what)
                setattr(self._model, name, module.to(device))
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"transformers cannot load {what}: {type(error).__name__}: {error}; download the "
                "checkpoint again, or correct its config.json"
            ) from error
        self._device = device
        self.image_token_id = int(self._model.config.image_token_id)

    @torch.no_grad()
    def embed(self, image: ImagePatches) -> Tensor:
        """The embeddings of one image, in the order of its image tokens: [tokens, H]."""
        given = {name: tensor.to(self._device) for name, tensor in image.tensors.items()}
        found = self._model.get_image_features(**given, return_dict=True)
        return torch.cat(list(found.pooler_output))

    def split(self, made: Mapping[str, Any], tokens: Mapping[str, int]) -> list[ImagePatches]:
        """What the processor made, image by image. `tokens` are ids of the tokenizer's own tokens,
        by their text.

        Raises:
            CheckpointError: the tokenizer lacks a mark.
        """
        raise NotImplementedError

    def positions(self, is_image: Tensor, images: list[ImagePatches]) -> tuple[Tensor, int]:
        """Rotary positions of a prompt's tokens, of which `is_image` [length] says which are of
        images: int32 [length, grids], what to add to the place of each token; and what to add after
        them. No grids where positions are those of text."""
        raise NotImplementedError


class GridTower(VisionTower):
    """Takes `pixel_values` [patches, width] and `image_grid_thw` int64 [images, 3], the patches of
    each image in time, height and width."""

    def split(self, made: Mapping[str, Any], tokens: Mapping[str, int]) -> list[ImagePatches]:
        grids = made["image_grid_thw"]
        patches = torch.split(made["pixel_values"], grids.prod(1).tolist())
        return [
            ImagePatches(
                {"pixel_values": pixels, "image_grid_thw": grid[None]},
                [self.image_token_id] * (len(pixels) // self._model.visual.spatial_merge_size**2),
            )
            for pixels, grid in zip(patches, grids, strict=True)
        ]

    def positions(self, is_image: Tensor, images: list[ImagePatches]) -> tuple[Tensor, int]:
        grids = torch.cat([image.tensors["image_grid_thw"] for image in images])
        ids = torch.zeros(1, len(is_image), dtype=torch.int64)
        kinds = is_image.int()[None]
        positions, delta = self._model.get_rope_index(ids, kinds, image_grid_thw=grids)
        places = torch.arange(len(is_image))[:, None]
        return (positions[:, 0].t() - places).int(), int(delta)


class CropTower(VisionTower):
    """Takes `pixel_values` [images, 3, side, side], `pixel_values_local` [crops, 3, side, side] and
    `num_local_patches` int64 [images], how many of the crops are of each image.

    An image's tokens are those of its crops, row by row with a mark after each row but the last,
    and then those of the whole picture (transformers' `Step3p7Processor.replace_image_token`).
    """

    def split(self, made: Mapping[str, Any], tokens: Mapping[str, int]) -> list[ImagePatches]:
        counts, found, first = made["num_local_patches"].tolist(), list[ImagePatches](), 0
        for index, count in enumerate(counts):
            whole, ids = made["pixel_values"][index : index + 1], list[int]()
            tensors = {"pixel_values": whole, "num_local_patches": torch.tensor([count])}
            if count:
                crops = made["pixel_values_local"][first : first + count]
                tensors["pixel_values_local"] = crops
                for ends_row in made["patch_newline_masks"][index][:count]:
                    ids += self._between("<patch_start>", crops, "<patch_end>", tokens)
                    ids += [_mark("<patch_newline>", tokens)] if ends_row else []
            ids += self._between("<im_start>", whole, "<im_end>", tokens)
            found.append(ImagePatches(tensors, ids))
            first += count
        return found

    def _between(
        self, start: str, pixels: Tensor, end: str, tokens: Mapping[str, int]
    ) -> list[int]:
        side = pixels.shape[-1] // self._model.config.vision_config.patch_size
        for _ in range(2):  # Two convolutions of stride 2.
            side = (side + 1) // 2
        return [_mark(start, tokens), *[self.image_token_id] * side**2, _mark(end, tokens)]

    def positions(self, is_image: Tensor, images: list[ImagePatches]) -> tuple[Tensor, int]:
        return torch.zeros(len(is_image), 0, dtype=torch.int32), 0


_TOWERS = {"grids": GridTower, "crops": CropTower}


def open_tower(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
) -> VisionTower:
    """The vision tower of a checkpoint, of which `image_buffers` knows that there is one.

    Raises:
        CheckpointError: see `VisionTower`.
    """
    vision = find_family(checkpoint.config.get("architectures") or []).vision
    assert vision is not None
    return _TOWERS[vision.takes](checkpoint, vision, dtype, device)


def _mark(text: str, tokens: Mapping[str, int]) -> int:
    if text not in tokens:
        raise CheckpointError(
            f"the tokenizer has no token {text}, which stands beside images; download the "
            "tokenizer's files again"
        )
    return tokens[text]


def _empty_model(checkpoint: Checkpoint, vision: VisionParts) -> Any:
    """transformers' model without memory; its language model has one layer, which nothing runs."""
    model_class = getattr(transformers, vision.hf_class)
    config = model_class.config_class(**describing(checkpoint.config))
    text = config.text_config
    text.num_hidden_layers = 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    with torch.device("meta"):
        return model_class(config).eval()


def _loaded(module: Any, stored: dict[str, Tensor], dtype: torch.dtype, what: str) -> nn.Module:
    """A module with stored tensors in place of one on the meta device.

    transformers loads its models; it knows the names that released checkpoints have for their
    tensors.
    """
    if not isinstance(module, transformers.PreTrainedModel):
        check_tensors(module, stored, what)
        module.load_state_dict({n: t.to(dtype) for n, t in stored.items()}, assign=True)
        return module.requires_grad_(False)
    described = sum(parameter.numel() for parameter in module.parameters())
    nbytes = sum(tensor.nbytes for tensor in stored.values())
    if are_too_many(described, nbytes):
        raise CheckpointError(
            f"{what} has tensors of {nbytes} bytes, and config.json describes {described} weights; "
            "correct the file or download the checkpoint again"
        )
    kind: Any = type(module)
    with quiet_transformers():
        loaded, info = kind.from_pretrained(
            None,
            config=module.config,
            state_dict=stored,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # They are refused below, by their names.
        )
    wrong = [
        f"{said} {listing(sorted(map(str, info[found])))}"
        for found, said in _LOADING.items()
        if info[found]
    ]
    if wrong:
        raise CheckpointError(
            f"{what}: {'; '.join(wrong)}; its config.json describes others: correct it, or "
            "download the checkpoint again"
        )
    made: nn.Module = loaded
    return made

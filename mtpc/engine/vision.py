"""Messages with images as prompts: token ids, and what stands in the place of images' tokens.

The checkpoint's image processor makes patches of images and its vision tower makes embeddings of
these, both transformers' own. transformers has the processor twice, on torchvision and on Pillow
and numpy; mtpc takes the second one, which needs no torchvision.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtpc.engine.image_files import MOST_PIXELS, open_image, read_data_url
from mtpc.engine.prompt_images import PromptImages
from mtpc.errors import CheckpointError, OptionError, RequestError
from mtpc.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from PIL.Image import Image

    from mtpc.models.vision import VisionTower


Messages = Sequence[Mapping[str, Any]]
"""A conversation: messages, each with a role and a content, which is text or a list of parts."""


def count_images(messages: Messages) -> int:
    """How many images checked messages have."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return sum(part.get("type") in ("image", "image_url") for part in parts)


def split_images(
    messages: Messages, most_pixels: int | None = None
) -> tuple[list[dict[str, Any]], list[Image]]:
    """Messages whose images are bare marks, as chat templates take them; and the images.

    A part of a content is text, `{"type": "image", "image": ...}` with a path, bytes or a Pillow
    image, or `{"type": "image_url", "image_url": {"url": ...}}` with a data URL.

    Args:
        messages: the conversation.
        most_pixels: of all images together; None: only each one is bounded.

    Raises:
        RequestError: a message or an image is none.
    """
    images: list[Image] = []

    def add(source: Any, name: str) -> None:
        seen = sum(image.width * image.height for image in images)
        most = MOST_PIXELS if most_pixels is None else most_pixels - seen
        images.append(open_image(source, name, most))

    def bare(name: str, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image":
            add(part.get("image"), name)
        elif kind == "image_url":
            given = part.get("image_url")
            url = given.get("url") if isinstance(given, Mapping) else given
            if not isinstance(url, str):
                raise RequestError(f"{name} is a {type(url).__name__}; expected a data URL")
            add(read_data_url(url, name), name)
        elif kind == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        else:
            raise RequestError(
                f"{name} has the type {kind!r}; expected text, image or image_url, with their text "
                "or image"
            )
        return {"type": "image"}

    out = list[dict[str, Any]]()
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"message {place} has no role; expected a role and a content")
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            parts = enumerate(content)
            content = [bare(f"part {i} of message {place}", part) for i, part in parts]
        out.append({**message, "content": content})
    return out, images


class Vision:
    """Turns images into what the engine takes. Nothing is loaded before the first image.

    Any thread may call it. One prompt's images are embedded at a time.

    Args:
        directory: the checkpoint.
        dtype: of the embeddings: the model's.
        device: where the tower runs.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device | str):
        self._directory, self._dtype, self._device = directory, dtype, device
        self._lock = threading.Lock()

    @cached_property
    def tower(self) -> VisionTower:
        """The vision tower."""
        from mtpc.models.vision import VisionTower

        return VisionTower(Checkpoint(self._directory), self._dtype, self._device)

    @cached_property
    def _processor(self) -> Any:
        try:
            from transformers import AutoImageProcessor

            return AutoImageProcessor.from_pretrained(
                self._directory, backend="pil", local_files_only=True, trust_remote_code=False
            )
        except ImportError as error:
            raise OptionError(
                f"images need a package: {error}; pip install 'mtpc[images]'"
            ) from None
        except Exception as error:
            raise CheckpointError(
                f"the image processor of {self._directory} cannot be read: {type(error).__name__}: "
                f"{error}; download its preprocessor_config.json again"
            ) from error

    def load(self) -> None:
        """Load what the first image would, so that what is broken is known now.

        Raises:
            CheckpointError: the tower or the processor cannot be read.
            OptionError: a package is not installed.
        """
        with self._lock:
            _ = self.tower, self._processor

    def place(
        self, ids: Sequence[int], images: Sequence[Image], longest: int
    ) -> tuple[list[int], PromptImages]:
        """A prompt with a token for each embedding of its images.

        Args:
            ids: tokens of the prompt, with one image token for each image.
            images: in RGB, in the order of their tokens; at least one.
            longest: the most tokens of the prompt.

        Raises:
            RequestError: there are more or fewer image tokens than images, an image is refused, or
                the prompt is too long.
        """
        with self._lock:
            return self._place(ids, images, longest)

    def _place(
        self, ids: Sequence[int], images: Sequence[Image], longest: int
    ) -> tuple[list[int], PromptImages]:
        token = self.tower.image_token_id
        places = [place for place, each in enumerate(ids) if each == token]
        if len(places) != len(images):
            raise RequestError(
                f"the prompt has {len(places)} image tokens (id {token}) and {len(images)} images; "
                "expected one for each"
            )
        if any(after == place + 1 for place, after in itertools.pairwise(places)):
            raise RequestError("two images follow each other; expected a token between them")
        pixels, grids = self._patches(images)
        num_patches = grids.prod(1)
        out, spans, start = list[int](), list[tuple[int, int]](), 0
        for place, count in zip(places, self.tower.num_tokens(grids), strict=True):
            out += ids[start:place]
            spans.append((len(out), len(out) + count))
            out += [token] * count
            start = place + 1
        out += ids[start:]
        if len(out) > longest:
            raise RequestError(
                f"the prompt has {len(out)} tokens, those of its images included; expected at most "
                f"{longest}: send smaller or fewer images, or compile with a larger max_len"
            )
        patches = torch.split(pixels, num_patches.tolist())
        digests = tuple(_digest(*each) for each in zip(patches, grids, strict=True))
        is_image = torch.zeros(len(out), dtype=torch.bool)
        for begin, end in spans:
            is_image[begin:end] = True
        offsets, delta = self.tower.positions(is_image, grids)
        rows = self.tower.embed(pixels, grids).to("cpu", self._dtype)
        return out, PromptImages(tuple(spans), digests, rows, offsets, delta)

    def _patches(self, images: Sequence[Image]) -> tuple[Tensor, Tensor]:
        """What the tower takes: patches of all images, and the patches of each one."""
        try:
            made = self._processor(images=list(images), return_tensors="pt")
        except ValueError as error:
            raise RequestError(f"an image is refused: {error}") from None
        return made["pixel_values"], made["image_grid_thw"]


def _digest(patches: Tensor, grid: Tensor) -> bytes:
    """SHA-256 of all that an image's embeddings and positions depend on."""
    found = hashlib.sha256(str(grid.tolist()).encode())
    found.update(patches.contiguous().numpy().data)
    return found.digest()

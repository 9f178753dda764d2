"""Messages with images as prompts: token ids, and embeddings for the images' tokens.

The checkpoint's image processor makes patches of images and its vision tower makes embeddings of
these, both transformers' own. transformers has most processors twice, on torchvision and on Pillow
and numpy; mtpc takes the second one, which needs no torchvision, where there is one.

Embeddings are made image by image, and kept for images that come again, as in the next turn of a
conversation. So they do not depend on what other images a prompt has.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtpc.engine.image_files import MOST_PIXELS, open_image, read_data_url
from mtpc.engine.prompt_images import PromptImages
from mtpc.engine.stats import Stats
from mtpc.errors import CheckpointError, OptionError, RequestError
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.served_model import ServedModel

if TYPE_CHECKING:
    from PIL.Image import Image

    from mtpc.models.vision import ImagePatches, VisionTower

MOST_KEPT_BYTES = 2**28
"""Bytes of embeddings that are kept for images that come again, at most."""

Messages = Sequence[Mapping[str, Any]]
"""A conversation: messages, each with a role and a content, which is text or a list of parts."""


def count_images(messages: Messages) -> int:
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return sum(part.get("type") in ("image", "image_url") for part in parts)


def split_images(
    messages: Messages, most_pixels: int | None = None
) -> tuple[list[dict[str, Any]], list[Image]]:
    """Messages whose images are bare marks, as chat templates take them; and the images. Without
    `most_pixels` of all images together, only each one is bounded.

    A part of a content is text, `{"type": "image", "image": ...}` with a path, bytes or a Pillow
    image, or `{"type": "image_url", "image_url": {"url": ...}}` with a data URL.

    Raises:
        RequestError: a message or an image is malformed.
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

    Any thread may call it. One prompt's images are embedded at a time, on `device`, in the model's
    dtype.
    """

    def __init__(
        self, served: ServedModel, dtype: torch.dtype, device: torch.device | str, stats: Stats
    ):
        assert served.directory is not None  # Compiling has refused other models.
        self._served, self._directory = served, served.directory
        self._dtype, self._device, self._stats = dtype, device, stats
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def tower(self) -> VisionTower:
        from mtpc.models.vision import open_tower

        return open_tower(Checkpoint(self._directory), self._dtype, self._device)

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
            if "torchvision" in str(error) and importlib.util.find_spec("torchvision") is None:
                raise OptionError(
                    f"transformers has the image processor of {self._directory} on torchvision "
                    "alone, which is not installed; pip install torchvision, of the release that "
                    "fits the installed torch"
                ) from None
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
        """A prompt, of at most `longest` tokens, with a token for each embedding of its images.
        `ids` has one image token for each image, in RGB and in this order; there is at least one.

        Raises:
            RequestError: there are more or fewer image tokens than images, an image is refused, or
                the prompt is too long.
        """
        with self._lock:
            places = self._places(ids, len(images))  # Before any work on the images.
            return self._place(ids, places, self._patches(images), longest)

    def _place(
        self,
        ids: Sequence[int],
        places: Sequence[int],
        images: Sequence[ImagePatches],
        longest: int,
    ) -> tuple[list[int], PromptImages]:
        token = self.tower.image_token_id
        out, spans, start = list[int](), list[tuple[int, int]](), 0
        origins = list[tuple[int, int]]()  # Of each span: its image, and its number within that.
        for index, (place, image) in enumerate(zip(places, images, strict=True)):
            out += ids[start:place]
            for number, (begin, end) in enumerate(_runs(image.ids, token)):
                spans.append((len(out) + begin, len(out) + end))
                origins.append((index, number))
            out += image.ids
            start = place + 1
        out += ids[start:]
        if any(end == begin for (_, end), (begin, _) in itertools.pairwise(spans)):
            raise RequestError("two images follow each other; expected a token between them")
        if len(out) > longest:
            raise RequestError(
                f"the prompt has {len(out)} tokens, those of its images included; expected at most "
                f"{longest}: send smaller or fewer images, or compile with a larger max_len"
            )
        is_image = torch.zeros(len(out), dtype=torch.bool)
        for begin, end in spans:
            is_image[begin:end] = True
        offsets, delta = self.tower.positions(is_image, list(images))
        digests = [_digest(image.tensors) for image in images]
        rows = [self._embed(*each) for each in zip(digests, images, strict=True)]
        known = tuple(digests[index] + number.to_bytes(4, "little") for index, number in origins)
        return out, PromptImages(tuple(spans), known, torch.cat(rows), offsets, delta)

    def _places(self, ids: Sequence[int], count: int) -> list[int]:
        """Where the image tokens of a prompt with `count` images are."""
        token = self.tower.image_token_id
        places = [place for place, each in enumerate(ids) if each == token]
        if len(places) != count:
            raise RequestError(
                f"the prompt has {len(places)} image tokens (id {token}) and {count} images; "
                "expected one for each"
            )
        return places

    def _embed(self, digest: bytes, image: ImagePatches) -> Tensor:
        """The embeddings of an image, kept or new: [tokens, H]."""
        stats, kept = self._stats, self._kept
        if digest in kept:
            kept.move_to_end(digest)
            stats.images_reused += 1
            return kept[digest]
        rows = self.tower.embed(image).to("cpu", self._dtype)
        stats.images_embedded += 1
        kept[digest] = rows
        stats.image_bytes += rows.nbytes
        while stats.image_bytes > MOST_KEPT_BYTES:
            stats.image_bytes -= kept.popitem(last=False)[1].nbytes
        return rows

    def _patches(self, images: Sequence[Image]) -> list[ImagePatches]:
        process = self._processor
        try:
            made = process(images=list(images), return_tensors="pt")
        except ValueError as error:
            raise RequestError(f"an image is refused: {error}") from None
        return self.tower.split(made, self._served.own_tokens)


def _runs(ids: Sequence[int], token: int) -> Iterator[tuple[int, int]]:
    """Where a token stands in a row of ids: the first place and the one after the last."""
    for is_token, run in itertools.groupby(enumerate(ids), lambda each: each[1] == token):
        places = [place for place, _ in run]
        if is_token:
            yield places[0], places[-1] + 1


def _digest(tensors: Mapping[str, Tensor]) -> bytes:
    """SHA-256 of all that an image's embeddings and positions depend on."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {[*tensor.shape]} ".encode())
        found.update(tensor.contiguous().numpy().data)
    return found.digest()

"""Opens images for prompts: files, bytes and data URLs, decoded by Pillow within limits."""

from __future__ import annotations

import base64
import binascii
import io
import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpc.errors import OptionError, RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats that Pillow may decode. Of an animation, only the first picture is used."""
MOST_PIXELS = 2**26
"""The most pixels of an image, or of all images of a request to a server. Pillow holds 4 bytes for
each, and twice as many while it converts them: 512 MiB."""
MOST_SIDE = 2**16 - 1
"""The most pixels of a side, which is JPEG's own limit. Pillow has a pointer for each row."""
MOST_SCANS = 64
"""The most scans of a JPEG file. Each is a pass over all pixels; progressive files have some 10."""
_SCAN = re.compile(rb"\xff\xda\x00[\x08\x0a\x0c\x0e][\x01-\x04]")
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)


def open_image(source: Any, what: str = "the image", most_pixels: int = MOST_PIXELS) -> Image:
    """An image in RGB, the right way up.

    Args:
        source: a path, the bytes of a file, or a Pillow image.
        what: which image it is, for messages.
        most_pixels: more are refused before they are decoded.

    Raises:
        RequestError: it cannot be opened, is too large, or is no image.
        OptionError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise OptionError("images need Pillow: pip install 'mtpc[images]'") from None
    if isinstance(source, (str, Path)):
        source = _read(Path(source), what)
    if isinstance(source, (bytes, bytearray)):
        source = io.BytesIO(source)
    elif not isinstance(source, Image.Image):
        raise RequestError(
            f"{what} is a {type(source).__name__}; expected a path, bytes or a Pillow image"
        )
    try:
        opened = source
        if isinstance(source, io.BytesIO):  # Only the head is read here.
            opened = Image.open(source, formats=FORMATS)
        width, height = opened.size
        if width * height > most_pixels or max(width, height) > MOST_SIDE:
            raise RequestError(
                f"{what} has {width} x {height} pixels; expected at most {most_pixels}, and "
                f"{MOST_SIDE} a side"
            )
        if isinstance(source, io.BytesIO):
            if opened.format in ("JPEG", "MPO"):
                _check_scans(source, what)
            ImageOps.exif_transpose(opened, in_place=True)
        else:
            opened = ImageOps.exif_transpose(opened)
        return opened if opened.mode == "RGB" else opened.convert("RGB")
    except RequestError:
        raise
    except UnidentifiedImageError:
        raise RequestError(f"{what} cannot be decoded: expected {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        message = f"{what} has far more than {most_pixels} pixels; expected at most so many"
        raise RequestError(message) from None
    except Exception as error:  # Pillow's decoders raise whatever their formats lead to.
        raise RequestError(
            f"{what} cannot be decoded: {type(error).__name__}: {error}; save it again"
        ) from None


def _check_scans(file: io.BytesIO, what: str) -> None:
    scans = sum(1 for _ in itertools.islice(_SCAN.finditer(file.getbuffer()), MOST_SCANS + 1))
    if scans > MOST_SCANS:
        raise RequestError(f"{what} has more than {MOST_SCANS} scans; save it again as JPEG")


def read_data_url(url: str, what: str) -> bytes:
    """The bytes in a data URL; nothing is ever fetched.

    Raises:
        RequestError: the URL is of another kind, or its base64 is broken.
    """
    head = _DATA_URL.match(url)
    if head is None:
        shown = url[:40] + ("..." if len(url) > 40 else "")
        raise RequestError(
            f"{what} is {shown!r}; expected data:image/...;base64,..., as no URL is fetched"
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{what} is not base64: {error}") from None


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise RequestError(f"{what} cannot be read: {error}") from None

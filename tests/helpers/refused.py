"""Checkpoints that are refused for what their config says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers import tiny
from mtpc.errors import UnsupportedModelError
from mtpc.models.load import load


def check_refused(source: Path, directory: Path, entries: dict[str, Any], said: str) -> None:
    """Write a copy of a checkpoint with other entries; the error says what, and of which."""
    tiny.with_entries(source, directory, (), **entries)
    with pytest.raises(UnsupportedModelError, match=said) as raised:
        load(directory, None, needs_mtp=True)
    assert str(directory) in str(raised.value)

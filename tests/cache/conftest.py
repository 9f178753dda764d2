"""Stores and copies of checkpoints, for tests of the graph cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.store_writer import DIGEST, filled

from mtpc.store.entries import EntryStore


@pytest.fixture
def store(tmp_path: Path) -> EntryStore:
    """A store with one entry, of generation 1, that another user can reach from `tmp_path`."""
    tmp_path.chmod(0o755)
    made = EntryStore(tmp_path / "store")
    made.prepare()
    made.write(DIGEST, filled(1))
    return made


@pytest.fixture
def copied(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """copied(family): its checkpoint in another place, to be changed."""

    def get(family: str) -> Path:
        return Path(shutil.copytree(checkpoint(family), tmp_path / f"copy-of-{family}"))

    return get

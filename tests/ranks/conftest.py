"""Two ranks, and their steps, built once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.ranks import Group, group_of

SHAPE = [
    *("--dtype=float64", "--spec-tokens=1", "--max-len=512", "--prefill-chunk=16"),
    "--no-sampling",
]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Two ranks, for all tests of a module."""
    with group_of(2, tmp_path_factory.mktemp("two")) as group:
        yield group


@pytest.fixture(scope="session")
def built(checkpoint: Callable[..., Path], cpu_cache: Path) -> list[str]:
    """Arguments of commands on two ranks whose steps `mtpc build` has made for both."""
    arguments = [str(checkpoint("mimo")), *SHAPE, "--batch-buckets=1", "--tensor-parallel-size=2"]
    done = subprocess.run(
        [sys.executable, "-m", "mtpc", "build", *arguments, "--jobs=1", f"--out={cpu_cache}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):  # A prefill and a decode step each.
        assert done.stdout.count(f"], rank {rank} ") == 2, done.stdout
    return [*arguments, f"--cache-dir={cpu_cache}"]

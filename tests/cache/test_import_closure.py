"""A start imports little of mtpc: upper bounds; lower them when a start imports less."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from helpers.import_closure import closure

BOUNDS = {"cold": (175, 27850), "warm": (69, 11925)}
"""The most modules of mtpc, and lines of them, that `mtpc.compile` imports on the cpu backend."""


def test_what_a_start_imports(cpu_cache: Path, checkpoint: Callable[..., Path]) -> None:
    """Of a model of the demo's family."""
    directory = checkpoint("glm4_moe", "random")
    for start, bounds in BOUNDS.items():  # The first one fills the cache.
        found = closure(cpu_cache, directory).size
        said = f"{start}: {found}; python -m helpers.import_closure CACHE {directory} -v lists them"
        assert found[0] <= bounds[0], said
        assert found[1] <= bounds[1], said

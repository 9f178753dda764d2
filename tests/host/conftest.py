"""Models compiled for a host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import drafter
from helpers.watched_host import OPTIONS

import mtpc


@pytest.fixture(scope="session")
def hosted(checkpoint: Callable[..., Path]) -> Callable[..., mtpc.HostedModel]:
    """hosted(family, K): halves and whole steps, compiled once."""
    made: dict[Any, mtpc.HostedModel] = {}

    def get(family: str, spec_tokens: int = 3, **changes: Any) -> mtpc.HostedModel:
        key = (family, spec_tokens, *sorted(changes.items()))
        if key not in made:
            options = {**OPTIONS, **changes, "spec_tokens": spec_tokens}
            directory = checkpoint(family)
            options = {**drafter(directory), **options}
            made[key] = mtpc.compile_host(directory, form="both", **options)
        return made[key]

    return get

"""Steps that the checker reads: each is traced once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.listings import Listed, listed


@pytest.fixture(scope="session")
def steps(checkpoint: Callable[..., Path]) -> Callable[[str], dict[str, Listed]]:
    """steps(family): its steps in bfloat16 for the cpu backend, by phase."""
    made: dict[str, dict[str, Listed]] = {}

    def get(family: str) -> dict[str, Listed]:
        if family not in made:
            made[family] = listed(checkpoint(family, "random"))
        return made[family]

    return get

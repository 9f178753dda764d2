"""Steps that the checker reads: each is traced once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.listings import Listings

ALONE = {"glm4_moe": {"batch_buckets": (1,), "spec_tokens": 3}}
"""The family of the demo model has the demo's decode step: of one request, with 3 drafts."""


@pytest.fixture(scope="session")
def steps(checkpoint: Callable[..., Path]) -> Callable[[str], Listings]:
    """steps(family): its steps in bfloat16 for the cpu backend, by phase."""
    made: dict[str, Listings] = {}

    def get(family: str) -> Listings:
        if family not in made:
            made[family] = Listings(checkpoint(family, "random"), **ALONE.get(family, {}))
        return made[family]

    return get

"""Steps that the checker reads: each is traced once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from certificate.planted import DFLASH2
from helpers import block_drafters, eagle
from helpers.listings import Listings

ALONE = {"glm4_moe": {"batch_buckets": (1,), "spec_tokens": 3}}
"""The family of the demo model has the demo's decode step: of one request, with 3 drafts."""


@pytest.fixture(scope="session")
def steps(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Listings]:
    """steps(family): its steps in bfloat16 for the cpu backend, by phase."""
    made: dict[str, Listings] = {}

    def draft() -> Path:
        second = block_drafters.SECOND
        entries = {**second["dflash_config"], "target_layer_ids": [0, 1]}
        config = {**block_drafters.CONFIG, **second, "dflash_config": entries}
        directory = tmp_path_factory.mktemp(DFLASH2) / "draft"
        return eagle.save_head(block_drafters.new_dflash(config), config, directory)

    def get(family: str) -> Listings:
        if family not in made:
            options: dict[str, Any] = ALONE.get(family, {})
            if family == DFLASH2:
                options = {"draft": draft(), "spec_tokens": 3, "row_budgets": (2,)}
            source = ("llama", "plain") if family == DFLASH2 else (family, "random")
            made[family] = Listings(checkpoint(*source), **options)
        return made[family]

    return get

"""Four ranks of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.families import TINY
from helpers.oracles import DraftOracle, Oracle
from helpers.ranks import group_of
from helpers.theorem import PROMPTS, check_drafts, check_theorem
from helpers.trained import make_trained_checkpoint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"), [("deepseek_v3", {}), ("exaone_moe", {"num_key_value_heads": 4})]
)
def test_text_and_drafts_of_four_ranks(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    directory = make_trained_checkpoint(family, tmp_path / "model", **changes)
    options: dict[str, Any] = {**TINY, "dtype": "float64", "batch_buckets": (4,), "spec_tokens": 1}
    with group_of(4, tmp_path) as four:
        spec, plain = four.compile(directory, **options), Oracle(family, directory)
        check_theorem(spec, plain, 2)
        assert check_drafts(spec, DraftOracle(plain), [PROMPTS[4], PROMPTS[9]], 8) > 3
        # Both checks leave garbage in rank 0's idle slots. These requests take all slots again.
        spec.generate([list(prompt) for prompt in PROMPTS[:4]], 8)
        states = four.close()
        assert all(state == states[0] for state in states)

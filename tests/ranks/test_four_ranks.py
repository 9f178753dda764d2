"""Four ranks of one model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.families import TINY
from helpers.oracles import DraftOracle, Oracle
from helpers.ranks import group_of
from helpers.theorem import PROMPTS, check_drafts, check_theorem


@pytest.mark.slow
def test_text_and_drafts_of_four_ranks(
    tmp_path: Path, checkpoint: Callable[..., Path], oracle: Callable[..., Oracle]
) -> None:
    options = {**TINY, "dtype": "float64", "batch_buckets": (4,), "spec_tokens": 1}
    with group_of(4, tmp_path) as four:
        spec, plain = four.compile(checkpoint("deepseek_v3"), **options), oracle("deepseek_v3")
        check_theorem(spec, plain, 2)
        assert check_drafts(spec, DraftOracle(plain), [PROMPTS[4], PROMPTS[9]], 8) > 3
        # Both checks leave garbage in rank 0's idle slots. These requests take all slots again.
        spec.generate([list(prompt) for prompt in PROMPTS[:4]], 8)
        states = four.close()
        assert all(state == states[0] for state in states)

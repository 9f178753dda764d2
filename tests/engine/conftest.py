"""The demo model, which has a tokenizer, with each number of drafts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import mtpc
from mtpc.cli.demo import demo_checkpoint


@pytest.fixture(scope="session")
def text_model() -> Callable[[int], mtpc.SpecModel]:
    """text_model(K): compiled once."""
    made: dict[int, mtpc.SpecModel] = {}

    def get(spec_tokens: int) -> mtpc.SpecModel:
        if spec_tokens not in made:
            made[spec_tokens] = mtpc.compile(
                demo_checkpoint(),
                spec_tokens=spec_tokens,
                backend="eager",
                dtype="float64",
                batch_buckets=(2,),
                max_len=128,
            )
        return made[spec_tokens]

    return get

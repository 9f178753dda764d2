"""Generators for `mtpc.transformers`, beside transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.families import TINY

import mtpc
from mtpc.models.hf import model_class


@pytest.fixture(scope="session")
def hf_generator(checkpoint: Callable[..., Path]) -> Callable[[str, int], Any]:
    """hf_generator(family, K): a `mtpc.transformers.Generator` of a float64 model object.

    With transformers' `sdpa`: its eager attention takes softmax in float32, where the mask of
    float64 overflows, and a left-padded batch becomes NaN. Where it has no other, in float32.
    """
    eager_alone = ("mimo_v2", "deepseek_v4")
    models: dict[str, Any] = {}
    made: dict[Any, Any] = {}

    def get(family: str, spec_tokens: int) -> Any:
        if family not in models:
            models[family] = model_class(tiny.family_of(family)).from_pretrained(
                checkpoint(family),
                dtype=torch.float32 if family in eager_alone else torch.float64,
                attn_implementation="eager" if family in eager_alone else "sdpa",
                experts_implementation="eager",
            )
        if (family, spec_tokens) not in made:
            options = {"backend": "eager", **TINY, "batch_buckets": (4,), "sampling": True}
            made[family, spec_tokens] = mtpc.transformers.Generator(
                models[family], spec_tokens=spec_tokens, **options
            )
        return made[family, spec_tokens]

    return get


@pytest.fixture
def generator(hf_generator: Callable[..., Any]) -> Iterator[Any]:
    made = hf_generator("mimo", 2)
    yield made
    engine = made.spec.engine
    assert not engine.has_work
    assert engine.slots.num_free == engine.program.max_reqs

"""Sampling compiled for the cpu, and restored from the cache, says what the eager graph says."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CPU_OPTIONS
from test_sampling import FILTERS, NEW
from test_theorem import PROMPTS, poison

import mtpc
from mtpc import SamplingParams


def test_compiled_equals_eager(
    checkpoint: Callable[..., Path], cpu_cache: Path, compiled: Callable[..., Any]
) -> None:
    """Every parameter at K = 3, poisoned, padded: tokens, log-probabilities, accepted drafts."""
    options = {**CPU_OPTIONS, "sampling": True, "token_mask": True, "cache_dir": cpu_cache}
    spec = mtpc.compile(checkpoint("mimo"), **options)
    assert spec.loaded is None, "all of it came back from the cache"
    eager = compiled("mimo", 3, batch_buckets=(2,), sampling=True)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(FILTERS))]
    before = sum(eager.stats.accepted)
    poison(spec)
    for step in spec.program.steps.values():
        step.buffers["batch.token_mask"].fill_(-1)
    chosen = list(FILTERS.values())
    wanted = eager.generate(prompts, NEW, sampling=chosen)
    assert spec.generate(prompts, NEW, sampling=chosen) == wanted
    assert sum(spec.stats.accepted) == sum(eager.stats.accepted) - before > 0
    both = []
    for model in (spec, eager):
        model.engine.add(PROMPTS[4], 9, (), SamplingParams(temperature=1.0, seed=4, logprobs=3))
        (request,) = model.engine.waiting
        while model.engine.has_work:
            model.engine.step()
        both.append(request.logprobs)
    assert len(both[0]) == 9
    for found, expected in zip(*both, strict=True):
        assert found.token_id == expected.token_id
        assert math.isclose(found.logprob, expected.logprob, rel_tol=1e-6)
        assert [i for i, _ in found.top] == [i for i, _ in expected.top]
    with pytest.raises(mtpc.errors.RequestError, match="max_logprobs"):
        spec.generate(PROMPTS[4], 3, logprobs=6)

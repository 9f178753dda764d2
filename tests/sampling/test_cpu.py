"""Sampling compiled for the cpu, and restored from the cache, says what the eager graph says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.families import CPU_OPTIONS
from helpers.sampling_oracle import FILTERS, NEW
from helpers.theorem import PROMPTS, poison
from torch import Tensor

import mtpc
from mtpc import SamplingParams
from mtpc.engine.sampling_rows import pack_bits


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
    masks = [
        step.buffers[f"batch.{kind}_mask"]
        for step in spec.program.steps.values()
        for kind in ("token", "draft")
    ]
    for mask in masks:
        mask.fill_(-1)
    chosen = list(FILTERS.values())
    wanted = eager.generate(prompts, NEW, sampling=chosen)
    assert spec.generate(prompts, NEW, sampling=chosen) == wanted
    assert sum(spec.stats.accepted) == sum(eager.stats.accepted) - before > 0
    _masked(spec, eager, masks)
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
        spec.generate(PROMPTS[4], 3, logprobs=21)


def _masked(spec: mtpc.SpecModel, eager: mtpc.SpecModel, masks: list[Tensor]) -> None:
    """Rows of both masks act as `allowed_ids` do: the same texts, the same drafts accepted."""
    allowed = tuple(range(10, 50))
    names = ("temperature", "greedy", "all filters")
    only = [dataclasses.replace(FILTERS[name], allowed_ids=allowed) for name in names]
    for mask in masks:
        mask.copy_(pack_bits(allowed, 96).expand_as(mask))
    before = sum(spec.stats.accepted), sum(eager.stats.accepted)
    found = spec.generate(PROMPTS[3:6], NEW, sampling=[FILTERS[name] for name in names])
    assert found == eager.generate(PROMPTS[3:6], NEW, sampling=only)
    accepted = sum(spec.stats.accepted) - before[0]
    assert accepted == sum(eager.stats.accepted) - before[1] > 0
    for mask in masks:
        mask.fill_(-1)

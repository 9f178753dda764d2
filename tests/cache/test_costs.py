"""Costs of steps that a run leaves in the graph cache for the next."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import CPU_OPTIONS
from helpers.theorem import PROMPTS

import mtpc
from mtpc.store.costs import COSTS

Opened = Callable[..., mtpc.SpecModel]


@pytest.fixture
def opened(checkpoint: Callable[..., Path], cpu_cache: Path) -> Opened:
    """opened(**options): a model that chooses K, on the session's cache."""

    def get(**changes: Any) -> mtpc.SpecModel:
        several = {"spec_tokens": "auto", "spec_tiers": (0, 1), "cache_dir": cpu_cache}
        return mtpc.compile(checkpoint("mimo"), **{**CPU_OPTIONS, **several, **changes})

    return get


@pytest.fixture
def entry(cpu_cache: Path, opened: Opened) -> Path:
    """The entry of costs, as one run has left it."""
    for path in cpu_cache.glob(f"entries/*/{COSTS}"):
        shutil.rmtree(path.parent)
    with_costs = opened()
    assert with_costs.engine.runner.tiers.costs() == {}
    with_costs.generate(PROMPTS[:2], 24, ignore_eos=True)
    with_costs.close()
    (path,) = cpu_cache.glob(f"entries/*/{COSTS}")
    return path.parent


def test_the_next_run_knows_them(opened: Opened, entry: Path) -> None:
    """Where it has another number of threads, they are not its own."""
    found = opened(frozen=True).engine.runner.tiers.costs()
    assert found
    assert {k for cell in found.values() for k in cell} == {0, 1}
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert opened(frozen=True).engine.runner.tiers.costs() == {}
    finally:
        torch.set_num_threads(threads)


def test_a_frozen_cache_stays_as_it_is(opened: Opened, entry: Path) -> None:
    before = (entry / COSTS).read_bytes()
    model = opened(frozen=True)
    model.generate(PROMPTS[:2], 24, ignore_eos=True)
    model.close()
    assert (entry / COSTS).read_bytes() == before
    assert not model.stats.fallbacks


def test_damage_is_said_and_mended(opened: Opened, entry: Path) -> None:
    (entry / COSTS).write_bytes(b"[]")
    model = opened()
    assert model.engine.runner.tiers.costs() == {}
    (reason,) = model.stats.fallbacks
    assert reason.startswith("costs of earlier runs were not used: ")
    model.generate(PROMPTS[:2], 24, ignore_eos=True)
    model.close()
    assert opened().engine.runner.tiers.costs()


def test_a_cache_that_cannot_be_written_is_said(
    opened: Opened, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened()
    model.generate(PROMPTS[:2], 24, ignore_eos=True)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mtpc.store.writing.os.rename", full)
    model.close()
    (reason,) = model.stats.fallbacks
    assert "costs of steps were not kept" in reason
    assert "No space left" in reason


def test_one_k_keeps_none(opened: Opened, cpu_cache: Path, entry: Path) -> None:
    shutil.rmtree(entry)
    model = opened(spec_tokens=1, spec_tiers=())
    model.generate(PROMPTS[:1], 4)
    model.close()
    assert not [*cpu_cache.glob(f"entries/*/{COSTS}")]

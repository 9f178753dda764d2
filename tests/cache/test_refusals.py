"""What the graph cache refuses: what is missing, not pinned, damaged, or open to others."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.compiled import CpuBuilt
from helpers.families import CPU_OPTIONS
from helpers.plans import plan_of
from helpers.warm_starts import BATCH, DECODE, damage

import mtpc
from mtpc.errors import CacheError, CacheWriteError, OptionError
from mtpc.program.build import Job, Task, _report
from mtpc.program.step_cache import StepCache
from mtpc.store.entries import SUMS, EntryStore


def test_frozen_says_what_is_missing(
    warm: Callable[..., Any],
    cpu_cache: Path,
    cpu_built: Callable[..., CpuBuilt],
    tmp_path: Path,
) -> None:
    cpu_built("mimo")
    before = sorted(cpu_cache.rglob("*"))
    with pytest.raises(CacheError, match=r"differs in options\.page_size: 4 -> 8; frozen, so noth"):
        warm("mimo", page_size=8)
    with pytest.raises(CacheError, match=r"decode.* is not in the cache .*: it holds no step"):
        warm("mimo", cache_dir=tmp_path)
    assert sorted(cpu_cache.rglob("*")) == before
    with pytest.raises(OptionError, match="backend 'eager', which traces its steps at ev"):
        warm("mimo", backend="eager")
    with pytest.raises(OptionError, match="use_cache is False; expected True with frozen"):
        warm("mimo", use_cache=False)


def test_pinned_entries(warm: Callable[..., Any]) -> None:
    """Other entries than the pinned ones are refused, and the message has their digest."""
    with pytest.raises(CacheError, match=r"the cache holds [0-9a-f]{64}") as refused:
        warm("mimo", require_sha256="0" * 64)
    held = str(refused.value).split("the cache holds ")[1][:64]
    assert warm("mimo", require_sha256=held).generate(BATCH[0], 4)


def own_copy(cache: Path, target: Path) -> Path:
    """A cache of one's own, to be damaged."""
    return Path(shutil.copytree(cache, target / "cache"))


@pytest.mark.parametrize(
    "file", ["step.tape.json", "constants.safetensors", "step.record.json", "key.json", SUMS]
)
def test_damage_is_refused_when_frozen(
    file: str,
    warm: Callable[..., Any],
    cpu_cache: Path,
    cpu_built: Callable[..., CpuBuilt],
    tmp_path: Path,
) -> None:
    """No byte of a damaged entry is used."""
    step = cpu_built("mimo").compiler.obtain(DECODE)
    mine = own_copy(cpu_cache, tmp_path)
    damage(mine, step, file)
    with pytest.raises(CacheError, match=file):
        warm("mimo", cache_dir=mine)


def test_damage_is_said_and_healed(
    cpu_cache: Path,
    cpu_built: Callable[..., CpuBuilt],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Not frozen: the entry is built again, in place, and the stats say so."""
    cold = cpu_built("mimo")
    mine = own_copy(cpu_cache, tmp_path)
    damage(mine, cold.compiler.obtain(DECODE), "step.tape.json")
    options = {**CPU_OPTIONS, "cache_dir": mine}
    told = list[str]()
    healed = mtpc.compile(checkpoint("mimo"), **options, progress=lambda p: told.append(p.stage))
    (miss,) = (line for line in told if "is not in the cache" in line)
    assert miss.endswith("its entry is damaged")
    (note,) = healed.stats.fallbacks
    assert "damaged cache entry was not used" in note
    assert "step.tape.json does not have the SHA-256" in note
    assert healed.generate(BATCH, 12) == cold.spec.generate(BATCH, 12)
    again = mtpc.compile(checkpoint("mimo"), **options, frozen=True)
    assert not again.stats.fallbacks
    assert again.generate(BATCH, 12) == healed.generate(BATCH, 12)


def test_a_cache_that_others_can_write_is_refused(
    warm: Callable[..., Any], cpu_cache: Path, cpu_built: Callable[..., CpuBuilt], tmp_path: Path
) -> None:
    """Before anything of it is opened, and whether frozen or not."""
    cpu_built("mimo")
    mine = own_copy(cpu_cache, tmp_path)
    mine.chmod(0o775)
    for frozen in (True, False):
        with pytest.raises(CacheError, match=r"can be written by its group.*chmod go-w"):
            warm("mimo", cache_dir=mine, frozen=frozen)


@pytest.mark.parametrize("can_write", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_step_needs_no_temporary_directory(
    can_write: bool,
    checkpoint: Callable[..., Path],
    cpu_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not where the cache keeps it, nor where only this process has it, which a note then says."""
    root = own_copy(cpu_cache, tmp_path)
    if not can_write:
        shutil.rmtree(root / "tmp", ignore_errors=True)
        (root / "tmp").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    options = {**CPU_OPTIONS, "batch_buckets": (1,), "spec_tokens": 0, "cache_dir": root}
    spec = mtpc.compile(checkpoint("mimo"), **options)
    assert len(spec.generate(BATCH[0], 4)) == 4
    notes = spec.stats.fallbacks
    assert all(line.startswith("not kept in the cache: ") for line in notes)
    assert bool(notes) is not can_write


def test_a_build_without_kernels_in_the_cache(tmp_path: Path) -> None:
    """The error says what the cache lacks: here nothing but the kernels."""
    found = SimpleNamespace(find=lambda key, part: object(), store=EntryStore(tmp_path))
    jobs = [Job(None, plan_of(), cast("StepCache", found))]
    report = partial(_report, tmp_path, jobs, [Task(0, DECODE)], set(), tmp_path, 0.0)
    with pytest.raises(CacheWriteError, match=r"^the kernels are built but not in the cache"):
        report()
    found.find = lambda key, part: None
    with pytest.raises(CacheWriteError, match=r"^1 of 1 steps and the kernels are built"):
        report()

"""Steps that are built while others serve: the same text before, meanwhile and after."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.compiled import give_kernels
from helpers.families import TINY

import mtpc
from mtpc.layout import StepKey

OPTIONS: dict[str, Any] = {
    **TINY, "batch_buckets": (1,), "backend": "cpu", "dtype": "float32",
    "build_in_background": True,
}  # fmt: skip
UP_TO_ONE: dict[str, Any] = {
    "spec_tokens": "auto", "spec_tiers": (0, 1), "max_len": None, "batch_buckets": (1, 2),
}  # fmt: skip
PROMPT = [3, 4, 5]


def _children() -> set[int]:
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


def _builder(others: set[int]) -> set[int]:
    """The building process, once its thread has started it."""
    end = time.monotonic() + 30
    while not (found := _children() - others):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Path:
    """A cache with kernels, and the steps that `UP_TO_ONE` begins with: those without drafts, of
    decode steps the largest."""
    root = tmp_path_factory.mktemp("begun")
    root.chmod(0o755)
    give_kernels(root / "cache")
    options = {**OPTIONS, **UP_TO_ONE, "cache_dir": root / "cache"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtpc.program.child_process.free_bytes", lambda: 0)
        mtpc.compile(checkpoint("mimo", "random"), lambda p: None, **options).close()
    return root / "cache"


@pytest.fixture
def start(
    tmp_path: Path, checkpoint: Callable[..., Path], request: pytest.FixtureRequest
) -> Iterator[Callable[..., Any]]:
    """start(**options): a model that begins early, on a cache with kernels alone; or, where a test
    uses `begun`, on a copy of that."""
    tmp_path.chmod(0o755)
    if "begun" in request.fixturenames:
        shutil.copytree(request.getfixturevalue("begun"), tmp_path / "cache")
    else:
        give_kernels(tmp_path / "cache")
    started: list[mtpc.SpecModel] = []

    def begin(**options: Any) -> mtpc.SpecModel:
        options = {**OPTIONS, "cache_dir": tmp_path / "cache", **options}
        started.append(mtpc.compile(checkpoint("mimo", "random"), lambda p: None, **options))
        return started[-1]

    yield begin
    for spec in started:
        spec.close()


def _text(spec: mtpc.SpecModel) -> Any:
    return spec.generate(PROMPT, 12, ignore_eos=True)


def _decode_steps(spec: mtpc.SpecModel) -> set[tuple[int, int]]:
    """K and requests of each."""
    keys = [key for key in spec.program.steps if key.phase == "decode"]
    return {(key.spec_tokens, key.bucket.num_reqs) for key in keys}


def _serve_until(spec: mtpc.SpecModel, tiers: tuple[int, ...]) -> None:
    """Texts meanwhile are all the same."""
    expected, end = _text(spec), time.monotonic() + 120
    while spec.stats.tiers != tiers:
        assert _text(spec) == expected
        assert "failed" not in spec.stats.building, spec.stats.building
        assert time.monotonic() < end, spec.stats.building
        time.sleep(0.05)
    for _ in range(3):
        assert _text(spec) == expected


@pytest.mark.usefixtures("begun")
def test_it_serves_at_once_and_moves_up(start: Callable[..., Any]) -> None:
    """Also where `max_len` is left to the model: both processes use one key."""
    others = _children()
    spec = start(**UP_TO_ONE)
    assert _decode_steps(spec) == {(0, 2)}, "one that serves any batch"
    assert "background" in spec.stats.building
    assert "K ready" in str(spec.stats)
    _serve_until(spec, (0, 1))
    spec.close()
    assert spec.stats.building == ""
    assert _children() <= others
    warm = start(**UP_TO_ONE)
    assert _decode_steps(warm) == _decode_steps(spec) == {(0, 1), (0, 2), (1, 1), (1, 2)}
    assert warm.stats.building == ""


def test_an_idle_engine_names_steps_that_were_bound(checkpoint: Callable[..., Path]) -> None:
    """Only a decode step takes them over, and a server may wait long for one."""
    options = {**TINY, "batch_buckets": (1,), "backend": "eager", **UP_TO_ONE}
    spec = mtpc.compile(checkpoint("mimo", "random"), lambda p: None, **options)
    step = spec.program.steps.pop(StepKey.decode(1, 1))
    spec.engine.runner.tiers.use((0,))
    assert spec.stats.tiers == (0,)
    spec.program.arrived.append(((0, 1), [step]))
    assert spec.stats.tiers == (0, 1)
    _text(spec)
    assert not spec.program.arrived
    assert spec.stats.tiers == (0, 1)


@pytest.mark.slow
def test_one_k_is_used_alone_when_it_is_there(start: Callable[..., Any]) -> None:
    """And an idle engine says that it is."""
    spec, end = start(spec_tokens=2), time.monotonic() + 120
    assert spec.stats.tiers == (0,)
    while spec.stats.building:
        assert time.monotonic() < end, spec.stats.building
        time.sleep(0.05)
    assert spec.stats.tiers == (2,)
    before = spec.stats.replays.copy()
    _serve_until(spec, (2,))
    later = spec.stats.replays - before
    assert {key.spec_tokens for key in later if key.phase == "decode"} == {2}


@pytest.mark.usefixtures("begun")
def test_a_build_that_dies_leaves_what_serves(start: Callable[..., Any]) -> None:
    others = _children()
    spec = start(**UP_TO_ONE)
    expected = _text(spec)
    for pid in _builder(others):
        os.kill(pid, signal.SIGKILL)
    _wait_for_failure(spec, "-9")
    assert _text(spec) == expected
    assert spec.stats.tiers == (0,)
    assert 'spec_decode_tiers_ready{spec_tokens="0"} 1' in spec.stats.prometheus()


def _wait_for_failure(spec: mtpc.SpecModel, why: str) -> None:
    """It is a fallback, and the only one."""
    end = time.monotonic() + 60
    while "failed" not in spec.stats.building:
        assert time.monotonic() < end, spec.stats.building
        time.sleep(0.05)
    assert why in spec.stats.building
    assert list(spec.stats.fallbacks) == [spec.stats.building]
    assert "failed" in spec.stats.prometheus()


@pytest.mark.slow
@pytest.mark.usefixtures("begun")
def test_a_full_disk_ends_the_build_at_its_first_step(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    spec = start(**UP_TO_ONE)
    (tmp_path / "cache" / "tmp").rmdir()
    (tmp_path / "cache" / "tmp").write_text("here nothing can be written")
    _wait_for_failure(spec, "cannot write the graph cache")
    assert "Not a directory" in spec.stats.building
    assert spec.stats.tiers == (0,)


@pytest.mark.usefixtures("begun")
def test_without_memory_no_process_is_started(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = _children()
    monkeypatch.setattr("mtpc.program.child_process.free_bytes", lambda: 900 * 2**20)
    spec = start(**UP_TO_ONE)
    _wait_for_failure(spec, "0.9 GiB of memory are free, and a building process takes some 1.0")
    assert _children() <= others


@pytest.mark.usefixtures("begun")
def test_closing_ends_the_build(start: Callable[..., Any]) -> None:
    others = _children()
    spec = start(**UP_TO_ONE)
    assert _builder(others)
    spec.close()
    assert _children() <= others
    assert _text(spec) == _text(spec)

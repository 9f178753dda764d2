"""Building in a process of its own: the same text, the same errors, and nothing left running."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.compiled import give_kernels
from helpers.families import TINY
from helpers.plans import plan_of

import mtpc
from mtpc.errors import BackendError, CapacityError
from mtpc.layout import graph_keys
from mtpc.layout.progress import Progress
from mtpc.program import build_road as apart
from mtpc.program.child_process import ChildJob, build_in_child
from mtpc.program.open_cache import open_cache
from mtpc.program.step_cache import RECORD
from mtpc.store.entries import EntryStore
from mtpc.store.tokenizers import KeptTokenizers
from mtpc.weights.checkpoint import Checkpoint

OPTIONS: dict[str, Any] = {
    **TINY, "spec_tokens": 1, "batch_buckets": (1,), "backend": "cpu", "dtype": "float32",
}  # fmt: skip
CALLER = """
import json, sys
import torch
import mtpc
from mtpc.program import build_road as apart

directory, cache, options, large = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
apart.LARGE = int(large)
stages = []
model = mtpc.compile(directory, lambda p: stages.append(p.stage), cache_dir=cache, **options)
text = model.generate([3, 4, 5], 12, ignore_eos=True)
heavy = {"transformers", "torch._inductor.compile_fx"} & set(sys.modules)
print(json.dumps([text, stages, sorted(heavy), dict(model.stats.fallbacks)]))
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with kernels and nothing else."""
    tmp_path.chmod(0o755)
    give_kernels(tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(params=["a new process", "a copy"])
def build(
    cache: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., bool]:
    """build(directory, listener, **options): `build_in_child`, however small the checkpoint is."""
    is_copied = request.param == "a copy"
    monkeypatch.setattr("mtpc.program.processes._is_alone", lambda: is_copied)

    def run(directory: Path, listener: Any = lambda progress: None, **changes: Any) -> bool:
        source = Checkpoint(directory)
        options = plan_of(**{**OPTIONS, "cache_dir": cache, **changes})
        opened = open_cache(source, options, print)
        assert opened is not None
        job = ChildJob(source.directory.absolute(), options, graph_keys(options, "fused"))
        return build_in_child(job, opened, listener)

    return run


def _all_children() -> set[int]:
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


@pytest.fixture
def children() -> Callable[[], set[int]]:
    """children(): processes that this test has started and not yet waited for."""
    others = _all_children()  # Those of fixtures that live as long as the session.
    return lambda: _all_children() - others


def _call(directory: Path, cache: Path, large: int) -> list[Any]:
    """CALLER in a process of its own: a script without a guard around its main part."""
    options = json.dumps(OPTIONS)
    done = subprocess.run(
        [sys.executable, "-c", CALLER, str(directory), str(cache), options, str(large)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_caller_that_had_it_built_is_as_light_as_a_warm_start(
    checkpoint: Callable[..., Path], cache: Path, tmp_path: Path
) -> None:
    """It traced nothing, says the text of one that compiles by itself, and has the tokenizer."""
    directory = Path(shutil.copytree(checkpoint("mimo", "random"), tmp_path / "model"))
    shutil.copy(mtpc.demo() / "tokenizer.json", directory)
    text, stages, heavy, fallbacks = _call(directory, cache, 0)
    assert KeptTokenizers(EntryStore(cache)).read(directory / "tokenizer.json")
    assert {"load the model", "trace", "lower", "load"} <= set(stages)
    assert (heavy, fallbacks) == ([], {})
    give_kernels(tmp_path / "other")
    same, _, in_process, _ = _call(directory, tmp_path / "other", apart.LARGE)
    assert same == text
    assert "transformers" in in_process, "or the test above shows nothing"


DOES_NOT_FIT = (
    r"needs \d+\.\d GiB .*of KV pages.*are free; "
    "lower max_len, batch_buckets, num_pages or snapshot_bytes"
)


def test_its_errors_are_the_callers(
    checkpoint: Callable[..., Path], build: Callable[..., bool], children: Callable[[], set[int]]
) -> None:
    """Also that the steps could not run here, which it says before it traces."""
    stages: set[str] = set()
    with pytest.raises(CapacityError, match=DOES_NOT_FIT):
        build(checkpoint("mimo", "random"), lambda p: stages.add(p.stage), num_pages=2**33)
    assert "load the model" in stages
    assert stages.isdisjoint({"trace", "trace model"})
    assert not children()


def test_a_program_that_does_not_fit_is_not_built(
    checkpoint: Callable[..., Path], cache: Path
) -> None:
    """Nor by a process that builds for itself."""
    stages, options = set[str](), {**OPTIONS, "num_pages": 2**33, "cache_dir": cache}
    with pytest.raises(CapacityError, match=DOES_NOT_FIT):
        mtpc.compile(checkpoint("mimo", "random"), lambda p: stages.add(p.stage), **options)
    assert stages.isdisjoint({"trace", "trace model"})


def test_a_caller_that_gives_up_leaves_nothing_running(
    checkpoint: Callable[..., Path],
    build: Callable[..., bool],
    children: Callable[[], set[int]],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C reaches the caller alone. The other process hears of it before it has built a step."""
    monkeypatch.setattr("mtpc.program.child_process.GRACE_S", 60)
    started: set[int] = set()

    def interrupt(progress: Progress) -> None:
        if progress.stage == "load the model":
            started.update(children())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(checkpoint("mimo", "random"), interrupt)
    assert started
    assert not children()
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
    assert not [*cache.glob(f"entries/*/{RECORD}")]


def test_a_process_that_dies_is_an_error(
    checkpoint: Callable[..., Path], build: Callable[..., bool], children: Callable[[], set[int]]
) -> None:
    """As for want of memory; nothing of it is taken for a finished cache."""

    def kill(progress: Progress) -> None:
        if progress.stage == "load the model":
            for pid in children():
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(BackendError, match=r"ended with status -9.*--jobs 1"):
        build(checkpoint("mimo", "random"), kill)


START = """
import threading
from mtpc.environment import without_blas_threads
with without_blas_threads():
    import torch
from mtpc.program.processes import start_beside

def started():
    process, pipe = start_beside("mtpc.program.child_process")
    pipe.close()
    return type(process).__name__, process.wait() != 0

print(started())
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(started())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere torch has numpy's BLAS")
def test_a_process_of_one_thread_is_copied() -> None:
    """And both ways it ends at once where its caller's end of the pipe is closed."""
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["('Copy', True)", "('Popen', True)"], done.stderr


def test_where_no_process_is_of_use(
    checkpoint: Callable[..., Path], tmp_path: Path, build: Callable[..., bool]
) -> None:
    """A cache that cannot be written: who asked compiles by itself."""
    directory = checkpoint("mimo", "random")
    (tmp_path / "file").write_bytes(b"")
    assert not build(directory, cache_dir=tmp_path / "file" / "cache")

"""The backend that `open_cuda` makes: what it keeps, and whose kernels it binds.

Needs Triton, whose version is in the key: `tests/run_triton.sh`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.triton_here import INTERPRETS, NO_INTERPRETER

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

import triton
from helpers.fake_aiter import ALL, installer
from helpers.lower_kept import small_step
from torch._inductor.runtime.autotune_cache import AutotuneCacheArtifact
from torch.compiler._cache import CacheArtifactRecorder

from mtpc.backends import cuda
from mtpc.backends.base import Run
from mtpc.backends.kept_steps import KIND
from mtpc.backends.null import NullGraphs
from mtpc.backends.triton_kernels import launch
from mtpc.capture.graph import StepGraph
from mtpc.store.entries import EntryStore
from mtpc.store.lookup import peek

pytestmark = pytest.mark.triton


def _lower(graph: StepGraph) -> Run:
    CacheArtifactRecorder(AutotuneCacheArtifact.type(), "made/a.best_config").record({})
    return lambda: None


def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `open_cuda` asks of a device, without one."""
    monkeypatch.setattr(cuda, "check_device", lambda: None)
    monkeypatch.setattr(cuda, "TorchGraphs", lambda device: NullGraphs())
    monkeypatch.setattr(cuda, "lower_by_inductor", _lower)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "device_target", lambda: None)
    monkeypatch.setattr(cuda, "device_name", lambda device: f"a kind of {device.type}")


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_device_keeps_its_steps_in_its_store(
    batch_invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    _no_device(monkeypatch)
    store = EntryStore(tmp_path / "cache")
    backend = cuda.open_cuda(store=store, batch_invariant=batch_invariant)
    backend.lower(small_step("added"))()
    assert backend.notes == {}
    ((_, fields),) = peek(store)
    assert fields["kind"] == KIND
    assert fields["device"] == "a kind of cuda"
    assert fields["version.triton"] == triton.__version__
    cuda.open_cuda(batch_invariant=batch_invariant).lower(small_step("doubled"))()
    assert len(store.digests()) == 1


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_aiter_is_bound_on_rocm_where_rows_may_depend_on_each_other(
    batch_invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_device(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    install = installer(tmp_path, monkeypatch)
    next(install)(ALL)
    said: list[str] = []
    backend = cuda.open_cuda(said.append, batch_invariant=batch_invariant)
    libraries = [binding.library for binding in backend._bindings]
    assert ("aiter" in libraries) != batch_invariant
    assert said == ([] if batch_invariant else ["amd-aiter 0.1.5"])
    assert next(install, None) is None, "forgets the packages"

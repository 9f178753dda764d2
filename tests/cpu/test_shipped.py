"""Kernels that a wheel carries, taken before any are compiled if sources and torch are equal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.places import ROOT

from mtpc.backends.cpu_kernels import build_kernels, shipped
from mtpc.backends.cpu_kernels.build import LIBRARY
from mtpc.errors import BackendError, CacheError
from mtpc.store.entries import SUMS, Entry, EntryStore
from mtpc.store.lookup import KEY
from mtpc.store.machine import COMPILER

LEVEL = "avx2"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernels of this machine's level, as another compiler's wheel would ship them."""
    built = build_kernels()
    assert isinstance(built, Entry)
    folder = tmp_path / "shipped" / "level"
    shutil.copytree(built.directory, folder, ignore=shutil.ignore_patterns(SUMS))
    edit(folder, COMPILER, "another compiler")
    monkeypatch.setattr(shipped, "SHIPPED", folder.parent)
    return folder


def edit(folder: Path, field: str, value: str) -> None:
    key = json.loads((folder / KEY).read_text())
    assert field in key
    (folder / KEY).write_text(json.dumps({**key, field: value}))


def test_shipped_kernels_are_not_compiled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there is a compiler or not, and again at the next start."""
    store = EntryStore(tmp_path / "cache")
    monkeypatch.setenv("CXX", "/bin/false")
    built = build_kernels(store)
    assert isinstance(built, Entry)
    assert shipped.is_shipped(built)
    assert (built.directory / LIBRARY).read_bytes() == (folder / LIBRARY).read_bytes()
    assert build_kernels(store, frozen=True) == built
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build_kernels(store, frozen=True) == built


@pytest.mark.parametrize("field", ["source.kernels", "version.torch", "machine.level", "flags"])
def test_kernels_of_other_sources_are_not_taken(field: str, folder: Path, tmp_path: Path) -> None:
    edit(folder, field, "another")
    with pytest.raises(CacheError, match="no cpu kernels of level"):
        build_kernels(EntryStore(tmp_path / "cache"), frozen=True)


def test_what_the_cache_has_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest may be pinned."""
    taken = build_kernels(frozen=True)
    monkeypatch.undo()
    assert taken == build_kernels()


def test_a_cache_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lines: list[str] = []
    built = build_kernels(EntryStore(tmp_path / "file"), lines.append)
    assert built == folder / LIBRARY
    assert shipped.is_shipped(built)
    assert any("loaded from it: cannot write the graph cache" in line for line in lines)


def test_a_build_without_shipped_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "nothing")
    with pytest.raises(BackendError, match="failed with exit status 1"):
        build_kernels(EntryStore(tmp_path / "cache"))


@pytest.mark.slow
def test_a_wheel_with_kernels_runs_without_a_compiler(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-C", f"kernels={LEVEL}", "-w", str(tmp_path)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "site"),
        "MTPC_CACHE_DIR": str(tmp_path / "cache"),
        "MTPC_CPU_LEVEL": LEVEL,
        "CXX": "no-such-compiler",
    }
    for command, wanted in (("run", "fallbacks none"), ("doctor", "came with this installation")):
        done = subprocess.run(
            [sys.executable, "-m", "mtpc", command],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert wanted in " ".join(done.stdout.split())
        assert "compiling" not in done.stderr

"""What ends with a process: its children and their compilers, and its temporary directories."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.places import ROOT

from mtpc.store import scratch
from mtpc.store.entries import EntryStore
from mtpc.store.scratch import Scratch, remove_abandoned

PARENT = """
import multiprocessing, subprocess, sys, time
from mtpc.program.processes import end_with_parent, ended_by_sigterm
from mtpc.store.scratch import Scratch

def work():
    end_with_parent()
    with ended_by_sigterm():
        held = Scratch("worker")
        subprocess.run(["sh", "-c", "sleep 300 & wait"])

if __name__ == "__main__":
    with ended_by_sigterm():
        held = Scratch("parent")
        worker = multiprocessing.get_context("spawn").Process(target=work)
        worker.start()
        print("started", flush=True)
        worker.join()
"""


def members(session: int) -> list[str]:
    """The commands of the processes in a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue
        state, _, _, own = rest.split()[:4]
        if own == str(session) and state != "Z":
            found.append(name)
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


def start(words: list[str], temporary: Path, **environment: str) -> subprocess.Popen[bytes]:
    """A Python in a session of its own, with temporary directories in a place of their own."""
    temporary.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_children_end_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    """And the children's children; after SIGTERM no temporary directory is left."""
    (tmp_path / "parent.py").write_text(PARENT)
    temporary = tmp_path / "tmp"
    with start([str(tmp_path / "parent.py")], temporary) as parent:
        wait_for(lambda: any("sleep" in name for name in members(parent.pid)))
        parent.send_signal(number)
        assert parent.wait(20) in (143, -signal.SIGKILL)
        wait_for(lambda: members(parent.pid) == [], 20)
    left = [path.name for path in temporary.glob("mtpc-*")]
    assert [name.split("-")[2] for name in left] == (["parent"] if number == signal.SIGKILL else [])


def test_sigterm_during_a_build(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """No compiler runs on, and neither the cache nor the temporary directory holds remains."""
    words = ["-m", "mtpc", "build", str(checkpoint("mimo", "random")), "--batch-buckets", "1"]
    temporary, cache = tmp_path / "tmp", tmp_path / "cache"
    with start([*words, "--out", str(cache)], temporary) as build:
        wait_for(lambda: any("cc1plus" in name for name in members(build.pid)), 120)
        build.terminate()
        assert build.wait(30) == 143
        wait_for(lambda: members(build.pid) == [], 20)
    assert [path.name for path in temporary.iterdir() if path.name.startswith("mtpc-")] == []
    assert list(cache.glob("tmp/*")) == []


def test_remains_are_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of killed processes alone: not what is held, not what is young, and no one else's."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = EntryStore(tmp_path / "store")
    store.prepare()
    names = ["mtpc-scratch-steps-dead", f"store/tmp/{'f' * 32}-dead"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    held, other = Scratch("held"), tmp_path / "other"
    other.mkdir()
    store.prepare()
    assert all((tmp_path / name).exists() for name in names), "they are young"
    monkeypatch.setattr(scratch, "YOUNG_S", -1.0)
    remove_abandoned()
    store.prepare()
    assert not any((tmp_path / name).exists() for name in names)
    assert Path(held.name).exists()
    assert other.exists()
    held.cleanup()


COMPILER = """#!/bin/sh
case "$*" in *--version*) echo "compiler 1"; exit;; esac
sleep 40 & wait
"""


CALLER = """
import signal, sys
from pathlib import Path
from mtpc.backends.cpu_kernels.build import build_kernels
from mtpc.store.entries import EntryStore

signal.signal(signal.SIGINT, signal.default_int_handler)  # Else as in the shell that runs tests.
build_kernels(EntryStore(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_compilers_end_with_their_caller(tmp_path: Path, number: signal.Signals) -> None:
    """And the compilers' children, at once: Ctrl-C waits for no compiler."""
    compiler, store = tmp_path / "cxx", tmp_path / "cache"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    words = ["-c", CALLER, str(store)]
    with start(words, tmp_path / "tmp", CXX=str(compiler)) as caller:
        wait_for(lambda: any("sleep" in name for name in members(caller.pid)))
        caller.send_signal(number)
        assert caller.wait(10) == -number
        wait_for(lambda: members(caller.pid) == [], 10)

"""Ctrl-C at any moment: no lock stays taken, no page is lost, and no other text changes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.places import ROOT, TESTS


def child(*arguments: str, seconds: float) -> str:
    """Run a program of helpers/interrupts.py. A hang is killed, and fails the test."""
    path = os.pathsep.join([str(ROOT), str(TESTS)])
    done = subprocess.run(
        [sys.executable, "-m", "helpers.interrupts", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.stdout == "done\n", done.stderr[-2000:]
    return done.stderr


def test_the_lock_is_never_left_taken() -> None:
    child("lock", "1500", seconds=60)


def test_interrupted_calls(checkpoint: Callable[..., Path]) -> None:
    child("engine", "40", str(checkpoint("mimo")), seconds=240)


@pytest.mark.slow
def test_interrupted_builds(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Of `mtpc.compile`: torch's modes are left as they were, and no cache is broken."""
    tmp_path.chmod(0o755)
    child("build", "60", str(checkpoint("mimo")), str(tmp_path), seconds=900)


@pytest.mark.slow
def test_interrupted_calls_at_length(checkpoint: Callable[..., Path]) -> None:
    child("lock", "30000", seconds=300)
    child("engine", "10000", str(checkpoint("mimo")), seconds=3600)

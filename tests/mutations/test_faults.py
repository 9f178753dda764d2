"""Planted faults are seen: ten in the default run, all in the slow one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PLANT = Path(__file__).with_name("plant.py")


@pytest.mark.parametrize("options", [["--sample"], pytest.param([], marks=pytest.mark.slow)])
def test_each_planted_fault_is_seen(options: list[str]) -> None:
    """Each in a process of its own, on a copy of the repository."""
    command = [sys.executable, str(PLANT), "--jobs", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seen: " in done.stdout

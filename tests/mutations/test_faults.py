"""Planted faults are seen: four in the default run, all in the slow one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutations.faults import FAULTS
from mutations.plant import ROOT, read_rows, row

PLANT = Path(__file__).with_name("plant.py")


@pytest.mark.parametrize("options", [["--sample"], pytest.param([], marks=pytest.mark.slow)])
def test_each_planted_fault_is_seen(options: list[str]) -> None:
    """Each in a process of its own, on a copy of the repository."""
    command = [sys.executable, str(PLANT), "--jobs", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seen: " in done.stdout


def test_each_fault_can_be_planted() -> None:
    """The text that a fault replaces is in its file exactly once."""
    counts = {f.name: (ROOT / "mtpc" / f.file).read_text().count(f.right) for f in FAULTS}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_each_fault_has_a_result() -> None:
    """The file of results has every fault with the test that it names now, and all are seen."""
    verdicts = read_rows(PLANT.with_name("results.md"))
    assert [row(fault) for fault in FAULTS if row(fault) not in verdicts] == []
    assert {verdicts[row(fault)].split()[0] for fault in FAULTS} == {"seen"}

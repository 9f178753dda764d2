"""Planted faults are seen: one in the default run, ten in each of CI, all in the slow one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutations.faults import FAULTS
from mutations.plant import ROOT, plant, read_rows, row

PLANT = Path(__file__).with_name("plant.py")


ONE = ["--only", "a copy begins one token too early"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [ONE, []])
def test_each_planted_fault_is_seen(options: list[str]) -> None:
    """Each in a process of its own, on a copy of the repository."""
    command = [sys.executable, str(PLANT), "--jobs", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seen: " in done.stdout


def test_each_fault_can_be_planted(tmp_path: Path) -> None:
    """What a fault replaces is in its file exactly once, and Python with it is Python."""
    for number, fault in enumerate(FAULTS):
        tree = tmp_path / str(number)
        target = tree / "mtpc" / fault.file
        target.parent.mkdir(parents=True)
        target.write_text((ROOT / "mtpc" / fault.file).read_text())
        plant(fault, tree)


def test_each_fault_has_a_result() -> None:
    """The file of results has every fault with the test that it names now, and all are seen."""
    verdicts = read_rows(PLANT.with_name("results.md"))
    assert [row(fault) for fault in FAULTS if row(fault) not in verdicts] == []
    assert {verdicts[row(fault)].split()[0] for fault in FAULTS} == {"seen"}

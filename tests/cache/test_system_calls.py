"""Every system call of the cache's writer fails once, and for ever: nothing is half-written."""

from __future__ import annotations

from pathlib import Path

from helpers.failing_calls import run_failing


def test_every_call_of_the_writer(tmp_path: Path) -> None:
    """ENOSPC, EIO, EINTR and ENOMEM: the old entry, the new one or none; one error that says so."""
    tried, told = run_failing(tmp_path, "store", str(tmp_path / "store"), "1", seconds=120)
    assert tried > 600
    assert told > tried / 3

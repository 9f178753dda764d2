"""Every system call of a server's start fails once, and for ever: it listens, or says why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.failing_calls import run_failing

import mtpc


@pytest.mark.parametrize(
    ("stride", "seconds"), [(97, 300), pytest.param(1, 1800, marks=pytest.mark.slow)]
)
def test_every_call_of_the_start(
    word_spec: mtpc.SpecModel, tmp_path: Path, stride: int, seconds: float
) -> None:
    """ENOSPC, EIO, EINTR and ENOMEM: one error of one line, no descriptor left, no hang."""
    checkpoint = str(word_spec.served.directory)
    tried, told = run_failing(tmp_path, "server", checkpoint, str(stride), seconds=seconds)
    print(f"{tried} faults, {told} of them told as an error")
    assert tried > 500 / stride
    assert told > tried / 3

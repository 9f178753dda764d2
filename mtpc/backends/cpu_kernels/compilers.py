"""Runs compilers as one group of processes, which ends with this process, however that ends.

A compiler starts others. A shell leads their group and reads from a pipe whose other end is here:
at its end, which the system brings about for a killed process too, the shell ends the group.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_GUARD = "read -r line; kill -TERM 0"
RunCompiler = Callable[[list[str]], subprocess.CompletedProcess[str]]
"""Runs one compiler, with its output as text; any thread may call this."""


@contextmanager
def running_compilers() -> Iterator[RunCompiler]:
    """Within the block, runs compilers. At its end, those that still run are ended."""
    # A group of its own, which Ctrl-C in the terminal does not reach: the caller ends it.
    guard = subprocess.Popen(
        ["sh", "-c", _GUARD], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
    )

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, process_group=guard.pid
        )

    try:
        yield run
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()

"""Runs compilers as one group of processes, which ends with this process, however that ends.

A compiler starts others. A shell leads their group and reads from a pipe whose other end is here:
at its end, which the system brings about for a killed process too, the shell ends the group.
"""

from __future__ import annotations

import subprocess
from types import TracebackType

_GUARD = "read -r line; kill -TERM 0"


class Compilers:
    """Compilers run within the block; those that still run at its end are ended."""

    def __enter__(self) -> Compilers:
        # A group of its own, which Ctrl-C in the terminal does not reach: the caller ends it.
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run one, with its output as text; any thread may call this."""
        return subprocess.run(
            command, capture_output=True, text=True, check=False, process_group=self._guard.pid
        )

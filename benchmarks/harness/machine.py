"""Describes the machine of a measurement, detects other work on it, and reads its memory."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

import mtpc
from mtpc.weights.packing import allocate

_STAT = Path("/proc/stat")
_LEAST_FREE = 0.1
"""Share of memory that must stay available; with less, mapped files are dropped and read again."""


def describe_machine() -> dict[str, Any]:
    """Processor, memory and threads."""
    return {
        "cpu": system_field("/proc/cpuinfo", r"model name\s*: (.*)") or platform.processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory": system_field("/proc/meminfo", r"MemTotal:\s*(.*)"),
        "system": platform.platform(),
    }


def describe_versions() -> dict[str, str]:
    """What computed the results."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "mtpc": mtpc.__version__,
        "commit": _commit(),
    }


def _commit() -> str:
    """What is checked out, and whether anything differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def system_field(path: str, pattern: str) -> str | None:
    """What a pattern's group matches in a file of /proc; None where there is no such."""
    try:
        match = re.search(pattern, Path(path).read_text())
    except OSError:
        return None
    return match[1].strip() if match else None


def field_bytes(path: str, name: str) -> int | None:
    """Bytes of a line `name: N kB` in a file of /proc; None where there is no such."""
    found = system_field(path, rf"{name}:\s*(\d+) kB")
    return None if found is None else 1024 * int(found)


def tree_bytes(pid: int) -> int:
    """Resident bytes of a process and of all below it; what they share counts in each."""
    total, waiting = 0, [pid]
    while waiting:
        each = waiting.pop()
        total += field_bytes(f"/proc/{each}/status", "VmRSS") or 0
        for path in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError):  # It has ended meanwhile.
                waiting += map(int, path.read_text().split())
    return total


def memory_shortage() -> str | None:
    """What to say where so little memory is left that times would be of paging, else None."""
    total, free = (field_bytes("/proc/meminfo", name) for name in ("MemTotal", "MemAvailable"))
    if total is None or free is None or free >= total * _LEAST_FREE:
        return None
    return (
        f"only {free / 2**30:.1f} of {total / 2**30:.1f} GiB of memory are left, so that what is "
        "measured will be paging: ask for fewer K, or for fewer engines, in one run"
    )


class CpuWatch:
    """Measures, from its creation on, how much of the machine's CPU time others used.

    Others are processes beside this one and its children that have ended, and other guests on the
    same host ("steal"). Where there is no /proc/stat nothing is known, and nobody is accused.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._busy, self._own = _busy_seconds(), _own_seconds()

    def foreign_share(self, child_cpu_s: float = 0.0) -> float:
        """Share of all CPUs' time that others used, 0 to 1; in ticks of 10 ms as a rule.

        Args:
            child_cpu_s: CPU seconds of children that live, which count as this process's own.
        """
        elapsed = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        own = _own_seconds() - self._own + child_cpu_s
        foreign = _busy_seconds() - self._busy - own
        return min(max(foreign / elapsed, 0.0), 1.0)


def _own_seconds() -> float:
    """The CPU seconds of this process, and of its children that have ended."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def _busy_seconds() -> float:
    """CPU time of all processes since boot, interrupts and stolen time included."""
    if not _STAT.is_file():
        return time.process_time()
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = (
        int(ticks) for ticks in _STAT.read_text().splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


BUFFER_BYTES = 1 << 30
"""More than the caches hold, and as much as a step reads at 0.5B: a Xeon's 480 MB of third level
let 384 MB be read a twentieth faster than a gigabyte."""
PASSES = 5
"""The fastest pass counts, because others were slowed down by something else."""


class BandwidthProbe:
    """Reads a buffer from end to end with torch's threads.

    Args:
        num_bytes: the buffer's size.
    """

    def __init__(self, num_bytes: int = BUFFER_BYTES) -> None:
        # Ones, not zeros: untouched pages of zeros are all the same page, and stay in the cache.
        # In huge pages, as packed weights are: that is where the machine reads fastest.
        self._buffer = allocate((num_bytes // 4,), torch.float32).fill_(1)

    def read(self) -> float:
        """Bytes a second."""
        return self._buffer.nbytes / min(self._pass() for _ in range(PASSES))

    def _pass(self) -> float:
        start = time.perf_counter()
        self._buffer.sum()
        return time.perf_counter() - start

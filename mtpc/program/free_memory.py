"""The memory that this process can still have."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Bytes that this process can still have without swapping others out; None if unknown.

    It is the system's estimate or, in a container, what the container's limit leaves.
    """
    system = _numbers(Path("/proc/meminfo"))
    found = [system[name] * 1024 for name in ("MemAvailable",) if name in system]
    with contextlib.suppress(OSError, ValueError):  # There is no limit ("max"), or no cgroup.
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        cached = _numbers(_CGROUP / "memory.stat").get("inactive_file", 0)
        found.append(max(0, limit - used + cached))
    return min(found, default=None)


def give_back() -> None:
    """Give memory that this process has freed back to the system, where its allocator can."""
    with contextlib.suppress(OSError, AttributeError):  # It is not glibc's.
        ctypes.CDLL(None).malloc_trim(0)


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number; {} where there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = (line.replace(":", " ").split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in words if len(pair) > 1 and pair[1].isdigit()}

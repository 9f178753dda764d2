"""What the system says: environment variables, which only this module reads or sets, and free
memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def cache_directory() -> Path:
    """Default of `cache_dir`: `MTPC_CACHE_DIR`, or `mtpc` in the user's cache directory."""
    configured = os.environ.get("MTPC_CACHE_DIR")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtpc"


def api_key() -> str | None:
    """The key that clients of `mtpc serve` must send, in `MTPC_API_KEY`; None if it is not set."""
    return os.environ.get("MTPC_API_KEY")


def launched_ranks() -> tuple[int, int]:
    """(rank, number of ranks) by which torchrun started this process; (0, 1) if it did not."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(size)) if rank.isdecimal() and size.isdecimal() else (0, 1)


def cxx_compiler() -> str:
    """The C++ compiler to call: `CXX`, which Inductor also reads, or g++."""
    return os.environ.get("CXX", "g++")


def cpu_level() -> str | None:
    """The instruction-set level to compile for, from `MTPC_CPU_LEVEL`; None is the best one for
    this processor. See `mtpc.backends.cpu_kernels.levels`."""
    return os.environ.get("MTPC_CPU_LEVEL") or None


@contextlib.contextmanager
def without_blas_threads() -> Iterator[None]:
    """Within the block, the import of numpy begins no threads of its BLAS, which mtpc never calls.

    A process of one thread can be copied. On x86, torch has a BLAS of its own (MKL), which keeps
    its threads. Elsewhere both may have the same one, and nothing changes.
    """
    if _BLAS_THREADS in os.environ or platform.machine() not in ("x86_64", "AMD64"):
        yield
        return
    os.environ[_BLAS_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[_BLAS_THREADS]


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

"""What environment variables say. Only this module reads them."""

from __future__ import annotations

import os
from pathlib import Path


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

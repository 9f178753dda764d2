"""Compiles the kernels once per machine, toolchain and version of their sources.

Nothing but a C++ compiler is needed, no build system: three translation units and one command.
OpenMP is not linked: the kernels run on torch's own threads, so there is one OpenMP runtime in
the process.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

from mtpc.config import cache_directory, cxx_compiler
from mtpc.errors import BackendError

SOURCE_DIR = Path(__file__).parent
_LIBRARY = "libmtpc_cpu.so"
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    # No -ffast-math: vectors are explicit in the sources, and linking with that flag would make
    # GCC 12 flush denormals in the whole process.
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
    # libtorch's stable ABI of 2.11: no symbols of C++ classes that change between versions.
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
)
_ERROR_LINES = 20
_ADVICE = "install g++ >= 12 or clang++ >= 15, set CXX to it, or use backend='eager'"


def build_kernels(
    cache_dir: Path | None = None, report: Callable[[str], None] = lambda line: None
) -> Path:
    """The kernel library for this machine, compiled if the cache does not have it.

    Args:
        cache_dir: where builds are kept, a folder each; default: the cache directory's `kernels`.
        report: receives a line before a compilation starts and when it is done.

    Returns:
        Path of the shared library.

    Raises:
        BackendError: there is no C++ compiler, it failed, or the cache is not writable.
    """
    compiler = _find_compiler()
    root = cache_directory() / "kernels" if cache_dir is None else Path(cache_dir)
    library = root / _fingerprint(compiler) / _LIBRARY
    if not library.exists():
        report(f"compiling the cpu kernels with {compiler} (once, about 30 s)")
        _install(compiler, library)
        report(f"compiled {library}")
    return library


def _find_compiler() -> str:
    name = cxx_compiler()
    found = shutil.which(name)
    if found is None:
        raise BackendError(f"the cpu backend needs a C++ compiler, found no {name!r}: {_ADVICE}")
    return found


def _sources() -> list[Path]:
    return sorted(SOURCE_DIR.glob("*.cpp"))


def _fingerprint(compiler: str) -> str:
    """Hash of all that the library is made from.

    The compiler's predefined macros for -march=native name both its version and the
    instruction set of this machine.
    """
    macros = _run([compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
    parts = [torch.__version__, sys.platform, *_FLAGS, macros]
    parts += [path.read_text() for path in (*_sources(), *sorted(SOURCE_DIR.glob("*.h")))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _install(compiler: str, library: Path) -> None:
    """Compile next to the target and move into place: other processes see all of it or nothing."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            output = Path(scratch) / _LIBRARY
            _run(_command(compiler, output))
            os.replace(output, library)
    except OSError as error:
        raise BackendError(
            f"cannot keep the compiled cpu kernels in {library.parent}: {error}; make it writable"
        ) from error


def _command(compiler: str, output: Path) -> list[str]:
    libraries = Path(torch.__file__).parent / "lib"
    includes = [f"-I{path}" for path in include_paths()]
    sources = [str(path) for path in _sources()]
    link = [f"-L{libraries}", "-ltorch_cpu", "-ltorch", "-lc10"]
    return [compiler, *_FLAGS, *includes, *sources, "-o", str(output), *link]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-_ERROR_LINES:]) or "(it printed nothing)"
        raise BackendError(
            f"the C++ compiler {command[0]} failed with exit status {done.returncode} on the cpu "
            f"kernels; {_ADVICE}. It ended with:\n{tail}"
        )
    return done.stdout

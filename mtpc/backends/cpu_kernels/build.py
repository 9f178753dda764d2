"""Compiles the kernels once per machine, toolchain and version of their sources.

Nothing but a C++ compiler is needed, no build system: sources and one command a library. There are
two: the kernels, on libtorch's stable ABI, and what runs packages (`runner.cpp`), which is not.
OpenMP is not linked: the kernels run on torch's own threads, so there is one OpenMP runtime in
the process.
"""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch

from mtpc.cache.key import Fields, digest
from mtpc.cache.lookup import KEY, find, key_bytes
from mtpc.cache.machine import COMPILER, machine_fields, source_fields, version_fields
from mtpc.cache.store import Entry, EntryStore
from mtpc.config import cache_directory, cxx_compiler
from mtpc.errors import BackendError, CacheError, CacheWriteError, DamagedEntryError

SOURCE_DIR = Path(__file__).parent
LIBRARY, RUNNER = "libmtpc_cpu.so", "libmtpc_runner.so"
_RUNNER_SOURCE = SOURCE_DIR / "runner.cpp"
_RUNNER_FLAGS = ("-std=c++20", "-O1", "-fvisibility=hidden", "-fPIC", "-shared")
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
_DECISIVE = ("source.kernels", "version.torch", "machine.platform", "machine.cpu",
             "machine.instruction_sets", COMPILER)  # fmt: skip
_ERROR_LINES = 20
_ADVICE = "install g++ >= 12 or clang++ >= 15, set CXX to it, or use backend='eager'"


def build_kernels(
    store: EntryStore | None = None,
    report: Callable[[str], None] = lambda line: None,
    frozen: bool = False,
    environment: Fields | None = None,
) -> Entry | Path:
    """The kernel library for this machine, compiled if the cache does not have it.

    Args:
        store: the graph cache; by default the user's.
        report: receives a line before a compilation starts and when it is done.
        frozen: refuse to compile.
        environment: what `environment_fields` found, where that is known already.

    Returns:
        The checked entry that holds the library; or, where the cache cannot be written, the path
        of a library in a temporary directory that lasts as long as the process.

    Raises:
        BackendError: there is no C++ compiler, or it failed.
        CacheError: another user could have written the cache; or, frozen, it has no library.
    """
    store = store or EntryStore(cache_directory())
    fields = kernel_fields(environment)
    entry = _find(store, fields, report)
    if entry is not None:
        return entry
    if frozen:
        raise CacheError(
            f"the cache {store.root} has no cpu kernels for this machine; frozen, so nothing was "
            "built"
        )
    compiler = _find_compiler()
    with ExitStack() as held:
        try:
            held.enter_context(store.lock(digest(fields), report))
            return _find(store, fields, report) or _install(compiler, store, fields, report)
        except CacheWriteError as error:
            report(f"the cpu kernels are not kept: {error}")
            return _compile_for_now(compiler, report)


def kernel_fields(environment: Fields | None = None) -> dict[str, str]:
    """The key of the library: its sources, how and with what they are compiled, for what cpu."""
    if environment is None:
        environment = {**version_fields(), **source_fields(), **machine_fields()}
    decisive = {name: environment[name] for name in _DECISIVE if name in environment}
    flags = " ".join((*_FLAGS, "runner:", *_RUNNER_FLAGS))
    return {"kind": "kernels", "flags": flags, **decisive}


def _find(store: EntryStore, fields: Fields, report: Callable[[str], None]) -> Entry | None:
    try:
        return find(store, fields)
    except DamagedEntryError as error:
        report(f"damaged cpu kernels were not used: {error}")
        return None


def _find_compiler() -> str:
    name = cxx_compiler()
    found = shutil.which(name)
    if found is None:
        raise BackendError(f"the cpu backend needs a C++ compiler, found no {name!r}: {_ADVICE}")
    return found


def _sources() -> list[Path]:
    return sorted(path for path in SOURCE_DIR.glob("*.cpp") if path != _RUNNER_SOURCE)


def _install(
    compiler: str, store: EntryStore, fields: Fields, report: Callable[[str], None]
) -> Entry:
    def fill(directory: Path) -> None:
        _compile(compiler, directory, report)
        (directory / KEY).write_bytes(key_bytes(fields))

    return store.write(digest(fields), fill)


def _compile_for_now(compiler: str, report: Callable[[str], None]) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="mtpc-kernels-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    _compile(compiler, directory, report)
    return directory / LIBRARY


def _compile(compiler: str, directory: Path, report: Callable[[str], None]) -> None:
    report(f"compiling the cpu kernels with {compiler} (once, about 30 s)")
    libraries = ((_FLAGS, _sources(), LIBRARY), (_RUNNER_FLAGS, [_RUNNER_SOURCE], RUNNER))
    commands = [
        _command(compiler, flags, sources, directory / name) for flags, sources, name in libraries
    ]
    with ThreadPoolExecutor(len(commands)) as both:
        for done in [both.submit(_run, command) for command in commands]:
            done.result()
    report(f"compiled the cpu kernels to {directory / LIBRARY}")


def _command(
    compiler: str, flags: Sequence[str], sources: Sequence[Path], output: Path
) -> list[str]:
    libraries = Path(torch.__file__).parent / "lib"
    # Imported here: it takes half a second, and a library that is in the cache needs none of it.
    from torch.utils.cpp_extension import include_paths

    includes = [f"-I{path}" for path in include_paths()]
    link = [f"-L{libraries}", "-ltorch_cpu", "-ltorch", "-lc10"]
    return [compiler, *flags, *includes, *map(str, sources), "-o", str(output), *link]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-_ERROR_LINES:]) or "(it printed nothing)"
        raise BackendError(
            f"the C++ compiler {command[0]} failed with exit status {done.returncode} on the cpu "
            f"kernels; {_ADVICE}. It ended with:\n{tail}"
        )
    return done.stdout

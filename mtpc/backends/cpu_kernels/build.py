"""Compiles the kernels once per level of instructions, toolchain and version of their sources.

Nothing but a C++ compiler is needed, no build system: one command a source, and one that links. A
second library runs packages (`runner.cpp`): it is not on libtorch's stable ABI, as the kernels are.
OpenMP is not linked: the kernels run on torch's own threads, so there is one OpenMP runtime in
the process.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mtpc.backends.cpu_kernels.compilers import RunCompiler, running_compilers
from mtpc.backends.cpu_kernels.generate import SOURCE_DIR, declarations, generate
from mtpc.backends.cpu_kernels.levels import NATIVE, Level, chosen_level
from mtpc.backends.cpu_kernels.shipped import find_shipped, keep_shipped
from mtpc.environment import cache_directory, cxx_compiler
from mtpc.errors import BackendError, CacheError, CacheWriteError, DamagedEntryError
from mtpc.layout.progress import Detail, Report, silent
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.key import Fields, digest, hash_of
from mtpc.store.lookup import KERNELS, KEY, find, key_bytes
from mtpc.store.machine import COMPILER, cpu_flags, machine_fields, torch_field
from mtpc.store.scratch import Scratch
from mtpc.store.sources import source_fields

LIBRARY, RUNNER = "libmtpc_cpu.so", "libmtpc_runner.so"
_RUNNER_SOURCE, _PRELUDE = SOURCE_DIR / "runner.cpp", SOURCE_DIR / "prelude.h"
_RUNNER_FLAGS = ("-std=c++20", "-O1", "-fvisibility=hidden", "-fPIC")
_FLAGS = (
    "-std=c++20",
    "-O3",
    # No -ffast-math: vectors are explicit in the sources, and linking with that flag would make
    # GCC 12 flush denormals in the whole process.
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    # libtorch's stable ABI of 2.11: no symbols of C++ classes that change between versions.
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
)
_DECISIVE = ("source.kernels", "version.torch", "machine.platform", COMPILER)
_DECISIVE_IF_NATIVE = ("machine.cpu", "machine.instruction_sets")
LONGEST = ("attention", "grouped_products", "experts", "chain", "operators", "grouped_linear")
"""Sources that take longest to compile, as measured. They begin, so that no core is left alone with
one of them."""
_ERROR_LINES = 20
_MOST_COMPILERS = 8
"""The most compilers at once; each takes half a gigabyte."""
_Run = Callable[[list[str]], None]
"""Runs one compiler."""
_ADVICE = "install g++ >= 12 or clang++ >= 15, set CXX to it, or use backend='eager'"


def build_kernels(
    store: EntryStore | None = None, report: Report = silent, frozen: bool = False
) -> Entry | Path:
    """The kernel library for this machine's level, compiled if the cache does not have it.

    Kernels that came with this installation are taken before any are compiled.

    Args:
        store: the graph cache; by default the user's.
        report: receives a line before a compilation starts and when it is done, and the share of
            the sources that are compiled.
        frozen: refuse to compile.

    Returns:
        The checked entry that holds the library; or, where the cache cannot be written, the path
        of a library of the installation, or in a temporary directory that lasts as long as the
        process.

    Raises:
        BackendError: there is no C++ compiler, or it failed; or `MTPC_CPU_LEVEL` names a level
            that does not run here.
        CacheError: another user could have written the cache; or, frozen, it has no library, or a
            damaged one.
    """
    store = store or EntryStore(cache_directory())
    level = chosen_level(cpu_flags())
    fields = kernel_fields(level)
    entry = find(store, fields) if frozen else _find(store, fields, report)
    if entry is not None:
        return entry
    ready = find_shipped(fields)
    if ready is not None:
        return keep_shipped(ready, store, report) or ready / LIBRARY
    if frozen:
        raise CacheError(
            f"the cache {store.root} has no cpu kernels of level {level.name} for this machine; "
            "frozen, so nothing was built"
        )
    compiler = _find_compiler()
    with ExitStack() as held:
        try:
            held.enter_context(store.lock(digest(fields), report))
            found = _find(store, fields, report)
            return found or _Build(compiler, level, report).install(store, fields)
        except CacheWriteError as error:
            report(f"the cpu kernels are not kept: {error}")
            return _Build(compiler, level, report).for_now()


def kernel_fields(level: Level) -> dict[str, str]:
    """The key of a library: its sources, the generated ones among them, how and with what they are
    compiled, for what level."""
    environment = {**torch_field(), **source_fields(), **machine_fields()}
    decisive = {name: environment[name] for name in _DECISIVE if name in environment}
    if level == NATIVE:
        decisive |= {name: environment[name] for name in _DECISIVE_IF_NATIVE}
    flags = " ".join((*_FLAGS, *level.flags, "runner:", *_RUNNER_FLAGS))
    declared = hash_of([declarations().encode()])
    own = {"flags": flags, "source.declared": declared, "machine.level": level.name}
    return {"kind": KERNELS, **own, **decisive}


def _find(store: EntryStore, fields: Fields, report: Report) -> Entry | None:
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


def compile_for(levels: Iterable[Level], into: Path, report: Report) -> None:
    """Compile a library for each level as a wheel ships it, into a folder of the level's name.

    Raises:
        BackendError: there is no C++ compiler, or it failed.
    """
    compiler = _find_compiler()
    for level in levels:
        (into / level.name).mkdir(parents=True)
        _Build(compiler, level, report).fill(into / level.name, kernel_fields(level))


@dataclass(frozen=True)
class _Build:
    """One compilation of all sources."""

    compiler: str
    level: Level
    report: Report

    def install(self, store: EntryStore, fields: Fields) -> Entry:
        """Into the cache."""
        return store.write(digest(fields), lambda into: self.fill(into, fields))

    def fill(self, directory: Path, fields: Fields) -> None:
        """All files of an entry, into a directory."""
        self._compile(directory)
        (directory / KEY).write_bytes(key_bytes(fields))

    def for_now(self) -> Path:
        """Into a directory that lasts as long as the process."""
        library = Path(tempfile.mkdtemp(prefix="mtpc-kernels-")) / LIBRARY
        atexit.register(shutil.rmtree, library.parent, ignore_errors=True)
        self._compile(library.parent)
        return library

    def _compile(self, into: Path) -> None:
        """Sources side by side, one a core; then the libraries of them."""
        what = (
            f"compiling the cpu kernels for {self.level.name} with {self.compiler} (once, about a "
            "minute of two cores)"
        )
        self.report(what)
        with (
            Scratch("objects") as scratch,
            ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_COMPILERS)) as pool,
            running_compilers() as run_compiler,
        ):
            objects, run = Path(scratch), partial(_run, run_compiler)
            kernels = sorted(path for path in SOURCE_DIR.glob("*.cpp") if path != _RUNNER_SOURCE)
            for name, text in generate().items():
                (objects / name).write_text(text)
            sources = [*kernels, objects / "operators.cpp"]
            sources.sort(key=lambda path: [*LONGEST, path.stem].index(path.stem))
            flags = (*_FLAGS, *self.level.flags)
            # The runner takes longest and needs no precompiled header, so it begins.
            runner = pool.submit(self._object, _RUNNER_SOURCE, _RUNNER_FLAGS, objects, run)
            try:
                flags = (*flags, *self._precompiled(flags, objects, run))
                others = [pool.submit(self._object, s, flags, objects, run) for s in sources]
                jobs = (runner, *others)
                for done, job in enumerate(as_completed(jobs), 1):
                    job.result()
                    self.report(what, done / len(jobs))
            finally:  # An interrupt waits for no compiler: the block ends them.
                pool.shutdown(wait=False, cancel_futures=True)
            self._link([job.result() for job in others], into / LIBRARY, run)
            self._link([runner.result()], into / RUNNER, run)
        self.report(Detail(f"compiled the cpu kernels to {into / LIBRARY}"))

    def _precompiled(self, flags: tuple[str, ...], into: Path, run: _Run) -> tuple[str, ...]:
        """The headers that all kernels share, compiled; returns the flags that include them.

        Reading torch's headers is half the work of most kernels. Both compilers find the compiled
        file by its name, beside the header.
        """
        header = Path(shutil.copy(_PRELUDE, into))
        self._compile_one(header, (*flags, "-x", "c++-header"), Path(f"{header}.gch"), run)
        return "-include", str(header)

    def _object(self, source: Path, flags: tuple[str, ...], into: Path, run: _Run) -> Path:
        output = into / f"{source.stem}.o"
        self._compile_one(source, (*flags, f"-I{into}", "-c"), output, run)
        return output

    def _compile_one(self, source: Path, flags: tuple[str, ...], output: Path, run: _Run) -> None:
        # Imported here: it takes half a second, and a library in the cache needs none of it.
        from torch.utils.cpp_extension import include_paths

        includes = [f"-I{path}" for path in (SOURCE_DIR, *include_paths())]
        run([self.compiler, *flags, *includes, str(source), "-o", str(output)])

    def _link(self, objects: list[Path], library: Path, run: _Run) -> None:
        libraries = Path(torch.__file__).parent / "lib"
        # A kernel that is not defined as it is declared is an error here, not when it is loaded.
        checks = "-Wl,--no-undefined"
        link = ("-shared", checks, f"-L{libraries}", "-ltorch_cpu", "-ltorch", "-lc10")
        run([self.compiler, *map(str, objects), "-o", str(library), *link])


def _run(run_compiler: RunCompiler, command: list[str]) -> None:
    done = run_compiler(command)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-_ERROR_LINES:]) or "(it printed nothing)"
        raise BackendError(
            f"the C++ compiler {command[0]} failed with exit status {done.returncode} on the cpu "
            f"kernels; {_ADVICE}. It ended with:\n{tail}"
        )

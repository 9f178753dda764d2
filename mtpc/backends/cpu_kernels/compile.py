"""Compiles the kernels, where neither the cache nor the installation has them.

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mtpc.backends.cpu_kernels.build import (
    FLAGS,
    LIBRARY,
    RUNNER,
    RUNNER_FLAGS,
    kernel_fields,
)
from mtpc.backends.cpu_kernels.compilers import RunCompiler, running_compilers
from mtpc.backends.cpu_kernels.generate import SOURCE_DIR, generate
from mtpc.backends.cpu_kernels.levels import Level
from mtpc.environment import cxx_compiler
from mtpc.errors import BackendError
from mtpc.layout.progress import Detail, Report
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.key import Fields, digest
from mtpc.store.lookup import KEY, key_bytes
from mtpc.store.scratch import Scratch

_RUNNER_SOURCE, _PRELUDE = SOURCE_DIR / "runner.cpp", SOURCE_DIR / "prelude.h"
LONGEST = ("attention", "grouped_products", "experts", "chain", "operators", "grouped_linear")
"""Sources that take longest to compile, as measured. They begin, so that no core is left alone with
one of them."""
_ERROR_LINES = 20
_MOST_COMPILERS = 8
"""The most compilers at once; each takes half a gigabyte."""
_Run = Callable[[list[str]], None]
"""Runs one compiler."""
_ADVICE = "install g++ >= 12 or clang++ >= 15, set CXX to it, or use backend='eager'"


def find_compiler() -> str:
    """The path of the C++ compiler.

    Raises:
        BackendError: it is not there.
    """
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
    compiler = find_compiler()
    for level in levels:
        (into / level.name).mkdir(parents=True)
        Build(compiler, level, report).fill(into / level.name, kernel_fields(level))


@dataclass(frozen=True)
class Build:
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
            flags = (*FLAGS, *self.level.flags)
            # The runner takes longest and needs no precompiled header, so it begins.
            runner = pool.submit(self._object, _RUNNER_SOURCE, RUNNER_FLAGS, objects, run)
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

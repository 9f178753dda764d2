"""Finds the kernels for this machine: one library for each level of instructions, toolchain and
version of their sources. `mtpc.backends.cpu_kernels.compile` makes what is found nowhere.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from mtpc.backends.cpu_kernels.generate import declarations
from mtpc.backends.cpu_kernels.levels import NATIVE, Level, chosen_level
from mtpc.environment import cache_directory
from mtpc.errors import CacheError, CacheWriteError, DamagedEntryError
from mtpc.layout.progress import Report, silent
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.key import Fields, digest, hash_of
from mtpc.store.lookup import KERNELS, find
from mtpc.store.machine import COMPILER, cpu_flags, machine_fields, torch_field
from mtpc.store.sources import kernels_field

LIBRARY, RUNNER = "libmtpc_cpu.so", "libmtpc_runner.so"
RUNNER_FLAGS = ("-std=c++20", "-O1", "-fvisibility=hidden", "-fPIC")
FLAGS = (
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
    from mtpc.backends.cpu_kernels.shipped import find_shipped, keep_shipped  # Once a machine.

    ready = find_shipped(fields)
    if ready is not None:
        return keep_shipped(ready, store, report) or ready / LIBRARY
    if frozen:
        raise CacheError(
            f"the cache {store.root} has no cpu kernels of level {level.name} for this machine; "
            "frozen, so nothing was built"
        )
    from mtpc.backends.cpu_kernels.compile import Build, find_compiler  # Once a machine.

    compiler = find_compiler()
    with ExitStack() as held:
        try:
            held.enter_context(store.lock(digest(fields), report))
            found = _find(store, fields, report)
            return found or Build(compiler, level, report).install(store, fields)
        except CacheWriteError as error:
            report(f"the cpu kernels are not kept: {error}")
            return Build(compiler, level, report).for_now()


def kernel_fields(level: Level) -> dict[str, str]:
    """The key of a library: its sources, the generated ones among them, how and with what they are
    compiled, for what level."""
    # Read now, as the compiler does: the sources may have changed since this process began.
    environment = {**torch_field(), **kernels_field(), **machine_fields()}
    decisive = {name: environment[name] for name in _DECISIVE if name in environment}
    if level == NATIVE:
        decisive |= {name: environment[name] for name in _DECISIVE_IF_NATIVE}
    flags = " ".join((*FLAGS, *level.flags, "runner:", *RUNNER_FLAGS))
    declared = hash_of([declarations().encode()])
    own = {"flags": flags, "source.declared": declared, "machine.level": level.name}
    return {"kind": KERNELS, **own, **decisive}


def _find(store: EntryStore, fields: Fields, report: Report) -> Entry | None:
    try:
        return find(store, fields)
    except DamagedEntryError as error:
        report(f"damaged cpu kernels were not used: {error}")
        return None

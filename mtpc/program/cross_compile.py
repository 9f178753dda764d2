"""Building for a GPU that is not here: the kernels of a checkpoint's steps, as code objects.

checkpoint -> StepCompiler, as far as legalise-gpu -> launches of each step, in every configuration
that the device may choose -> one cache entry for each distinct kernel and target. Inductor compiles
the operations between mtpc's kernels on the device's own machine, because it asks the device for
its properties.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtpc.backends.cuda import CrossBackend
from mtpc.backends.targets import Target
from mtpc.backends.triton_kernels.configs import all_configured
from mtpc.backends.triton_kernels.crosscompile import Compiled, cross_compile
from mtpc.backends.triton_kernels.launch import Launch
from mtpc.backends.triton_kernels.plans import step_launches
from mtpc.errors import BackendError
from mtpc.layout import Layout, StepKey, largest_first
from mtpc.layout.progress import Listener, Progress
from mtpc.models.load import load_planned
from mtpc.plan import Plan
from mtpc.program.compiler import StepCompiler
from mtpc.store.entries import EntryStore


@dataclass(frozen=True)
class CrossReport:
    """What `build_kernels` leaves in the cache.

    Attributes:
        root: the cache directory.
        kernels: each distinct kernel and configuration per target.
        launches: number of launches of mtpc's kernels in each step.
        notes: ops that no kernel takes, and configurations that a target refuses, with the reasons.
        elapsed_s: seconds it took.
    """

    root: Path
    kernels: tuple[Compiled, ...]
    launches: dict[StepKey, int]
    notes: Counter[str]
    elapsed_s: float


def build_kernels(
    directory: Path,
    plans: Sequence[Plan],
    targets: Sequence[Target],
    listener: Listener = lambda progress: None,
) -> CrossReport:
    """Compile the Triton kernels of a checkpoint's steps for devices that need not be here.

    Args:
        directory: the checkpoint.
        plans: of programs for backend cuda, for different numbers of drafts, otherwise alike.
        targets: devices.
        listener: called with progress.

    Raises:
        BackendError: there is no Triton, or it refuses a kernel.
        CacheWriteError: the cache cannot be written.
        MtpcError: as `mtpc.compile`.
    """
    start, (first, *_) = time.perf_counter(), plans
    store, backend = EntryStore(first.cache_dir), CrossBackend(first.batch_invariant)
    store.prepare()
    kernels: dict[tuple[str, str], Compiled] = {}
    counts: dict[StepKey, int] = {}
    for plan in plans:
        loaded = load_planned(directory, plan, headers_only=True)
        compiler = StepCompiler(loaded, plan, backend, new_buffer=Layout.reserve)
        compiler.weights.defers = True
        for done, key in enumerate(largest_first(compiler.keys)):
            launches = step_launches(compiler.rewritten(key))
            counts[key] = len(launches)
            for target in targets:
                said = (f"compile for {target.name}", key, done, len(compiler.keys))
                listener(Progress(*said, time.perf_counter() - start))
                for made in _for_target(launches, target, store, backend.notes):
                    kernels.setdefault((target.name, made.entry.digest), made)
    elapsed = time.perf_counter() - start
    return CrossReport(store.root, tuple(kernels.values()), counts, backend.notes, elapsed)


def _for_target(
    launches: list[Launch], target: Target, store: EntryStore, notes: Counter[str]
) -> Iterator[Compiled]:
    """Every launch in every configuration; a target may refuse any but the default."""
    for launch, is_default in all_configured(launches):
        try:
            yield from cross_compile([launch], target, store)
        except BackendError as error:
            if is_default:
                raise
            notes[f"left out: {error}"] += 1

"""The warm start: a checkpoint and cached steps become a program, with nothing traced or compiled.

Imports neither transformers nor Inductor nor sympy: what remains is torch itself, checking what
is about to run, and mapping the weights into memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mtpc.backends.cpu_kernels import build_kernels, fill_packed, load_library
from mtpc.cache.binding import StepBinder, WeightSource
from mtpc.cache.steps import CachedStep, StepCache, program_pin
from mtpc.cache.store import Entry
from mtpc.capture.graph import WeightTable
from mtpc.capture.program import Program
from mtpc.checkpoint import Checkpoint, check_repeated
from mtpc.config import CompileOptions
from mtpc.errors import CacheError
from mtpc.layout import StepKey, step_keys
from mtpc.progress import Listener, Progress
from mtpc.serving import ServedModel


@dataclass(frozen=True)
class Restored:
    """A program from the cache, what it serves, and the options it was compiled with."""

    served: ServedModel
    options: CompileOptions
    program: Program


def restore(
    checkpoint: Checkpoint, options: CompileOptions, cache: StepCache, listener: Listener
) -> Restored | None:
    """The program of a checkpoint, if the cache has all of it.

    Args:
        checkpoint: whose weights it runs on.
        options: as asked for.
        cache: of this checkpoint and these options.
        listener: hears of each step.

    Returns:
        None where something is missing, and where only transformers can load the weights.

    Raises:
        CacheError: another user could have written the cache; or it is frozen, and incomplete or
            not what `require_sha256` names.
        CheckpointError: weights hold NaN or infinity, or an MTP layer has a head of its own.
    """
    start = time.perf_counter()
    keys = step_keys(options)
    found = cache.find_all(keys)
    if found is None:
        return None
    records = [step.record for step in found.values()]
    unexplained = sorted({name for record in records for name in record.unexplained})
    if unexplained:
        cache.note(
            f"loading through transformers, which alone can read {len(unexplained)} weight(s) of "
            f"{checkpoint.directory}, {unexplained[0]} first"
        )
        return None
    kernels = find_kernels(cache)
    if kernels is None:
        return None
    check_pin(options, kernels, found)
    load_library(kernels)

    layout = records[0].layout()
    shared = {name: layout.allocate(name) for name, spec in layout.items() if spec.shared}
    source = WeightSource(checkpoint, fill_packed)
    binder = StepBinder(shared, WeightTable({}), source)
    steps = {}
    for done, (key, step) in enumerate(found.items()):
        elapsed = time.perf_counter() - start
        listener(Progress("load", key, done, len(found), elapsed))
        steps[key] = binder.bind(step)
    source.check()
    for name, weight in {n: w for record in records for n, w in record.repeats.items()}.items():
        record = next(record for record in records if weight in record.stored)
        check_repeated(checkpoint, name, source.weight(weight, record))
    served = ServedModel(
        str(checkpoint.directory),
        records[0].vocab_size,
        checkpoint.stop_ids(),
        checkpoint.directory,
    )
    settled = replace(options, max_len=records[0].max_len)
    return Restored(served, settled, Program(steps, shared))


def find_kernels(cache: StepCache) -> Entry | Path | None:
    """The kernel library that goes with the cache's steps, not compiled for the purpose."""
    try:
        return build_kernels(cache.store, frozen=True, environment=cache.program)
    except CacheError:
        if cache.frozen:
            raise
        return None


def check_pin(
    options: CompileOptions, kernels: Entry | Path, steps: Mapping[StepKey, CachedStep]
) -> None:
    """Refuse entries other than those that were pinned, before their code is opened.

    Raises:
        CacheError: they differ from `require_sha256`.
    """
    wanted = options.require_sha256
    if wanted is None:
        return
    found = pin_of(kernels, steps)
    if found != wanted:
        raise CacheError(
            f"require_sha256 is {wanted}, the cache holds {found}: it was built again or by "
            "somebody else; `mtpc build` prints the digest of what it built"
        )


def pin_of(kernels: Entry | Path, steps: Mapping[StepKey, CachedStep]) -> str:
    """The digest of a program's entries, its kernels included."""
    entries = {str(key): step.entry for key, step in steps.items() if step.entry}
    if isinstance(kernels, Entry):
        entries["kernels"] = kernels
    return program_pin(entries)

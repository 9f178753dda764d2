"""The warm start: a checkpoint and cached steps become a program, with nothing traced or compiled.

Imports neither transformers nor Inductor nor sympy: what remains is torch itself, checking what
is about to run, and mapping the weights into memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mtpc.backends.cpu_kernels import build_kernels, fill_packed, load_library
from mtpc.capture.graph import WeightTable
from mtpc.config import CompileOptions
from mtpc.errors import CacheError
from mtpc.layout import StepKey, step_keys
from mtpc.layout.progress import Listener, Progress
from mtpc.program.binding import StepBinder, WeightSource
from mtpc.program.program import Program
from mtpc.program.step_cache import CachedStep, StepCache, program_pin
from mtpc.program.step_record import StepRecord
from mtpc.store.entries import Entry
from mtpc.weights.checkpoint import Checkpoint, check_repeated
from mtpc.weights.served_model import ServedModel


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
    opened = open_weights(
        checkpoint, cache, records, lambda kernels: check_pin(options, kernels, found)
    )
    if opened is None:
        return None

    layout = records[0].layout()
    shared = {name: layout.allocate(name) for name, spec in layout.items() if spec.shared}
    binder = StepBinder(shared, WeightTable({}), opened.source)
    steps = {}
    for done, (key, step) in enumerate(found.items()):
        elapsed = time.perf_counter() - start
        listener(Progress("load", key, done, len(found), elapsed))
        steps[key] = binder.bind(step)
    opened.check()
    return Restored(opened.served(), opened.settled(options), Program(steps, shared))


@dataclass(frozen=True)
class OpenedWeights:
    """A checkpoint from which the weights of cached steps can be made.

    Attributes:
        checkpoint: where they are stored.
        source: makes them.
        records: of the steps.
    """

    checkpoint: Checkpoint
    source: WeightSource
    records: Sequence[StepRecord]

    def served(self) -> ServedModel:
        """What an engine must know of the model."""
        source = self.checkpoint
        vocab_size = self.records[0].vocab_size
        return ServedModel(str(source.directory), vocab_size, source.stop_ids(), source.directory)

    def settled(self, options: CompileOptions) -> CompileOptions:
        """Options as the steps were compiled with them, `max_len` settled."""
        return replace(options, max_len=self.records[0].max_len)

    def check(self) -> None:
        """Refuse what was read so far if it is no use; after the steps are bound.

        Raises:
            CheckpointError: weights hold NaN or infinity, or an MTP layer has a head of its own.
        """
        self.source.check()
        repeats = {n: w for record in self.records for n, w in record.repeats.items()}
        for name, weight in repeats.items():
            record = next(record for record in self.records if weight in record.stored)
            check_repeated(self.checkpoint, name, self.source.weight(weight, record))


def open_weights(
    checkpoint: Checkpoint,
    cache: StepCache,
    records: Sequence[StepRecord],
    admit: Callable[[Entry | Path], None] = lambda kernels: None,
) -> OpenedWeights | None:
    """Load the kernels of cached steps, and open the weights they run on.

    Args:
        checkpoint: whose weights.
        cache: of this checkpoint.
        records: of the steps.
        admit: called with the kernels before any code is loaded; may refuse by raising.

    Returns:
        None where only transformers can load the weights, and where the kernels are missing.
    """
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
    admit(kernels)
    load_library(kernels)
    return OpenedWeights(checkpoint, WeightSource(checkpoint, fill_packed), records)


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

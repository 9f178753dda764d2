"""The warm start: find every step in the graph cache and open its weights; nothing is compiled.

This module imports no transformers or sympy. What remains is torch itself, checks of
what is about to run, and mapping the weights into memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from mtpc.backends.cpu_kernels import build_kernels, fill_packed, load_library
from mtpc.capture.graph import WeightTable
from mtpc.config import CompileOptions
from mtpc.errors import CacheError
from mtpc.layout import Graphs, step_name
from mtpc.program.binding import BuiltSteps, WeightSource
from mtpc.program.step_cache import StepCache, Steps
from mtpc.store.entries import Entry
from mtpc.weights.checkpoint import Checkpoint


def from_files(checkpoint: Checkpoint, steps: Steps) -> BuiltSteps:
    """Built steps, to be bound to weights of a checkpoint's files."""
    return BuiltSteps(steps, WeightTable({}), WeightSource(checkpoint, fill_packed))


def restore(
    checkpoint: Checkpoint,
    options: CompileOptions,
    cache: StepCache,
    graphs: Graphs,
    parts: Sequence[StepCache | None] = (None,),
) -> BuiltSteps | None:
    """Steps of a checkpoint, if the cache has them all.

    Args:
        checkpoint: whose weights they run on.
        options: as asked for.
        cache: of this checkpoint and these options.
        graphs: which steps.
        parts: the caches of all ranks in order, with None for `cache`; `require_sha256` is for all.

    Returns:
        None where a step or the kernels are missing, and where only transformers can load the
        weights.

    Raises:
        CacheError: another user could have written the cache; or it is frozen, and incomplete or
            not what `require_sha256` names.
    """
    steps = cache.find_all(graphs)
    if steps is None:
        return None
    unexplained = sorted({n for step in steps.values() for n in step.record.unexplained})
    if unexplained:
        cache.note(
            f"loading through transformers, which alone can read {len(unexplained)} weight(s) of "
            f"{checkpoint.directory}, {unexplained[0]} first"
        )
        return None
    try:
        kernels = build_kernels(cache.store, frozen=True)
    except CacheError:
        if cache.frozen:
            raise
        return None
    wanted, every = options.require_sha256, [steps]
    if wanted is not None:
        every = [steps if part is None else part.find_all(graphs) or {} for part in parts]
    # Before any code of the entries is opened.
    if wanted is not None and (found := pin_of(kernels, *every)) != wanted:
        raise CacheError(
            f"require_sha256 is {wanted}, the cache holds {found}: it was built again or by "
            "somebody else; `mtpc build` prints the digest of what it built"
        )
    load_library(kernels)
    return from_files(checkpoint, steps)


def pin_of(kernels: Entry | Path, *parts: Steps) -> str:
    """One SHA-256 over a program's entries by the names of what they are for, kernels included.

    Args:
        kernels: that all steps call.
        parts: the steps, or those of each rank in order.
    """
    entries = {
        step_name(*key) + (f", rank {rank}" if len(parts) > 1 else ""): step.entry
        for rank, steps in enumerate(parts)
        for key, step in steps.items()
        if step.entry
    }
    if isinstance(kernels, Entry):
        entries["kernels"] = kernels
    lines = [f"{name} {entry.pin}\n" for name, entry in sorted(entries.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()

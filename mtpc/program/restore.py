"""The warm start: find every step in the graph cache and open its weights; nothing is compiled.

This module imports no transformers or sympy. What remains is torch itself, checks of
what is about to run, and mapping the weights into memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtpc.backends.cpu_kernels import build_kernels, fill_packed, load_library
from mtpc.config import CompileOptions
from mtpc.errors import CacheError
from mtpc.layout import Graphs, step_name
from mtpc.program.binding import WeightSource
from mtpc.program.step_cache import CachedStep, StepCache, Steps
from mtpc.store.entries import Entry
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.served_model import ServedModel


@dataclass(frozen=True)
class Restored:
    """Cached steps of a checkpoint, and the source of their weights.

    Attributes:
        checkpoint: where the weights are stored.
        steps: the entries, largest first.
        source: makes the weights.
    """

    checkpoint: Checkpoint
    steps: Steps
    source: WeightSource

    def served(self) -> ServedModel:
        """The model as the engine's callers see it."""
        directory, vocab_size = self.checkpoint.directory, self._first.record.vocab_size
        return ServedModel(str(directory), vocab_size, self.checkpoint.stop_ids(), directory)

    def settled(self, options: CompileOptions) -> CompileOptions:
        """Options for this model, `max_len` settled."""
        return options.for_model(self._first.record.max_positions)

    @property
    def _first(self) -> CachedStep:
        return next(iter(self.steps.values()))


def restore(
    checkpoint: Checkpoint,
    options: CompileOptions,
    cache: StepCache,
    graphs: Graphs,
    parts: Sequence[StepCache | None] = (None,),
) -> Restored | None:
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
    return Restored(checkpoint, steps, WeightSource(checkpoint, fill_packed))


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

"""Opening the cache for a model and options of `mtpc.compile`, and finding every step in it.

This module imports no transformers or sympy. What remains of a warm start is torch itself, checks
of what is about to run, and mapping the weights into memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mtpc.backends import PACKAGING, first_choice
from mtpc.backends.cpu_kernels import build_kernels, fill_packed, load_library
from mtpc.errors import CacheError, OptionError
from mtpc.layout import Graphs, step_name
from mtpc.plan import Plan
from mtpc.program.binding import BuiltSteps
from mtpc.program.model_key import checkpoint_fields, object_fields
from mtpc.program.step_cache import StepCache, Steps, program_fields
from mtpc.store.entries import Entry, EntryStore
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.paired_checkpoint import checkpoint_of
from mtpc.weights.stored import StoredWeights
from mtpc.weights.weights import Weights

if TYPE_CHECKING:
    from mtpc.program.ranks import Ranks


def kernel_store(plan: Plan, cache: StepCache | None) -> EntryStore | None:
    """The store for a backend's kernels, or None.

    The cuda backend traces its steps at every start, and keeps what it compiles in the cache.
    """
    if cache is not None:
        return cache.store
    row = first_choice(plan.backend)
    return EntryStore(plan.cache_dir) if row and row.has_kernels and plan.use_cache else None


def open_cache(
    source: Any,
    plan: Plan,
    tell: Callable[[str], None],
    ranks: Ranks | None = None,
) -> StepCache | None:
    """The cached steps of one model and its options; None if they are not cached.

    Args:
        source: a `Checkpoint` or a transformers model object.
        plan: of the program.
        tell: is called with a line when the cache waits, or finds a damaged entry.
        ranks: those that share the model; each has steps of its own.

    Raises:
        OptionError: the plan is `frozen`, but the backend traces its steps at every start,
            or the model object has hooks or replaced forwards.
    """
    row = first_choice(plan.backend)
    if not plan.use_cache or row is None or not row.makes_files:
        if plan.frozen:
            raise OptionError(
                f"frozen with backend {plan.backend!r}, which traces its steps at every start; "
                f"use backend={PACKAGING!r}"
            )
        return None
    model = _model_fields(source, plan)
    if model is None:
        if plan.frozen:
            raise OptionError(
                "frozen with a model object that has hooks or replaced forwards, which the cache "
                "cannot identify; pass the checkpoint's directory"
            )
        tell("the model object has hooks or replaced forwards, so its steps are not cached")
        return None
    part = "" if ranks is None else ranks.part
    fields = program_fields(PACKAGING, model, plan, part)
    return StepCache(EntryStore(plan.cache_dir), fields, plan, tell)


def _model_fields(source: Any, plan: Plan) -> dict[str, str] | None:
    if isinstance(source, Checkpoint):
        return checkpoint_fields(source)
    if not isinstance(source, torch.nn.Module) or not hasattr(source, "name_or_path"):
        return {}  # It is no transformers model; loading it raises the error.
    return object_fields(source, checkpoint_of(source, False, plan.drafter))


def from_files(checkpoint: Checkpoint, steps: Steps) -> BuiltSteps:
    """Built steps, to be bound to weights of a checkpoint's files."""
    # Weights that were dequantised for tracing are gone, and notes must not count them.
    checkpoint.dequantised.clear()
    return BuiltSteps(steps, Weights(stored=StoredWeights(checkpoint, {}, fill=fill_packed)))


def restore(
    checkpoint: Checkpoint,
    cache: StepCache,
    graphs: Graphs,
    parts: Sequence[StepCache | None] = (None,),
) -> BuiltSteps | None:
    """Steps of a checkpoint, if the cache has them all.

    Args:
        checkpoint: whose weights they run on.
        cache: of this checkpoint.
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
        if cache.plan.frozen:
            raise
        return None
    wanted, every = cache.plan.require_sha256, [steps]
    if wanted:
        every = [steps if part is None else part.find_all(graphs) or {} for part in parts]
    # Before any code of the entries is opened.
    if wanted and (found := pin_of(kernels, *every)) != wanted:
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

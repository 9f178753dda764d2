"""From what `mtpc.compile` is given to the cache entries that belong to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mtpc.config import CompileOptions, cache_directory
from mtpc.errors import OptionError
from mtpc.program.model_key import checkpoint_fields, object_fields
from mtpc.program.step_cache import StepCache, program_fields
from mtpc.store.entries import EntryStore
from mtpc.weights.checkpoint import Checkpoint, checkpoint_of

AHEAD_OF_TIME = ("auto", "cpu")
"""Values of the option `backend` whose steps are files."""


def open_store(options: CompileOptions) -> EntryStore:
    """The cache directory of these options."""
    return EntryStore(options.cache_dir or cache_directory())


def kernel_store(options: CompileOptions, cache: StepCache | None) -> EntryStore | None:
    """Where a backend keeps kernels, or finds those that were built elsewhere; None: nowhere.

    A backend whose steps are not cached (cuda) may still have its kernels from a cache.
    """
    if cache is not None:
        return cache.store
    return open_store(options) if options.backend == "cuda" and options.use_cache else None


def open_cache(
    source: Any, options: CompileOptions, tell: Callable[[str], None]
) -> StepCache | None:
    """The cache's view of one model, or None where nothing is to be cached.

    Args:
        source: a `Checkpoint` or a transformers model object.
        options: as asked for.
        tell: hears of waiting, and of damaged entries.

    Raises:
        OptionError: `frozen` for a backend that compiles nothing ahead of time, or for a model
            object whose code was changed in place.
    """
    frozen = options.frozen or options.require_sha256 is not None
    if not options.use_cache or options.backend not in AHEAD_OF_TIME:
        if frozen:
            raise OptionError(
                f"frozen with backend {options.backend!r}, which has no cache; use backend='cpu'"
            )
        return None
    model = _model_fields(source)
    if model is None:
        if frozen:
            raise OptionError(
                "frozen, but the model object has hooks or forwards replaced on its modules, so "
                "no cached step can be known to be its own; pass the checkpoint's directory"
            )
        tell("the model object has hooks or replaced forwards: its steps are not cached")
        return None
    return StepCache(open_store(options), program_fields(model, options), frozen, tell)


def _model_fields(source: Any) -> dict[str, str] | None:
    if isinstance(source, Checkpoint):
        return checkpoint_fields(source)
    if not isinstance(source, torch.nn.Module) or not hasattr(source, "name_or_path"):
        return {}  # No transformers model at all: loading it says so.
    return object_fields(source, checkpoint_of(source))

"""Opening the cache for a model and options of `mtpc.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mtpc.backends import PACKAGING, first_choice
from mtpc.config import CompileOptions, cache_directory
from mtpc.errors import OptionError
from mtpc.program.model_key import checkpoint_fields, object_fields
from mtpc.program.ranks import Ranks
from mtpc.program.step_cache import StepCache, program_fields
from mtpc.store.entries import EntryStore
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.paired_checkpoint import checkpoint_of


def open_store(options: CompileOptions) -> EntryStore:
    """The store in the cache directory of the options."""
    return EntryStore(options.cache_dir or cache_directory())


def kernel_store(options: CompileOptions, cache: StepCache | None) -> EntryStore | None:
    """The store for a backend's kernels, or None.

    The cuda backend traces its steps at every start, and keeps what it compiles in the cache.
    """
    if cache is not None:
        return cache.store
    row = first_choice(options.backend)
    return open_store(options) if row and row.has_kernels and options.use_cache else None


def open_cache(
    source: Any,
    options: CompileOptions,
    tell: Callable[[str], None],
    ranks: Ranks | None = None,
) -> StepCache | None:
    """The cached steps of one model and its options; None if they are not cached.

    Args:
        source: a `Checkpoint` or a transformers model object.
        options: options of `mtpc.compile`.
        tell: is called with a line when the cache waits, or finds a damaged entry.
        ranks: those that share the model; each has steps of its own.

    Raises:
        OptionError: the options ask for `frozen`, but the backend traces its steps at every start,
            or the model object has hooks or replaced forwards.
    """
    frozen = options.frozen or options.require_sha256 is not None
    row = first_choice(options.backend)
    if not options.use_cache or row is None or not row.has_packages:
        if frozen:
            raise OptionError(
                f"frozen with backend {options.backend!r}, which traces its steps at every start; "
                f"use backend={PACKAGING!r}"
            )
        return None
    model = _model_fields(source, options)
    if model is None:
        if frozen:
            raise OptionError(
                "frozen with a model object that has hooks or replaced forwards, which the cache "
                "cannot identify; pass the checkpoint's directory"
            )
        tell("the model object has hooks or replaced forwards, so its steps are not cached")
        return None
    part = "" if ranks is None else ranks.part
    fields = program_fields(PACKAGING, model, options, part)
    return StepCache(open_store(options), fields, options, frozen, tell)


def _model_fields(source: Any, options: CompileOptions) -> dict[str, str] | None:
    if isinstance(source, Checkpoint):
        return checkpoint_fields(source)
    if not isinstance(source, torch.nn.Module) or not hasattr(source, "name_or_path"):
        return {}  # It is no transformers model; loading it raises the error.
    return object_fields(source, checkpoint_of(source, False, options.drafter))

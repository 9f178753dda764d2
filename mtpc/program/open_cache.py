"""From a model and options to its plan, its key, and its steps in the graph cache.

The key has all that shapes graphs, and no values of weights; `mtpc.program.identity` has them.

This module imports no transformers or sympy. What remains of a warm start is torch itself, checks
of what is about to run, and mapping the weights into memory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mtpc.backends import PACKAGING, backend_facts, first_choice
from mtpc.backends.cpu_kernels import build_kernels, fill_blocks, fill_packed, load_library
from mtpc.config import CompileOptions
from mtpc.errors import CacheError, OptionError
from mtpc.layout import Graphs, step_name
from mtpc.layout.display import log
from mtpc.option_checks import AUTO, OWN, drafters_of
from mtpc.plan import Facts, Plan, make_plan
from mtpc.program.program import BuiltSteps
from mtpc.program.step_cache import StepCache, Steps, program_fields
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.key import hash_of
from mtpc.weights.checkpoint import DRAFT, Checkpoint, open_checkpoint, stored_dtype
from mtpc.weights.checkpoint_files import HOW_TO_DRAFT, MTP_COUNT_NAMES
from mtpc.weights.packing import SharedPages
from mtpc.weights.stored import StoredWeights
from mtpc.weights.weights import Weights

if TYPE_CHECKING:
    from mtpc.ranks.group import Ranks


def plan_model(model: Any, asked: CompileOptions, must_draft: bool = False) -> tuple[Any, Plan]:
    """What is compiled, and how; the log says what differs from the options.

    Args:
        model: as for `mtpc.compile`.
        asked: its options.
        must_draft: see `Facts`.

    Returns:
        The opened checkpoint, or the model object; and the plan.

    Raises:
        CheckpointError: the checkpoint cannot be read; or nothing drafts, and K is given.
        OptionError: an option does not suit the model or the backend.
    """
    source = model
    if isinstance(model, (str, Path)):
        source = open_checkpoint(Path(model), drafter_of(asked))
    elif asked.kv_offload_dir is not None:
        raise OptionError(
            "kv_offload_dir with a model object, whose weights may change between runs; "
            "expected a checkpoint's directory"
        )
    plan = make_plan(asked, facts_of(source, asked.backend, must_draft))
    for note in plan.notes:
        log.warning(note)
    return source, plan


def drafter_of(asked: CompileOptions) -> Path | None:
    """The checkpoint that drafts; None where the model or its text does, or nothing."""
    _, other = drafters_of(asked.draft)
    return Path(other) if other not in ("", OWN) and asked.spec_tokens != 0 else None


def facts_of(source: Any, backend: str, must_draft: bool) -> Facts:
    """What is known of a checkpoint or a model object before its code is imported.

    Args:
        source: an opened `Checkpoint`, or a model object.
        backend: the option.
        must_draft: see `Facts`.
    """
    device = getattr(source, "device", None)
    if backend == AUTO and getattr(device, "type", None) == "cuda":
        backend = "cuda"
    return replace(
        backend_facts(backend),
        dtype=stored_dtype(source) or "",
        without_drafts=_without_drafts(source),
        draft_vocab=source.draft_vocab if isinstance(source, Checkpoint) else (),
        must_draft=must_draft,
    )


def _without_drafts(source: Any) -> str:
    """`CheckpointFiles.without_drafts` of a checkpoint, or of the one that a model object is of."""
    if not isinstance(source, Checkpoint) and getattr(source, "name_or_path", None) is None:
        return ""  # Not a model: loading says so.
    if isinstance(source, Checkpoint):
        return source.without_drafts
    from mtpc.weights.paired_checkpoint import checkpoint_of  # Not above: few models are objects.

    checkpoint = checkpoint_of(source, False)
    if checkpoint is not None:
        return checkpoint.without_drafts
    config = source.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) for name in MTP_COUNT_NAMES):
        return ""
    return f"the model announces no MTP layers; {HOW_TO_DRAFT}"


_PROVENANCE = ("_name_or_path", "transformers_version")
"""Config entries that say where a model comes from; they do not affect its graphs."""
_SAMPLED = 256
"""Bytes of each tensor that tell checkpoints of one architecture apart."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def checkpoint_fields(checkpoint: Checkpoint) -> dict[str, str]:
    """Key fields of a checkpoint directory, from its config and the headers of its tensors."""
    specs = checkpoint.specs
    tensors = {
        name: f"{tensor} as {specs[name]}" if name in specs else str(tensor)
        for name, tensor in checkpoint.tensors.items()
    }
    return {
        "model.source": "checkpoint",
        **config_fields(checkpoint.config),
        **tensor_fields("model.weights", tensors),
        **draft_fields(checkpoint),
    }


def sample_digest(checkpoint: Checkpoint) -> str:
    """A digest of some bytes of each tensor: another one for a checkpoint with other weights."""
    return hash_of(
        each.sample(name, _SAMPLED)
        for each in filter(None, (checkpoint, checkpoint.draft))
        for name in sorted(each.stored)
    )


def draft_fields(checkpoint: Checkpoint | None) -> dict[str, str]:
    """The config of a drafter that has a checkpoint of its own; its headers are the pair's."""
    if checkpoint is None or checkpoint.draft is None:
        return {}
    fields = config_fields(checkpoint.draft.config)
    return {f"{DRAFT}{name}": value for name, value in fields.items()}


def config_fields(config: Mapping[str, Any]) -> dict[str, str]:
    """Key fields of a config's entries."""
    return {
        f"model.config.{name}": value
        for name, value in _flat("", config)
        if name.split(".")[0] not in _PROVENANCE
    }


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Leaves of nested mappings as (dotted name, JSON text)."""
    if not isinstance(value, Mapping):
        yield prefix, json.dumps(value, sort_keys=True, default=str)
        return
    for name, inner in value.items():
        yield from _flat(f"{prefix}.{name}" if prefix else str(name), inner)


def tensor_fields(prefix: str, tensors: Mapping[str, str]) -> dict[str, str]:
    """Fields of tensors' names, dtypes and shapes.

    One field is an exact digest of all. The others are readable, and each joins the tensors whose
    names differ only in numbers, such as those of layers and experts.
    """
    groups: dict[str, set[str]] = defaultdict(set)
    for name, description in tensors.items():
        groups[_NUMBER.sub("*", name)].add(description)
    exact = hash_of(f"{name} {tensors[name]}".encode() for name in sorted(tensors))
    readable = {
        f"{prefix}.{pattern}": " | ".join(sorted(found)) for pattern, found in groups.items()
    }
    return {prefix: f"{len(tensors)} tensors, {exact}", **readable}


def kernel_store(plan: Plan, cache: StepCache | None) -> EntryStore | None:
    """The store for a backend's kernels, or None.

    The cuda backend traces its steps at every start, and keeps what it compiles in the cache.
    """
    if cache is not None:
        return cache.store
    row = first_choice(plan.backend)
    keeps = row is not None and row.has_kernels and plan.use_cache
    return EntryStore(plan.cache_dir, plan.frozen) if keeps else None


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
        OptionError: the plan is `frozen`, but the backend keeps nothing of its steps, or they
            cannot be identified: they are traced at every start and `require_sha256` is given, or
            the model object has hooks or replaced forwards.
    """
    row = first_choice(plan.backend)
    if not plan.use_cache or row is None or not row.makes_files:
        is_kept = row is not None and row.is_gpu and not plan.require_sha256
        if plan.frozen and not is_kept:
            option = "require_sha256" if plan.require_sha256 else "frozen"
            raise OptionError(
                f"{option} with backend {plan.backend!r}, which traces its steps at every start; "
                f"use backend={PACKAGING!r}"
            )
        return None
    model: dict[str, str] | None = {}
    if isinstance(source, Checkpoint):
        model = checkpoint_fields(source)
    elif isinstance(source, torch.nn.Module) and hasattr(source, "name_or_path"):
        from mtpc.program.identity import object_fields
        from mtpc.weights.paired_checkpoint import checkpoint_of

        model = object_fields(source, checkpoint_of(source, False, plan.drafter))
    # Where it is no transformers model, loading it raises the error.
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


def from_files(
    checkpoint: Checkpoint, steps: Steps, pages: SharedPages | None = None
) -> BuiltSteps:
    """Built steps, to be bound to weights of a checkpoint's files, which are made in `pages`."""
    # Weights that were dequantised for tracing are gone, and notes must not count them.
    checkpoint.dequantised.clear()
    stored = StoredWeights(checkpoint, {}, fill=fill_packed, fill_blocks=fill_blocks, pages=pages)
    return BuiltSteps(steps, Weights(stored=stored), early=pages.early if pages else 0)


def restore(
    checkpoint: Checkpoint,
    cache: StepCache,
    graphs: Graphs,
    parts: Sequence[StepCache | None] = (None,),
    pages: SharedPages | None = None,
) -> BuiltSteps | None:
    """Steps of a checkpoint, if the cache has them all.

    Args:
        checkpoint: whose weights they run on.
        cache: of this checkpoint.
        graphs: which steps.
        parts: the caches of all ranks in order, with None for `cache`; `require_sha256` is for all.
        pages: memory for weights, where there is some already.

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
    return from_files(checkpoint, steps, pages)


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

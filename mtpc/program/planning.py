"""From a model and options to a plan: opens the checkpoint, and reads the plan's facts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mtpc.backends import backend_facts
from mtpc.config import CompileOptions
from mtpc.errors import OptionError
from mtpc.layout.display import log
from mtpc.option_checks import AUTO, OWN, drafters_of
from mtpc.plan import Facts, Plan, make_plan
from mtpc.weights.checkpoint import Checkpoint, stored_dtype
from mtpc.weights.checkpoint_files import MTP_COUNT_NAMES
from mtpc.weights.paired_checkpoint import checkpoint_of, open_checkpoint


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


def facts_of(source: Any, backend: str, must_draft: bool = False) -> Facts:
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
        must_draft=must_draft,
    )


def _without_drafts(source: Any) -> str:
    """`CheckpointFiles.without_drafts` of a checkpoint, or of the one that a model object is of."""
    if not isinstance(source, Checkpoint) and getattr(source, "name_or_path", None) is None:
        return ""  # Not a model: loading says so.
    checkpoint = source if isinstance(source, Checkpoint) else checkpoint_of(source, False)
    if checkpoint is not None:
        return checkpoint.without_drafts
    config = source.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) for name in MTP_COUNT_NAMES):
        return ""
    return "the model announces no MTP layers; for drafts, give a drafter's checkpoint (draft=DIR)"

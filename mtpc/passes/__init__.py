"""Passes over a StepGraph. The pipeline is a literal tuple, so that its order is visible."""

from __future__ import annotations

from collections.abc import Mapping

from mtpc.errors import OptionError
from mtpc.passes.absorb_latent import AbsorbLatent
from mtpc.passes.base import Pass, run_pipeline
from mtpc.passes.canonicalise import Canonicalise
from mtpc.passes.fuse_draft_chain import FuseDraftChain
from mtpc.passes.hoist_shared import HoistShared
from mtpc.passes.merge_projections import MergeProjections
from mtpc.passes.pack_weights import PackWeights
from mtpc.passes.quantise_draft import QuantiseDraft
from mtpc.passes.resize_metadata import ResizeMetadata
from mtpc.passes.select_head_rows import SelectHeadRows
from mtpc.passes.verifier import Verifier

REQUIRED = ("resize-metadata", "fuse-draft-chain")
"""Without these a graph is not valid, or not one graph."""
OFF_BY_DEFAULT = ("merge-projections", "quantise-draft", "pack-weights")
"""Run only where the option `enabled_passes`, or the backend, names them."""


def full_pipeline(buffer_names: Mapping[int, str]) -> tuple[Pass, ...]:
    """Every pass, in order.

    Args:
        buffer_names: layout name by tensor id, for state that model pieces hold.
    """
    return (
        ResizeMetadata(),
        FuseDraftChain(buffer_names),
        Canonicalise(),
        AbsorbLatent(),
        SelectHeadRows(),
        HoistShared(),
        QuantiseDraft(),
        MergeProjections(),
        PackWeights(),
    )


def pass_names() -> tuple[str, ...]:
    """Names in pipeline order."""
    return tuple(step.name for step in full_pipeline({}))


def select_passes(
    buffer_names: Mapping[int, str], disabled: tuple[str, ...], enabled: tuple[str, ...]
) -> tuple[Pass, ...]:
    """The pipeline with the user's choices.

    Raises:
        OptionError: an unknown name, or a required pass disabled.
    """
    known = pass_names()
    for name in (*disabled, *enabled):
        if name not in known:
            raise OptionError(f"unknown pass {name!r}; passes: {', '.join(known)}")
    for name in disabled:
        if name in REQUIRED:
            raise OptionError(f"pass {name!r} cannot be disabled: without it the step is not valid")
    off = (set(OFF_BY_DEFAULT) - set(enabled)) | set(disabled)
    return tuple(step for step in full_pipeline(buffer_names) if step.name not in off)


__all__ = ["Pass", "Verifier", "full_pipeline", "pass_names", "run_pipeline", "select_passes"]

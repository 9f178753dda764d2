"""The pipeline: every pass, in order. It is a literal tuple, so that its order is visible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from mtpc.backends.cpu.passes.fuse_head_max import FuseHeadMax
from mtpc.backends.cpu.passes.fuse_linear_chains import FuseLinearChains
from mtpc.backends.cpu.passes.pack_weights import PackWeights
from mtpc.backends.cpu.passes.skip_idle_rows import SkipIdleRows
from mtpc.backends.spell_experts import SpellExperts
from mtpc.config import CompileOptions
from mtpc.errors import OptionError
from mtpc.passes.absorb_latent import AbsorbLatent
from mtpc.passes.base import Pass, Policy
from mtpc.passes.canonicalise import Canonicalise
from mtpc.passes.fuse_cache_write import FuseCacheWrite
from mtpc.passes.fuse_draft_chain import FuseDraftChain
from mtpc.passes.fuse_elementwise import FuseElementwise
from mtpc.passes.hoist_shared import HoistShared
from mtpc.passes.pack_groups import PackBlocks, PackGroups
from mtpc.passes.resize_metadata import ResizeMetadata
from mtpc.passes.select_head_rows import SelectHeadRows
from mtpc.plan import Plan, make_plan

if TYPE_CHECKING:
    from mtpc.passes.shard import Sharding

PACKING = (PackBlocks.name, PackGroups.name, PackWeights.name)
"""The passes that read how weights are stored."""
NO_NAMES: Mapping[int, str] = MappingProxyType({})


def full_pipeline(
    plan: Plan,
    buffer_names: Mapping[int, str] = NO_NAMES,
    sharding: Sharding | None = None,
    is_whole: bool = True,
) -> tuple[Pass, ...]:
    """Every pass, in order; the plan's options are theirs.

    `buffer_names` has layout names by tensor id, for state that model pieces hold. Without a
    `sharding`, the model is whole. If `is_whole`, those are imported, too, that few plans run: for
    GPUs, for drafts in int8, for ranks, and for a draft vocabulary.
    """
    merge, entry, skinny, collectives, choices, invariant = _of_gpus(sharding, is_whole)
    return (
        ResizeMetadata(),
        FuseDraftChain(buffer_names),
        Canonicalise(),
        AbsorbLatent(),
        SelectHeadRows(),
        HoistShared(),
        *_trim(plan, is_whole),
        *_shard(sharding, is_whole or plan.tensor_parallel_size > 1),
        *_quantise(is_whole),
        PackBlocks(plan.quantize),
        PackGroups(plan.quantize),
        SpellExperts(),
        *merge,
        PackWeights(),
        FuseCacheWrite(),
        FuseElementwise(),
        *entry,
        FuseHeadMax(),
        *skinny,
        *collectives,
        *choices,
        *invariant,
        FuseLinearChains(),
        SkipIdleRows(),
    )


def _trim(plan: Plan, is_wanted: bool) -> tuple[Pass, ...]:
    if not (is_wanted or plan.draft_vocab):
        return ()
    from mtpc.passes.trim_draft_head import TrimDraftHead

    return (TrimDraftHead(plan.draft_vocab),)


def _shard(sharding: Sharding | None, is_wanted: bool) -> tuple[Pass, ...]:
    if sharding is None and not is_wanted:
        return ()
    from mtpc.passes.shard import ShardStep

    return (ShardStep(sharding),)


def _quantise(is_wanted: bool) -> tuple[Pass, ...]:
    if not is_wanted:
        return ()
    from mtpc.passes.quantise_draft import QuantiseDraft

    return (QuantiseDraft(),)


def _of_gpus(sharding: Sharding | None, are_wanted: bool) -> Sequence[tuple[Pass, ...]]:
    """The passes of `mtpc.backends.gpu`, each in a tuple; () for each where they are not wanted."""
    if not are_wanted:
        return ((),) * 6
    from mtpc.backends.gpu.passes.batch_invariant import BatchInvariant
    from mtpc.backends.gpu.passes.fuse_draft_entry import FuseDraftEntry
    from mtpc.backends.gpu.passes.fuse_skinny_linears import FuseSkinnyLinears
    from mtpc.backends.gpu.passes.lower_choices import LowerChoices
    from mtpc.backends.gpu.passes.merge_projections import MergeProjections
    from mtpc.backends.gpu.passes.spell_collectives import SpellCollectives

    return (
        (MergeProjections(),),
        (FuseDraftEntry(),),
        (FuseSkinnyLinears(),),
        (SpellCollectives(sharding),),
        (LowerChoices(),),
        (BatchInvariant(),),
    )


def pass_names(*policies: Policy) -> tuple[str, ...]:
    """Names of the passes of these policies, in pipeline order; of all passes if none is given."""
    pipeline = full_pipeline(make_plan(CompileOptions()))
    return tuple(step.name for step in pipeline if not policies or step.policy in policies)


def select_passes(
    plan: Plan,
    backend: Sequence[str] = (),
    buffer_names: Mapping[int, str] = NO_NAMES,
    sharding: Sharding | None = None,
) -> tuple[Pass, ...]:
    """The passes of `full_pipeline` that a plan chooses, and those that a `backend` enables.

    Raises:
        OptionError: an unknown name, a required pass disabled, or one enabled that lacks its
            option.
    """
    disabled, enabled = plan.disabled_passes, (*plan.enabled_passes, *backend)
    usual = full_pipeline(plan, buffer_names, sharding, is_whole=False)
    names_rare = not {*disabled, *enabled} <= {step.name for step in usual}
    pipeline = full_pipeline(plan, buffer_names, sharding) if names_rare else usual
    known = [step.name for step in pipeline]
    for name in (*disabled, *enabled):
        if name not in known:
            raise OptionError(f"unknown pass {name!r}; passes: {', '.join(known)}")
    for name in disabled:
        if any(step.name == name and step.policy == "required" for step in pipeline):
            raise OptionError(f"pass {name!r} cannot be disabled: without it the step is not valid")
    for trim in _trim(plan, names_rare):
        if trim.name in enabled and not plan.draft_vocab:
            raise OptionError(
                f"pass {trim.name!r} needs the option draft_vocab: the token ids that drafts may "
                "be, or how many of the lowest"
            )
    placed = {PackGroups.name} if plan.quantize else set()
    usually = {step.name for step in pipeline if step.policy in ("required", "on")}
    running = (usually | {*enabled} | placed) - {*disabled}
    return tuple(step for step in pipeline if step.name in running)

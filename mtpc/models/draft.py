"""Drafters in checkpoints of their own: heads, block drafters, Gemma 4's assistant, or MTP layers.

All make of a target's family one that says how the drafter is loaded and stepped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mtpc.errors import CheckpointError
from mtpc.models import dflash, eagle3
from mtpc.models.drafter import Pairing
from mtpc.models.families.mimo import MIMO
from mtpc.models.family import ModelFamily, layers_after
from mtpc.models.gemma4_assistant import TARGETS, assistant_family
from mtpc.weights.checkpoint import DRAFT, Checkpoint
from mtpc.weights.paired_checkpoint import PairedCheckpoint

KINDS = (
    ((*eagle3.ARCHITECTURES, *eagle3.PEAGLE), eagle3.eagle3_family),
    ((*dflash.ARCHITECTURES, *dflash.DFLASH2, *dflash.DSPARK), dflash.dflash_family),
    (TARGETS, assistant_family),
)
"""Architectures of drafters -> what makes the family; any other drafter is MTP layers."""


def drafted_family(family: ModelFamily, checkpoint: Checkpoint, config: Any) -> ModelFamily:
    """The family of a target with the drafter of its checkpoint.

    Raises:
        CheckpointError: the drafter does not fit the target, or lacks what it needs.
        UnsupportedModelError: the drafter or the target has parts that mtpc does not know.
    """
    assert isinstance(checkpoint, PairedCheckpoint)
    pair = Pairing(family, checkpoint, config)
    names = checkpoint.draft.config.get("architectures") or []
    make = next((make for known, make in KINDS if set(names) & set(known)), _mtp_family)
    return make(pair)


def _mtp_family(pair: Pairing) -> ModelFamily:
    """The family with MTP layers of the drafter's checkpoint, under the names of a full one.

    Or under those of a model that has no other layers, as exporters write them.
    """
    family, draft, target = pair.family, pair.checkpoint.draft, pair.target
    layers = target.num_hidden_layers
    names = draft.config.get("architectures") or []
    if not family.wiring.joints() and set(names) & {*MIMO.architectures, "MiMoMTPModel"}:
        family = with_mimo_layers(family)
    start = next(
        (n for n in (layers, 0) if any(_is_layer(name, family, n) for name in draft.tensors)), None
    )
    if start is None:
        prefix = family.layer_prefix(layers, 0)
        raise CheckpointError(
            f"{draft.directory} is no drafter for {family.name}: its architectures are "
            f"{draft.config.get('architectures')}, and no tensor is named {prefix}*; "
            f"expected an EAGLE-3 or P-EAGLE head ({eagle3.ARCHITECTURES[0]}), DFlash, DFlash2 or "
            f"DSpark ({dflash.ARCHITECTURES[0]}, {dflash.DFLASH2[0]}, {dflash.DSPARK[0]}), Gemma "
            "4's assistant or MTP layers of the target's family"
        )
    for entry in ("hidden_size", "vocab_size"):
        found, expected = draft.text_config.get(entry), getattr(target, entry)
        if found not in (None, expected):
            raise CheckpointError(
                f"{draft.directory}: {entry} is {found}, and the target's is {expected}; use the "
                "MTP layers of this target's base"
            )
    return replace(
        family,
        layer_prefix=lambda layers, index: DRAFT + family.layer_prefix(start, index),
        num_mtp_layers=lambda config: None,
    )


def with_mimo_layers(family: ModelFamily) -> ModelFamily:
    """A derived family with MTP layers as MiMo has them.

    Their block is of the class of the target's own layers, and of the kind of the last one.
    """

    def block_config(config: Any) -> Any:
        kinds = getattr(config, "layer_types", None)
        return layers_after(config, 1, layer_types=kinds[-1]) if kinds else config

    return replace(
        family, wiring=MIMO.wiring, layer_prefix=MIMO.layer_prefix, block_config=block_config
    )


def _is_layer(name: str, family: ModelFamily, layers: int) -> bool:
    prefix = family.layer_prefix(layers, 0)
    joints = tuple(f"{prefix}{joint}." for joint in family.wiring.joints().values())
    return bool(joints) and name.startswith(joints)

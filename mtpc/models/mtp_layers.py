"""Building MTP layers, which transformers does not load, from a checkpoint's tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mtpc.checkpoint import Checkpoint, listing
from mtpc.errors import CheckpointError
from mtpc.models.family import ModelFamily
from mtpc.models.hf import MTPLayer, stand_in

_EXPERT = re.compile(
    r"^(?P<stem>.*mlp\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.weight$"
)

STACKED_GATE = re.compile(r".*\bmoe\.gate_proj\.weight")
"""Gate projections of all experts as one tensor, as Step-3.5 and 3.7 are stored."""


def load_mtp_layer(
    checkpoint: Checkpoint,
    family: ModelFamily,
    config: Any,
    index: int,
    block_class: type[nn.Module],
    norm_class: type[nn.Module],
    dtype: torch.dtype,
) -> MTPLayer:
    """Build MTP layer `index` and fill it from the checkpoint.

    Args:
        checkpoint: where its tensors are.
        family: names and wiring.
        config: the target's config (a private copy, set to mtpc's seams).
        index: MTP layer, from 0.
        block_class: the decoder layer class of the target.
        norm_class: the target's norm class.
        dtype: dtype of the parameters; buffers keep float32 or the wider dtype asked for.

    Raises:
        CheckpointError: tensors missing, unconsumed or of another shape; the message lists them.
    """
    prefix = family.layer_prefix(config.num_hidden_layers, index)
    stored = {name[len(prefix) :]: name for name in checkpoint.names(prefix)}
    with torch.device("meta"):
        block = block_class(family.block_config(config), config.num_hidden_layers + index)
        layer = MTPLayer(family.wiring, config, block, norm_class)
        stand_in(layer, family.canonical)
    for name in family.shared_tensors:
        stored.pop(name, None)
    tensors = {_module_name(name, family): checkpoint.tensor(full) for name, full in stored.items()}
    _fill(layer, _stack_experts(tensors), dtype, f"MTP layer {index} of {checkpoint.directory}")
    return layer.eval()


def _module_name(name: str, family: ModelFamily) -> str:
    """Checkpoint name within an MTP layer -> name within `MTPLayer`."""
    wiring = family.wiring
    joints = {
        wiring.embedding_norm: "embedding_norm",
        wiring.hidden_norm: "hidden_norm",
        wiring.projection: "projection",
        wiring.final_norm: "final_norm",
    }
    stem, _, leaf = name.rpartition(".")
    if stem in joints:
        return f"{joints[stem]}.{leaf}"
    if name.startswith(family.block_prefix):
        return f"block.{module_name(name.removeprefix(family.block_prefix), family)}"
    return name  # Neither a joint's nor the block's: reported as unexpected.


def module_name(name: str, family: ModelFamily) -> str:
    """Checkpoint name within a decoder layer -> transformers' name."""
    for stored, module in family.stored_names:
        name = name.replace(stored, module)
    return name


def stored_name(name: str, family: ModelFamily) -> str:
    """Name within `MTPLayer` -> checkpoint name within an MTP layer: `_module_name` reversed."""
    joint, _, leaf = name.partition(".")
    if joint == "block":
        return family.block_prefix + layer_name(leaf, family)
    return f"{getattr(family.wiring, joint)}.{leaf}"


def layer_name(name: str, family: ModelFamily) -> str:
    """transformers' name within a decoder layer -> checkpoint name: `module_name` reversed."""
    for stored, module in family.stored_names:
        name = name.replace(module, stored)
    return name


def stored_tensors(layer: MTPLayer, family: ModelFamily) -> Iterator[tuple[str, Tensor]]:
    """A layer's tensors by checkpoint name within it, experts as the family stores them: what
    loading reads."""
    for name, tensor in layer.state_dict().items():
        public = stored_name(name, family)
        stem, _, part = public.rpartition(".")
        if part == "gate_up_proj":
            yield from _stored_gate_up(stored_name(name.replace(part, "down_proj"), family), tensor)
        elif part == "down_proj":
            for index, rows in enumerate(tensor):
                yield f"{stem}.{index}.down_proj.weight", rows
        else:
            yield public, tensor


def _stored_gate_up(down: str, gate_up: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Gate and up of all experts, stacked where `down`, which stands beside them, is."""
    parts = zip(("gate_proj", "up_proj"), gate_up.chunk(2, 1), strict=True)
    stem = down.removesuffix(".down_proj")
    for name, tensor in parts:
        if stem == down:
            yield down.replace("down_proj", name), tensor
        else:
            for index, rows in enumerate(tensor):
                yield f"{stem}.{index}.{name}.weight", rows


def _stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Per-expert projections -> transformers' stacked `gate_up_proj` [E, 2I, H], `down_proj`."""
    out: dict[str, Tensor] = {}
    tensors = _join_stacked(tensors)
    parts: dict[str, dict[tuple[str, int], Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.match(name)
        if match is None:
            out[name] = tensor
        else:
            key = (match["part"], int(match["index"]))
            parts.setdefault(match["stem"], {})[key] = tensor
    for stem, by_part in parts.items():
        count = 1 + max(index for _, index in by_part)
        absent = [
            f"{i}.{p}_proj"
            for i in range(count)
            for p in ("gate", "up", "down")
            if (p, i) not in by_part
        ]
        if absent:
            raise CheckpointError(f"{stem}: experts lack {', '.join(absent[:8])}")
        rows = [torch.cat([by_part["gate", i], by_part["up", i]]) for i in range(count)]
        out[f"{stem}.gate_up_proj"] = torch.stack(rows)
        out[f"{stem}.down_proj"] = torch.stack([by_part["down", i] for i in range(count)])
    return out


def _join_stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts stored stacked, gate [E, I, H] and up apart -> transformers' `gate_up_proj`."""
    out = dict(tensors)
    for name in tensors:
        up = name.replace("gate_proj", "up_proj")
        if STACKED_GATE.fullmatch(name) and up in out:
            gate_up = torch.cat([out.pop(name), out.pop(up)], 1)
            out[name.replace("moe.gate_proj.weight", "mlp.experts.gate_up_proj")] = gate_up
    return out


def _fill(layer: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, what: str) -> None:
    """Assign tensors to a module built on the meta device; every name must match."""
    expected = layer.state_dict()
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(f"{what}: missing {listing(missing)}; unexpected {listing(unknown)}")
    shapes = [
        f"{name} is {tuple(t.shape)}, expected {tuple(expected[name].shape)}"
        for name, t in tensors.items()
        if t.shape != expected[name].shape
    ]
    if shapes:
        raise CheckpointError(f"{what}: {'; '.join(shapes[:4])}")
    parameters = {name for name, _ in layer.named_parameters()}
    # Buffers (the router's selection bias) stay in float32 at least, as transformers keeps them.
    wide = torch.promote_types(dtype, torch.float32)
    cast = {n: t.to(dtype if n in parameters else wide) for n, t in tensors.items()}
    layer.load_state_dict(cast, assign=True)
    layer.requires_grad_(False)

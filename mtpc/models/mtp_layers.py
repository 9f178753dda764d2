"""Building MTP layers, which transformers does not load, from a checkpoint's tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mtpc.errors import CheckpointError
from mtpc.models.family import ModelFamily, find_norm_class
from mtpc.models.hf import MTPLayer
from mtpc.weights.checkpoint import Checkpoint, listing

STACKED_GATE = re.compile(r".*\bmoe\.gate_proj\.weight")
"""Gate projections of all experts as one tensor, as Step-3.5 and 3.7 are stored."""


def load_mtp_layer(
    checkpoint: Checkpoint, family: ModelFamily, target: Any, index: int
) -> MTPLayer:
    """Build MTP layer `index` and fill it from the checkpoint.

    Args:
        checkpoint: where its tensors are.
        family: names and wiring.
        target: the transformers model it belongs to, whose classes and dtype it takes.
        index: MTP layer, from 0.

    Raises:
        CheckpointError: tensors missing, unconsumed or of another shape; the message lists them.
    """
    layers = target.config.get_text_config(decoder=True).num_hidden_layers
    prefix = family.layer_prefix(layers, index)
    stored = {name[len(prefix) :]: name for name in checkpoint.names(prefix)}
    with torch.device("meta"):
        layer = build_mtp_layer(family, target, index)
    tensors = {
        name: checkpoint.tensor(full)
        for name, full in stored.items()
        if name not in family.shared_tensors
    }
    what = f"MTP layer {index} of {checkpoint.directory}"
    tensors = layer_tensors(tensors, family)
    check_tensors(layer, tensors, what)
    _assign(layer, tensors, dtypes_of(target))
    return layer.eval()


def build_mtp_layer(family: ModelFamily, target: Any, index: int = 0) -> MTPLayer:
    """An MTP layer that fits a transformers model of the family, its weights not yet set."""
    config, decoder = target.config.get_text_config(decoder=True), target.get_decoder()
    sample = decoder.layers[-1]
    block = type(sample)(family.block_config(config), config.num_hidden_layers + index)
    stream_head = type(decoder.hc_head)(config) if family.wiring.stream_head else None
    return MTPLayer(family.wiring, config, block, find_norm_class(sample), stream_head)


def layer_tensors(stored: Mapping[str, Tensor], family: ModelFamily) -> dict[str, Tensor]:
    """Tensors by checkpoint name within an MTP layer -> by name within `MTPLayer`.

    Raises:
        CheckpointError: an expert lacks a projection.
    """
    return _stack_experts({_module_name(n, family): t for n, t in stored.items()}, family)


def _module_name(name: str, family: ModelFamily) -> str:
    """Checkpoint name within an MTP layer -> name within `MTPLayer`."""
    joints = {stored: joint for joint, stored in family.wiring.joints().items()}
    stem, _, leaf = name.rpartition(".")
    if stem in joints:
        return f"{joints[stem]}.{leaf}"
    head = family.wiring.stream_head
    if head and name.startswith(head):
        return f"stream_head.hc_{name.removeprefix(head)}"
    if not name.startswith(family.block_prefix):
        return name  # Neither a joint's nor the block's: reported as unexpected.
    name = name.removeprefix(family.block_prefix)
    for part, module in family.stored_names:
        name = name.replace(part, module)
    return f"block.{name}"


def stored_name(name: str, family: ModelFamily) -> str:
    """Name within `MTPLayer` -> checkpoint name within an MTP layer: `_module_name` reversed."""
    joint, _, leaf = name.partition(".")
    if joint == "block":
        return family.block_prefix + layer_names(leaf, family)[0]
    if joint == "stream_head":
        return f"{family.wiring.stream_head}{leaf.removeprefix('hc_')}"
    return f"{family.wiring.joints()[joint]}.{leaf}"


def layer_names(name: str, family: ModelFamily) -> tuple[str, ...]:
    """transformers' name within a decoder layer -> names in checkpoints; the first is written."""
    written = name
    others: list[str] = []
    for stored, module in family.stored_names:
        others += [other.replace(module, stored) for other in (name, *others) if module in other]
        written = written.replace(module, stored)
    return (written, *(other for other in (*others, name) if other != written))


def stored_tensors(layer: MTPLayer, family: ModelFamily) -> Iterator[tuple[str, Tensor]]:
    """A layer's tensors by checkpoint name within it, experts as the family stores them: what
    loading reads."""
    gate, up, down = family.expert_names
    for name, tensor in layer.state_dict().items():
        public = stored_name(name, family)
        part = public.rpartition(".")[2]
        if part == "gate_up_proj":
            beside = stored_name(name.replace(part, "down_proj"), family)
            parts = zip((gate, up), tensor.chunk(2, 1), strict=True)
            for part_name, stacked in parts:
                yield from _stored_experts(beside, part_name, stacked)
        elif part == "down_proj":
            yield from _stored_experts(public, down, tensor)
        else:
            yield public, tensor


def _stored_experts(down: str, part: str, stacked: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A projection of all experts, stacked where `down`, which stands beside it, is."""
    stem = down.removesuffix(".down_proj")
    if stem == down:
        yield down.replace("down_proj", part), stacked
    else:
        for index, rows in enumerate(stacked):
            yield f"{stem}.{index}.{part}.weight", rows


def _stack_experts(tensors: Mapping[str, Tensor], family: ModelFamily) -> dict[str, Tensor]:
    """Per-expert projections -> transformers' stacked `gate_up_proj` [E, 2I, H], `down_proj`."""
    gate, up, down = family.expert_names
    pattern = re.compile(
        rf"(?P<stem>.*\.experts)\.(?P<index>\d+)\.(?P<part>{gate}|{up}|{down})\.weight"
    )
    out: dict[str, Tensor] = {}
    tensors = _join_stacked(tensors)
    parts: dict[str, dict[tuple[str, int], Tensor]] = {}
    for name, tensor in tensors.items():
        match = pattern.fullmatch(name)
        if match is None:
            out[name] = tensor
        else:
            key = (match["part"], int(match["index"]))
            parts.setdefault(match["stem"], {})[key] = tensor
    for stem, by_part in parts.items():
        count = 1 + max(index for _, index in by_part)
        absent = [
            f"{i}.{p}" for i in range(count) for p in (gate, up, down) if (p, i) not in by_part
        ]
        if absent:
            raise CheckpointError(f"{stem}: experts lack {', '.join(absent[:8])}")
        rows = [torch.cat([by_part[gate, i], by_part[up, i]]) for i in range(count)]
        out[f"{stem}.gate_up_proj"] = torch.stack(rows)
        out[f"{stem}.down_proj"] = torch.stack([by_part[down, i] for i in range(count)])
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


def dtypes_of(target: Any) -> Callable[[str, bool], torch.dtype]:
    """The dtype of each parameter or buffer, as transformers chooses it for the target's own."""
    dtype = target.get_input_embeddings().weight.dtype
    # Buffers (the router's selection bias) and what the class says stay in float32 at least.
    wide = torch.promote_types(dtype, torch.float32)
    kept = set(getattr(target, "_keep_in_fp32_modules_strict", None) or ())

    def choose(name: str, is_parameter: bool) -> torch.dtype:
        return dtype if is_parameter and not kept & set(name.split(".")) else wide

    return choose


def check_tensors(layer: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Every name and shape must match the module's.

    Raises:
        CheckpointError: tensors missing, unexpected or of another shape; the message lists them.
    """
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


def _assign(
    layer: nn.Module, tensors: Mapping[str, Tensor], dtype_of: Callable[[str, bool], torch.dtype]
) -> None:
    """Give checked tensors to a module built on the meta device."""
    parameters = {name for name, _ in layer.named_parameters()}
    cast = {
        n: t.to(dtype_of(n, n in parameters)) if t.is_floating_point() else t
        for n, t in tensors.items()
    }
    layer.load_state_dict(cast, assign=True)
    layer.requires_grad_(False)


def allocate(
    layer: nn.Module, dtype_of: Callable[[str, bool], torch.dtype], device: torch.device
) -> None:
    """Give a module built on the meta device memory of its own, not yet written."""
    empty = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        for name, tensor in layer.state_dict().items()
    }
    _assign(layer, empty, dtype_of)

"""MTP layers: building them from a checkpoint's tensors, because transformers drops these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.models.family import ModelFamily, find_norm_class
from mtpc.models.header_weights import HeaderWeights
from mtpc.models.hf import MTPLayer
from mtpc.models.seams import stand_in
from mtpc.weights.checkpoint import Checkpoint, check_finite, listing
from mtpc.weights.checkpoint_files import MTP_COUNT_NAMES
from mtpc.weights.recipes import Join, make, names

_OTHERS = "its config.json describes others: correct it, or download the checkpoint again"


def load_mtp_layers(
    checkpoint: Checkpoint, family: ModelFamily, target: Any, headers: HeaderWeights | None = None
) -> tuple[MTPLayer, ...]:
    """All MTP layers of a checkpoint, with canonical modules. With `headers`, no tensor is read.

    Raises:
        CheckpointError: there is no layer, or not the number that the config announces; tensors are
            missing, unexpected, misshapen or not finite.
        UnsupportedModelError: mtpc cannot chain so many layers of this family.
    """
    config, where = target.config.get_text_config(decoder=True), checkpoint.mtp_directory
    count = _count_mtp_layers(checkpoint, family, config)
    if count == 0:
        raise CheckpointError(
            f"the config.json of {where} announces no MTP layers ({MTP_COUNT_NAMES[-1]} "
            "is 0 or absent); expected at least one; give a drafter's checkpoint (draft), or use "
            "spec_tokens=0 to decode without drafts"
        )
    prefixes = [family.layer_prefix(config.num_hidden_layers, i) for i in (0, count)]
    if not checkpoint.names(prefixes[0]):
        raise CheckpointError(
            f"{where} holds no MTP layer: no tensor is named {prefixes[0]}*; "
            f"expected {count}; use spec_tokens=0 to decode without drafts"
        )
    if prefixes[0] == prefixes[1] and count > 1:
        raise UnsupportedModelError(
            f"{where} has {count} MTP layers, by its config.json "
            f"({' or '.join(MTP_COUNT_NAMES)}); expected one, as {family.name} names the tensors "
            "of one layer only"
        )
    if count > 1 and family.wiring.stream_head:
        raise UnsupportedModelError(
            f"{where} has {count} MTP layers that are fed residual streams; "
            "expected one: true chaining works on features [T, H] only"
        )
    more = checkpoint.names(prefixes[1])
    if more and prefixes[0] != prefixes[1]:
        raise CheckpointError(
            f"{where} stores more MTP layers ({listing(more)}) than the {count} "
            f"that its config announces; correct {MTP_COUNT_NAMES[-1]} in its config.json"
        )
    layers = tuple(load_mtp_layer(checkpoint, family, target, i, headers) for i in range(count))
    for layer in layers:
        stand_in(layer, family.canonical)
    if headers is None:
        for index, layer in enumerate(layers):
            check_finite(layer.named_parameters(), f"MTP layer {index} of {where}")
        share_copies(layers, target)
    return layers


def _count_mtp_layers(checkpoint: Checkpoint, family: ModelFamily, config: Any) -> int:
    """Number of MTP layers in the config, or in the checkpoint if the config does not say."""
    count = family.num_mtp_layers(config)
    if count is None:
        prefixes = [family.layer_prefix(config.num_hidden_layers, 0)]
        while checkpoint.names(prefixes[-1]) and prefixes[-1] not in prefixes[:-1]:
            prefixes.append(family.layer_prefix(config.num_hidden_layers, len(prefixes)))
        count = len(prefixes) - 1
        # `config` is a private copy, and `block_config` reads the count from it.
        setattr(config, MTP_COUNT_NAMES[-1], count)
    return count


def load_mtp_layer(
    checkpoint: Checkpoint,
    family: ModelFamily,
    target: Any,
    index: int,
    headers: HeaderWeights | None = None,
) -> MTPLayer:
    """Build MTP layer `index`, from 0, of the target's classes and dtype, and fill it from the
    checkpoint. With `headers`, no tensor is read.

    Raises:
        CheckpointError: tensors are missing, unexpected or misshapen; the message lists them.
    """
    read = headers.tensor if headers else checkpoint.tensor
    layers = target.config.get_text_config(decoder=True).num_hidden_layers
    prefix = family.layer_prefix(layers, index)
    stored = {name[len(prefix) :]: name for name in checkpoint.names(prefix)}
    common = family.common_tensors.items()
    stored |= {name: full for name, full in common if full in checkpoint.tensors}
    # An embedding and a head that are stored with the layer, but for those that the wiring gives to
    # the target.
    found = {role: stored[name] for name, role in family.shared_tensors.items() if name in stored}
    own = {role: full for role, full in found.items() if getattr(family.wiring, role) == "own"}
    with torch.device("meta"):
        layer = build_mtp_layer(family, target, index, own)
    tensors = {
        name: read(full) for name, full in stored.items() if name not in family.shared_tensors
    }
    what = f"MTP layer {index} of {checkpoint.mtp_directory}"
    tensors = {
        **layer_tensors(tensors, family, layer),
        **{f"{role}.weight": read(full) for role, full in own.items()},
    }
    check_tensors(layer, tensors, what)
    _assign(layer, tensors, dtypes_of(target, family))
    return layer.eval()


def share_copies(layers: Iterable[MTPLayer], target: Any) -> None:
    """Let each layer's embedding and head use the target's memory where they are equal.

    They keep names of their own, so that graphs do not depend on the values of weights. Where
    tensors are not loaded, `StoredWeights` does the same when it binds them.
    """
    theirs = {"embedding": target.get_input_embeddings(), "head": target.get_output_embeddings()}
    for layer in layers:
        for role, end in theirs.items():
            own = getattr(layer, role)
            if own is None:
                continue
            forms = {(each.shape, each.dtype, each.device) for each in (own.weight, end.weight)}
            if len(forms) == 1 and torch.equal(own.weight, end.weight):
                own.weight = nn.Parameter(end.weight.detach(), requires_grad=False)


def build_mtp_layer(
    family: ModelFamily, target: Any, index: int = 0, own: Collection[str] = ()
) -> MTPLayer:
    """MTP layer `index` for a transformers model of the family; its weights are not set. `own` is
    what it has of its own, of "embedding" and "head"."""
    config, decoder = target.config.get_text_config(decoder=True), target.get_decoder()
    number = config.num_hidden_layers + index
    if family.make_layer is not None:
        made: MTPLayer = family.make_layer(family.wiring, number, own)
        return made
    kind = type(decoder.layers[-1])
    block = family.make_block(kind, family.block_config(config), number)
    parts = family.parts
    stream_head = parts.stream_head(decoder, config) if parts and parts.stream_head else None
    layer = MTPLayer(family.wiring, config, block, find_norm_class(block), stream_head)
    if "embedding" in own:
        layer.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
    if "head" in own:
        layer.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    return layer


def layer_tensors(
    stored: Mapping[str, Tensor], family: ModelFamily, layer: nn.Module
) -> dict[str, Tensor]:
    """Tensors of a checkpoint's MTP layer, by its names, as those of an `MTPLayer` by its own.

    Experts that are stored one by one, or stacked by projection, become the layer's stacks.

    Raises:
        CheckpointError: an expert lacks a projection.
    """
    tensors = {module_name(name, family): tensor for name, tensor in stored.items()}
    for name, expected in layer.state_dict().items():
        stem, _, part = name.rpartition(".")
        if name in tensors or not stem.endswith(".experts"):
            continue
        for recipe in expert_recipes(stem, part, family, len(expected)):
            wanted = [*names(recipe)]
            absent = [one for one in wanted if one not in tensors]
            if not absent:
                tensors[name] = make(recipe, tensors.pop)
                break
            if len(absent) < len(wanted):
                short = [n.removeprefix(f"{stem}.").removesuffix(".weight") for n in absent]
                raise CheckpointError(
                    f"{stem} lacks {listing(short)}; expected "
                    f"{', '.join(filter(None, family.expert_names))} for each of {len(expected)} "
                    "experts"
                )
    return tensors


def module_name(name: str, family: ModelFamily) -> str:
    """Checkpoint name within an MTP layer -> name within `MTPLayer`."""
    joints = {stored: joint for joint, stored in family.wiring.joints().items()}
    stem, _, leaf = name.rpartition(".")
    if stem in joints:
        return f"{joints[stem]}.{leaf}"
    if family.wiring.stream_head:
        head, inner = family.wiring.stream_head
        if name.startswith(head):
            return f"stream_head.{inner}{name.removeprefix(head)}"
    if not name.startswith(family.block_prefix):
        return name  # `check_tensors` reports it as unexpected.
    name = name.removeprefix(family.block_prefix)
    for part, module in () if family.make_layer else family.stored_names:
        name = name.replace(part, module)
    return f"block.{name}"


def stored_name(name: str, family: ModelFamily) -> str:
    """Name within `MTPLayer` -> checkpoint name within an MTP layer; inverts `module_name`."""
    joint, _, leaf = name.partition(".")
    if not leaf:
        return name
    if joint in ("embedding", "head"):
        return next(n for n, role in family.shared_tensors.items() if role == joint)
    if joint == "block":
        own = leaf if family.make_layer else layer_names(leaf, family)[0]
        return family.block_prefix + own
    if joint == "stream_head" and family.wiring.stream_head:
        head, inner = family.wiring.stream_head
        return head + leaf.removeprefix(inner)
    return f"{family.wiring.joints().get(joint, joint)}.{leaf}"


def layer_names(name: str, family: ModelFamily) -> tuple[str, ...]:
    """transformers' name within a decoder layer -> its names in checkpoints; saving writes the
    first."""
    written = name
    others: list[str] = []
    for stored, module in family.stored_names:
        others += [other.replace(module, stored) for other in (name, *others) if module in other]
        written = written.replace(module, stored)
    return (written, *(other for other in (*others, name) if other != written))


def stored_tensors(layer: MTPLayer, family: ModelFamily) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an MTP layer by checkpoint name within it, with experts as the family stores
    them: what `load_mtp_layer` reads."""
    for name, tensor in layer.state_dict().items():
        stored = stored_name(name, family)
        stem, _, part = stored.rpartition(".")
        projections = expert_projections(part, family)
        if not projections:
            yield stored, tensor
            continue
        stacks = tensor.chunk(len(projections), 1)
        if part == "gate_up_proj" and family.stacked_gate_up:
            yield from zip(names(joined_gate_up(stem, family)), stacks, strict=True)
            continue
        for projection, stack in zip(projections, stacks, strict=True):
            for index, rows in enumerate(stack):
                yield f"{stem}.{index}.{projection}.weight", rows


def tensors_as_stored(
    layer: MTPLayer, names: Iterable[str], family: ModelFamily
) -> dict[str, Tensor]:
    """The tensors of an MTP layer by the names that a checkpoint has for them within the layer.

    A family may have several names for a tensor. A name is left out where the layer has nothing
    that is stored under it.
    """
    known = {module_name(name, family): tensor for name, tensor in stored_tensors(layer, family)}
    found = {name: known.get(module_name(name, family)) for name in names}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def expert_recipes(stem: str, part: str, family: ModelFamily, count: int) -> Iterator[Join]:
    """How transformers' stack `part` of so many experts is made of what checkpoints store."""
    projections = expert_projections(part, family)
    if projections:  # One by one; gate and up rows are joined.
        stored = [tuple(f"{stem}.{i}.{name}.weight" for name in projections) for i in range(count)]
        each = tuple(Join("cat", parts) if parts[1:] else parts[0] for parts in stored)
        yield Join("stack", each)
    if part == "gate_up_proj" and family.stacked_gate_up:
        yield joined_gate_up(stem, family)


def expert_projections(part: str, family: ModelFamily) -> tuple[str, ...]:
    """What an expert's rows of transformers' stack `part` are called where experts are stored one
    by one; () for other parts."""
    gate, up, down = family.expert_names
    stacks = {"gate_up_proj": (gate, up), "up_proj": (up,), "down_proj": (down,)}
    return stacks.get(part, ())


def joined_gate_up(stem: str, family: ModelFamily) -> Join:
    """Gate and up projections stored as one tensor [E, I, H] each -> transformers' [E, 2I, H]."""
    layer = stem.removesuffix("mlp.experts")
    return Join("cat_rows", tuple(layer + name for name in family.stacked_gate_up or ()))


def dtypes_of(target: Any, family: ModelFamily) -> Callable[[str, bool], torch.dtype]:
    """(name, is a parameter) -> the dtype that transformers would choose for such a tensor.

    A stream head is that of the decoder's own, which checkpoints name as transformers does.
    """
    dtype = target.get_input_embeddings().weight.dtype
    # Buffers (a router's selection bias) and modules that the class names keep at least float32.
    wide = torch.promote_types(dtype, torch.float32)
    kept = set(getattr(target, "_keep_in_fp32_modules_strict", None) or ())
    stored, _ = family.wiring.stream_head or ("", "")
    kept |= {"stream_head"} if stored.rstrip("._") in kept else set()

    def choose(name: str, is_parameter: bool) -> torch.dtype:
        return dtype if is_parameter and not kept & set(name.split(".")) else wide

    return choose


def check_tensors(layer: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Check that tensors, by name within a module, have its names and shapes. Messages say what
    they belong to.

    Raises:
        CheckpointError: tensors are missing, unexpected or misshapen; the message lists them.
    """
    expected = layer.state_dict()
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(
            f"{what}: missing {listing(missing)}; unexpected {listing(unknown)}; {_OTHERS}"
        )
    shapes = [
        f"{name} is {tuple(t.shape)}, expected {tuple(expected[name].shape)}"
        for name, t in tensors.items()
        if t.shape != expected[name].shape
    ]
    if shapes:
        raise CheckpointError(f"{what}: {'; '.join(shapes[:4])}; {_OTHERS}")


def _assign(
    layer: nn.Module, tensors: Mapping[str, Tensor], dtype_of: Callable[[str, bool], torch.dtype]
) -> None:
    """Assign checked tensors, cast to their dtypes, to a module built on the meta device."""
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
    """Allocate uninitialised memory for a module built on the meta device."""
    empty = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        for name, tensor in layer.state_dict().items()
    }
    _assign(layer, empty, dtype_of)

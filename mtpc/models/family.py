"""What a model family declares: what mtpc must know and the transformers model does not say.

A family is a value, not a class hierarchy: one file in this package and one row in `FAMILIES`. Its
fields name the differences between MTP designs: how an MTP layer is wired, which features it is
fed, how its tensors are named in checkpoints, and which state each layer keeps.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from mtpc.errors import OptionError, UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.models.caches import paged_kv_specs
from mtpc.wiring import Rules, WiringRules

if TYPE_CHECKING:
    from mtpc.models.hf import StepParts

Canonical: TypeAlias = "Callable[[nn.Module], nn.Module]"
"""Makes mtpc's module from transformers' one; it shares the parameters and keeps their names."""


@dataclass(frozen=True, kw_only=True)
class MTPWiring(WiringRules):
    """How an MTP layer is wired: the rules of `WiringRules`, and the names of its parts.

    Attributes:
        embedding_norm: checkpoint name of the norm on the embedding (enorm).
        hidden_norm: checkpoint name of the norm on the incoming features (hnorm).
        projection: checkpoint name of the projection 2H -> H of the concatenation; "" if the
            embedding and the features have a projection each.
        final_norm: checkpoint name of the norm after the block; its output goes to the head. "" if
            the layer stores none: the target's final norm takes its place. None: there is no norm.
        embedding_projection: checkpoint name of the embedding's own projection, H -> H, or "".
        hidden_projection: checkpoint name of the features' own projection, H -> H, or ""; the
            layer adds both outputs.
        stream_head: prefix of the stream head's tensor names, in checkpoints and in transformers'
            module; None for layers without residual streams. Features are then all streams.
        streams: config -> residual streams that features hold side by side, [T, streams * H], under
            one norm of that width. By default 1; features [T, streams, H] have a norm of width H.
        only_rules: the rules that have a meaning for these layers; () is all.
    """

    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str | None
    embedding_projection: str = ""
    hidden_projection: str = ""
    stream_head: tuple[str, str] | None = None
    streams: Callable[[Any], int] = lambda config: 1
    only_rules: tuple[str, ...] = ()

    def joints(self) -> dict[str, str]:
        """Submodule name in `MTPLayer` -> checkpoint name, for norms and projections."""
        names: dict[str, str | None] = {
            "embedding_norm": self.embedding_norm,
            "hidden_norm": self.hidden_norm,
            "projection": self.projection,
            "embedding_projection": self.embedding_projection,
            "hidden_projection": self.hidden_projection,
            "final_norm": self.final_norm,
        }
        return {joint: name for joint, name in names.items() if name}


NO_LAYERS = MTPWiring(embedding_norm="", hidden_norm="", projection="", final_norm="")
"""The wiring of families without MTP layers."""


@dataclass(frozen=True)
class VisionParts:
    """Where a family's vision tower is, in transformers and in checkpoints.

    Attributes:
        hf_class: transformers' class with `get_image_features`.
        takes: what transformers' image processor makes of an image, see `mtpc.models.vision`.
        modules: the modules of `hf_class` that make embeddings -> prefixes of their tensors' names
            in checkpoints, the released one first.
    """

    hf_class: str
    takes: Literal["grids", "crops"]
    modules: Mapping[str, tuple[str, ...]]


def nextn_layers(config: Any) -> int:
    return int(getattr(config, "num_nextn_predict_layers", 0) or 0)


@dataclass(frozen=True)
class ModelFamily:
    """One row of the family table.

    Attributes:
        name: short name for messages and docs.
        architectures: `architectures` entries of config.json that this family serves.
        class_name: name of the target's class in transformers, if it is not the first architecture.
        own_class: returns the target's class if transformers has none, or one whose tensors are not
            those of checkpoints.
        hf_config_class: name of the config's class in transformers, if it is not the target's own.
        wiring: how an MTP layer joins embedding and features.
        num_mtp_layers: config -> number of MTP layers; None if the config does not say: loading
            then counts them in the checkpoint.
        layer_prefix: (num_hidden_layers, i) -> checkpoint prefix of MTP layer i. By default the
            layer has the number that follows the decoder layers.
        block_prefix: prefix of the decoder block's names below `layer_prefix`.
        block_config: config -> config that builds the decoder block of an MTP layer; the block's
            layer index is num_hidden_layers + i. By default a copy.
        make_block: (class of the target's layers, config, layer index) -> the decoder block of an
            MTP layer, where it is not one of those layers.
        hands_on: config -> whether a step's first draft hands a value of each row to the later
            drafts: the second result of an MTP layer's block. They give the block that of the last
            accepted row, as `mtpc_handed`.
        make_layer: (wiring, layer index, what it has of its own) -> a drafter that is no MTP layer.
        cache_specs: (config, layer index, dtype) -> state buffers of a layer, `kv.<layer>.*`.
        caches_per_layer: layers that `config.num_hidden_layers` counts, each with state of its own,
            in one of the decoder's layers.
        cache_kinds: dataclasses that hold the state of a layer, added to those of `caches`. A class
            is used for the layers whose buffer roles are the names of its fields.
        shared_tensors: names of an MTP layer's embedding and output head, which checkpoints may
            store. A tensor that equals the target's is shared with it; see `WiringRules.head`.
        common_tensors: names within an MTP layer -> the stored name of the one tensor that all MTP
            layers have there.
        canonical: name of a transformers class -> what makes the module that replaces it. For
            classes that transformers' interfaces cannot redirect to mtpc.
        as_decoded: changes a target of transformers so that its own forward over a whole text
            computes what decoding computes, where transformers makes a difference.
        parts: how target, heads and drafts are stepped; None: as transformers runs them.
        position_grids: coordinates of a position in the rotary embedding. Multimodal models have
            three (time, height, width); a text token has the same number in all of them.
        vision: its vision tower; None: mtpc runs the text model only.
        rotary_type: (config, i) -> rotary embedding of MTP layer i (transformers' `layer_type`);
            None if the model has only one.
        stored_names: pairs (part of a name in checkpoints, in transformers' modules) for decoder
            layers and MTP blocks, replaced in order. If several pairs name one module part,
            saving writes the first, and loading reads all.
        stored_prefixes: pairs (name prefix in the target, prefix that checkpoints may have instead:
            of a text model inside a multimodal one, or the reverse).
        expert_names: gate, up and down projection of an expert that is stored by itself; the gate
            is "" where experts have none.
        stacked_gate_up: names, within a decoder layer, of two tensors [E, I, H]: the gate and the
            up projections of all experts. None if checkpoints do not store experts that way.
        computed: entries of config.json -> the value that mtpc and transformers' layers compute in
            any case. A dot leads into an entry that has entries. Other values are refused.
        config_entries: entries of a released config.json -> those of transformers' config, where
            transformers does not convert them itself.
        released_entries: config.json entries that other readers (vLLM) need and transformers does
            not write; saving adds those that the config lacks.
    """

    name: str
    architectures: tuple[str, ...]
    wiring: MTPWiring
    num_mtp_layers: Callable[[Any], int | None] = nextn_layers
    layer_prefix: Callable[[int, int], str] = lambda layers, index: (
        f"model.layers.{layers + index}."
    )
    cache_specs: Callable[[Any, int, torch.dtype], tuple[BufferSpec, ...]] = paged_kv_specs
    block_config: Callable[[Any], Any] = copy.deepcopy
    make_block: Callable[[Any, Any, int], nn.Module] = lambda layer, config, index: layer(
        config, index
    )
    make_layer: Callable[[MTPWiring, int, Collection[str]], Any] | None = None
    hands_on: Callable[[Any], bool] = lambda config: False
    caches_per_layer: int = 1
    cache_kinds: tuple[type, ...] = ()
    shared_tensors: Mapping[str, Literal["embedding", "head"]] = field(default_factory=dict)
    common_tensors: Mapping[str, str] = field(default_factory=dict)
    canonical: Mapping[str, Canonical] = field(default_factory=dict)
    as_decoded: Callable[[Any], None] = lambda target: None
    parts: StepParts | None = None
    block_prefix: str = ""
    position_grids: int = 1
    vision: VisionParts | None = None
    rotary_type: Callable[[Any, int], str | None] = lambda config, index: None
    stored_names: tuple[tuple[str, str], ...] = ()
    stored_prefixes: tuple[tuple[str, str], ...] = ()
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked_gate_up: tuple[str, str] | None = None
    class_name: str = ""
    hf_config_class: str = ""
    own_class: Callable[[], type[nn.Module]] | None = None
    released_entries: Mapping[str, Any] = field(default_factory=dict)
    computed: Mapping[str, Any] = field(default_factory=dict)
    config_entries: Callable[[dict[str, Any]], dict[str, Any]] = lambda entries: entries

    @property
    def hf_class(self) -> str:
        return self.class_name or self.architectures[0]

    def num_layers(self, config: Any) -> int:
        """Layers of a target; its config counts each `caches_per_layer` times."""
        return int(config.num_hidden_layers) // self.caches_per_layer

    def inner_names(self) -> dict[str, str]:
        """Patterns of stored names inside a multimodal model -> what they become in the text model:
        `key_mapping` of transformers, which does so by itself for some models only."""
        inside = [(own, stored) for own, stored in self.stored_prefixes if stored.endswith(own)]
        inside += [(own, s) for own, s in self.stored_prefixes if s.startswith(own)]
        return {f"^{re.escape(stored)}": own for own, stored in inside}

    def wired(self, rules: Rules) -> ModelFamily:
        """This family with other rules for its MTP layers.

        Raises:
            OptionError: a rule has no meaning for these layers.
        """
        if not rules:
            return self
        only = self.wiring.only_rules
        wrong = [name for name, _ in rules if only and name not in only]
        if wrong:
            raise OptionError(
                f"wiring has {wrong[0]}, which has no meaning for the drafter of {self.name}; "
                f"expected one of {', '.join(only)}"
            )
        given: dict[str, Any] = dict(rules)
        return replace(self, wiring=replace(self.wiring, **given))


def layers_after(config: Any, count: int | None = None, **kinds: str) -> Any:
    """A copy of the config whose lists of layer kinds go on for `count` MTP layers; by default as
    many as `nextn_layers` says.

    For blocks that look their kind up by index. `kinds` has the MTP layers' kind by the name of the
    list, for instance `mlp_layer_types="sparse"`. A list that the config lacks is left out.
    """
    extended, count = copy.deepcopy(config), nextn_layers(config) if count is None else count
    for name, kind in kinds.items():
        if getattr(extended, name, None) is not None:
            setattr(extended, name, [*getattr(extended, name), *([kind] * count)])
    return extended


def check_computed(entries: Mapping[str, Any], computed: Mapping[str, Any]) -> None:
    """Check entries of config.json by `ModelFamily.computed`. An absent or null one is right.

    Raises:
        UnsupportedModelError: one asks for what is not computed.
    """
    for name, value in computed.items():
        found: Any = entries
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found not in (None, value) and (found or value is not None):
            raise UnsupportedModelError(
                f"the config has {name} {found!r}; expected {value!r}, which is what mtpc computes "
                "with transformers' layers"
            )


def find_norm_class(block: Any) -> type[nn.Module]:
    """The RMSNorm class of a decoder block, taken from its input norm, or else its first norm."""
    norm = getattr(block, "input_layernorm", None) or getattr(block, "norm", None)
    return type(norm or next(m for n, m in block.named_modules() if n.endswith("norm")))

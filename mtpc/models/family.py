"""What a model family declares: everything mtpc needs to know that the HF model does not say.

A family is a value, not a class hierarchy: one file in this package, one row in `FAMILIES`.
The fields name what differs between known MTP designs, including those of families that other
files will add: chain rule (recycled single layer, or true chaining of n layers), which features
feed the draft, and per-layer state that is not a paged K/V pool.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from mtpc.layout import BufferSpec

if TYPE_CHECKING:
    from mtpc.models.hf import StepParts

MTP_COUNT_NAMES = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Config entries that announce MTP layers, in the order in which they are believed."""
Canonical: TypeAlias = "Callable[[nn.Module], nn.Module]"
"""Makes a module of ours from transformers', with its parameters under their names."""


@dataclass(frozen=True)
class MTPWiring:
    """How an MTP layer joins the token embedding with the features fed to it.

    Attributes:
        embedding_norm: checkpoint name of the norm on the embedding (enorm).
        hidden_norm: checkpoint name of the norm on the incoming features (hnorm).
        projection: checkpoint name of the 2H -> H projection; "" where the two are projected apart.
        final_norm: checkpoint name of the norm after the block; its output is what the head
            sees and what the next draft step is fed.
        embedding_projection: without concatenation: the projection of the embedding, H -> H.
        hidden_projection: the same of the incoming features; the two are added.
        stream_head: how the checkpoint's names of what joins residual streams for the head begin
            (transformers' begin with "hc_" there), or "".
        hidden_first: concat order; False is [embedding, hidden].
        zero_first_embedding: the embedding at sequence position 0 is zeroed.
        target_features: which hidden state of the target feeds the draft.
        chain: drafts beyond the number of MTP layers. "recycle" applies the last layer again and
            again on its own output; with one layer these are all drafts but the first. Up to that
            number, draft i is MTP layer i's, run over all rows (see `mtpc.step.chaining`).
    """

    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    embedding_projection: str = ""
    hidden_projection: str = ""
    stream_head: str = ""
    hidden_first: bool = False
    zero_first_embedding: bool = False
    target_features: Literal["after_final_norm", "before_stream_head"] = "after_final_norm"
    chain: Literal["recycle"] = "recycle"

    def joints(self) -> dict[str, str]:
        """Checkpoint name of each joint that an `MTPLayer` has, by its name there."""
        names = {
            "embedding_norm": self.embedding_norm,
            "hidden_norm": self.hidden_norm,
            "projection": self.projection,
            "embedding_projection": self.embedding_projection,
            "hidden_projection": self.hidden_projection,
            "final_norm": self.final_norm,
            "stream_head": self.stream_head,
        }
        return {joint: name for joint, name in names.items() if name}


@dataclass(frozen=True)
class ModelFamily:
    """One row of the family table.

    Attributes:
        name: short name, as in messages and docs.
        architectures: `architectures` entries of config.json that this family serves.
        hf_class: transformers class name to build the target with.
        own_class: makes that class where transformers has its layers, but not the class.
        hf_config_class: transformers config class name.
        wiring: the MTP layer's joints.
        num_mtp_layers: config -> number of MTP layers it announces; None where it does not say:
            then they are counted in the checkpoint.
        layer_prefix: (num_hidden_layers, i) -> checkpoint prefix of MTP layer i.
        block_prefix: what stands between that prefix and the names of the decoder block.
        block_config: config -> config to build the MTP block with; the block's layer index is
            num_hidden_layers + i.
        cache_specs: (config, layer index, dtype) -> per-layer state buffers, named `kv.<layer>.*`.
        shared_tensors: names in an MTP layer that checkpoints may carry and that repeat a tensor
            of the target: its "embedding" or its "head".
        canonical: transformers classes that no seam can express, by name, and what stands in.
        parts: how target, heads and drafts are stepped; None is as transformers runs them.
        position_grids: numbers that a position has for rotary embedding; more than one (time,
            height, width) where the model knows images; text has the same in all.
        rotary_type: (config, i) -> which of the model's rotary embeddings MTP layer i has, where
            there are several (transformers' `layer_type`); None for others.
        stored_names: pairs (in checkpoints, in transformers' modules) of parts of names, for
            decoder layers and MTP blocks, each replaced in turn. Of several pairs for one module
            part the first is written, and all are read.
        stored_prefixes: name prefix of the target -> prefix that checkpoints may store in its
            place (a text model inside a multimodal one, or the reverse).
        expert_names: gate, up and down projection of an expert stored by itself.
        released_entries: of config.json: what transformers takes for granted and other readers
            (vLLM) look up; written where the config does not say otherwise.
    """

    name: str
    architectures: tuple[str, ...]
    hf_class: str
    hf_config_class: str
    wiring: MTPWiring
    num_mtp_layers: Callable[[Any], int | None]
    layer_prefix: Callable[[int, int], str]
    cache_specs: Callable[[Any, int, torch.dtype], tuple[BufferSpec, ...]]
    block_config: Callable[[Any], Any]
    shared_tensors: Mapping[str, Literal["embedding", "head"]] = field(default_factory=dict)
    canonical: Mapping[str, Canonical] = field(default_factory=dict)
    parts: StepParts | None = None
    block_prefix: str = ""
    position_grids: int = 1
    rotary_type: Callable[[Any, int], str | None] = lambda config, index: None
    stored_names: tuple[tuple[str, str], ...] = ()
    stored_prefixes: Mapping[str, str] = field(default_factory=dict)
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    own_class: Callable[[], type[nn.Module]] | None = None
    released_entries: Mapping[str, str] = field(default_factory=dict)


def full_attention_after(config: Any, count: int) -> Any:
    """A copy of a config in which `count` layers after the last are full attention.

    For blocks that look their layer type up by index.
    """
    extended = copy.deepcopy(config)
    if getattr(extended, "layer_types", None) is not None:
        extended.layer_types = [*extended.layer_types, *(["full_attention"] * count)]
    return extended


def find_norm_class(layer: Any) -> type[nn.Module]:
    """The RMSNorm class a decoder layer uses (its input norm's)."""
    return type(layer.input_layernorm)

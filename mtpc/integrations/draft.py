"""The traced draft: one MTP layer of a family as an FX graph over the host's attention.

It knows no host. A host's plugin gives it a config, a function that makes the host's attention
module for each `AttentionSite`, the embedding, and the checkpoint's tensors; it owns the layer's
weights and computes rotary embeddings itself. Nothing is global: any number of drafts, for any
models, live in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from mtpc.capture.trace import TRACE_TOKENS, export_piece
from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.integrations.attention_site import AttentionSite, SiteRecorder
from mtpc.integrations.draft_config import draft_config
from mtpc.models.family import ModelFamily
from mtpc.models.hf import (
    MTPLayer,
    TextRotary,
    model_class,
    register_seams,
    run_mtp_layer,
    stand_in,
    use_seams,
)
from mtpc.models.mtp_layers import (
    allocate,
    build_mtp_layer,
    check_tensors,
    dtypes_of,
    layer_tensors,
)
from mtpc.passes.canonicalise import drop_identities
from mtpc.weights.checkpoint import check_finite, listing


@dataclass(frozen=True)
class DraftOptions:
    """How a draft is built.

    Attributes:
        index: MTP layer, from 0.
        dtype: of the weights (what a family keeps in float32 stays so).
        device: where the weights are.
        architecture: see `draft_config`.
        zero_first_embedding: whether the embedding at position 0 is zeroed; None: as the family's
            authors do. Hosts may do otherwise; it decides what is drafted, not what is emitted.
        returns: "after_final_norm" is what the head takes, and what all families' authors feed to
            the next draft step. "before_final_norm", for hosts that recycle that, leaves the norm
            to the host: it calls `TracedDraft.final_norm` before its head.
    """

    index: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    architecture: str | None = None
    zero_first_embedding: bool | None = None
    returns: Literal["after_final_norm", "before_final_norm"] = "after_final_norm"


class TracedDraft(nn.Module):
    """One MTP layer over flat rows: (input_ids [T], positions [T], hidden [T, H]) -> [T, H].

    Row t pairs the hidden state of position t with the token of position t + 1, as every host
    does. Hidden is the target's, after its final norm, or what the draft itself returned. The head
    is the host's.

    Args:
        source: what `draft_config` takes.
        make_attention: the host's attention module for a site; called once for each, after
            tracing. It may have weights of its own, which are no concern of `load_weights`.
        options: see there.

    Attributes:
        family: the model's.
        config: a private copy, of transformers' class.
        embedding: token ids [T] -> [T, H]; None until the host sets it.
        graph: the traced layer: (embeddings [T, H], positions [T], hidden [T, H]) -> [T, H].
        sites: its attention sites, in the order of `graph.sites`, the host's modules.

    Raises:
        UnsupportedModelError: see `draft_config`.
    """

    def __init__(
        self,
        source: Any,
        make_attention: Callable[[AttentionSite], nn.Module],
        options: DraftOptions | None = None,
    ):
        super().__init__()
        options = options or DraftOptions()
        self.family, self.config = draft_config(source, options.architecture)
        self.index = options.index
        rows = _build(self.family, self.config, options)
        width = self.config.get_text_config(decoder=True).hidden_size
        self.graph = _trace(rows, width, options)
        self.sites = rows.recorder.sites()
        modules = [make_attention(site) for site in self.sites]
        _call_host(self.graph, modules)
        self.embedding: Any = None

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        hidden_states: Tensor,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Embeddings [T, H] may be given in place of ids. Returns [T, H]; see `DraftOptions`."""
        if inputs_embeds is None:
            inputs_embeds = self.embedding(input_ids)
        return self.graph(inputs_embeds, positions, hidden_states)

    @property
    def layer(self) -> MTPLayer:
        """The module that was traced; it owns the weights."""
        layer = self.graph.get_submodule("inner.layer")
        assert isinstance(layer, MTPLayer)
        return layer

    @property
    def final_norm(self) -> nn.Module:
        """The norm before the head: the host's to call where the draft returns what precedes it."""
        return self.layer.final_norm

    @property
    def prefix(self) -> str:
        """Where the layer's tensors are in a checkpoint."""
        text = self.config.get_text_config(decoder=True)
        return self.family.layer_prefix(text.num_hidden_layers, self.index)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy this layer's weights out of a checkpoint's tensors, in place.

        Args:
            weights: (name in the checkpoint, tensor); what is not this layer's is passed over.

        Returns:
            Names that were this layer's, with copies of the target's embedding and head, which
            are left to the host.

        Raises:
            CheckpointError: tensors missing, unexpected, of another shape, of 8 bits, or not
                finite; the message lists them.
        """
        prefix, what = self.prefix, f"MTP layer {self.index} of {self.family.name}"
        given = {n: t for n, t in weights if n.startswith(prefix)}
        own = {n.removeprefix(prefix): t for n, t in given.items()}
        own = {n: t for n, t in own.items() if n not in self.family.shared_tensors}
        quantised = sorted(n for n, t in own.items() if t.dtype.itemsize == 1)
        if quantised:
            raise CheckpointError(
                f"{what}: {len(quantised)} tensor(s) of 8 bits: {listing(quantised)}; "
                "expected an unquantised checkpoint"
            )
        tensors = layer_tensors(own, self.family)
        check_tensors(self.layer, tensors, what)
        check_finite(tensors.items(), what)
        self.layer.load_state_dict(tensors)
        return set(given)


class _Rows(nn.Module):
    """What is traced: (embeddings [T, H], positions [T], hidden [T, H]) -> [T, H]."""

    def __init__(self, layer: MTPLayer, rotary: TextRotary, normed: bool):
        super().__init__()
        self.layer, self.rotary, self.normed = layer, rotary, normed
        self.recorder = SiteRecorder()

    def forward(self, embedding: Tensor, positions: Tensor, features: Tensor) -> Tensor:
        self.recorder.begin(positions)
        hidden = run_mtp_layer(self.layer, self.rotary, embedding, features, self.recorder)
        return self.layer.final_norm(hidden) if self.normed else hidden


def _build(family: ModelFamily, config: Any, options: DraftOptions) -> _Rows:
    """The layer from transformers' classes, with memory for its weights but no weights."""
    text = config.get_text_config(decoder=True)
    count = family.num_mtp_layers(text)
    if count is None:  # The config does not say; the checkpoint's tensors will.
        text.num_nextn_predict_layers = options.index + 1
    elif options.index >= count:
        raise UnsupportedModelError(
            f"{family.name}: MTP layer {options.index} was asked for, counted from 0; the config "
            f"announces {count}"
        )
    register_seams()
    device = torch.device(options.device)
    with torch.device("meta"):
        target: Any = model_class(family)(config).to(options.dtype)
        use_seams(target.config)
        layer = build_mtp_layer(family, target, options.index).eval()
    decoder, text = target.get_decoder(), target.config.get_text_config(decoder=True)
    if options.zero_first_embedding is not None:
        layer.wiring = replace(layer.wiring, zero_first_embedding=options.zero_first_embedding)
    allocate(layer, dtypes_of(target), device)
    stand_in(layer, family.canonical)
    with device:
        frequencies = type(decoder.rotary_emb)(text)
    rotary = TextRotary(frequencies, family.position_grids, family.rotary_type(text, options.index))
    return _Rows(layer, rotary, options.returns == "after_final_norm").eval()


def _trace(rows: _Rows, width: int, options: DraftOptions) -> fx.GraphModule:
    """The rows as a graph with a symbolic number of tokens, over the layer's own tensors."""
    floats = torch.zeros(TRACE_TOKENS, width, dtype=options.dtype, device=options.device)
    positions = torch.zeros(TRACE_TOKENS, dtype=torch.int64, device=options.device)
    example = (floats, positions, torch.zeros_like(floats))
    traced = export_piece(rows, example)
    # Besides casts that cast nothing: latents are expanded by the model, and used as they are.
    drop_identities(traced.graph)
    # A plain module, for hosts call eval() on it, which export's refuses; and in it the traced
    # module itself in place of a copy of its tree: one owner of each tensor.
    plain = fx.GraphModule(traced, traced.graph)
    plain.add_module("inner", rows)
    return plain


def _call_host(traced: fx.GraphModule, modules: list[nn.Module]) -> None:
    """Replace the marks of sites by calls of the host's modules."""
    traced.add_module("sites", nn.ModuleList(modules))
    for node in list(traced.graph.nodes):
        if node.target is not torch.ops.mtpc.host_attention.default:
            continue
        *operands, _, index = node.args
        with traced.graph.inserting_before(node):
            call = traced.graph.call_module(f"sites.{index}", tuple(operands))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        traced.graph.erase_node(node)
    traced.graph.lint()
    traced.recompile()

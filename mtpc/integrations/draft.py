"""The traced draft: one MTP layer of a model as an FX graph that calls the host's attention.

It depends on no particular host. A host's plugin gives it a config, a function that makes the
host's attention module for each `AttentionSite`, the embedding, and the checkpoint's tensors. The
draft computes everything else itself, unless the host gives `HostLayers`, which compute the linear
layers and the experts. It has no global state: a process may have any number of drafts of any
models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from mtpc.capture.trace import TRACE_TOKENS, export_piece
from mtpc.errors import UnsupportedModelError
from mtpc.integrations.attention_site import AttentionSite, SiteRecorder
from mtpc.integrations.draft_config import draft_config, hosted_layer
from mtpc.integrations.layer_sites import HostLayers, Marks, mark_layers
from mtpc.integrations.layer_weights import Hosted, LayerWeights
from mtpc.models.family import ModelFamily
from mtpc.models.hf import HostedLayer, MTPLayer, TextRotary, model_class, rotary_of
from mtpc.models.mtp_layers import allocate, build_mtp_layer, dtypes_of, stored_name
from mtpc.models.seams import register_seams, stand_in, use_seams
from mtpc.passes.canonicalise import drop_identities


@dataclass(frozen=True)
class DraftOptions:
    """Options of a draft.

    Attributes:
        index: index of the MTP layer, from 0.
        dtype: dtype of the weights. Weights that the family keeps in float32 stay in float32.
        device: device of the weights.
        architecture: see `draft_config`.
        zero_first_embedding: whether the embedding at position 0 is zeroed; None follows the
            model's authors, from whom a host may differ. It changes drafts, but no emitted token.
        returns: "after_final_norm" returns the head's input. "before_final_norm" returns the hidden
            state before the norm; the host then calls `TracedDraft.final_norm` before its head.
            None returns what the model's wiring feeds to the next draft.
    """

    index: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    architecture: str | None = None
    zero_first_embedding: bool | None = None
    returns: Literal["after_final_norm", "before_final_norm"] | None = None


class TracedDraft(nn.Module):
    """One MTP layer over flat rows: (input_ids [T], positions [T], hidden [T, W]) -> [T, W].

    W is H or, for a layer with residual streams, streams * H, as hosts pass them on.

    Row t pairs the hidden state of position t with the token of position t + 1, as every host
    does. The hidden state is the target's, or a previous result of the draft; see
    `WiringRules.first_features` for which of the target's. The host has the head.

    Args:
        source: the source of the config, see `draft_config`.
        make_attention: makes the host's attention module for a site. It is called once for each
            site, after tracing. A module may have its own weights, which `load_weights` ignores.
        options: see `DraftOptions`; None uses the defaults.
        layers: makes and loads the host's linear layers and experts. None: the draft has its own,
            and runs on one rank.

    Attributes:
        family: the model's family.
        config: a private copy of the config, of transformers' own class.
        embedding: maps token ids [T] to [T, H]; None until the host sets it.
        graph: the traced layer: (embeddings [T, H], positions [T], hidden [T, W]) -> [T, W].
        sites: the attention sites. `graph.sites` has the host's modules in the same order.
        hosted: the layers that the host computes, by the names of their modules in the layer.
        own: the layer's stored embedding and head [V, H], by role, if they differ from the
            target's. The graph uses neither; see `check_ends`.

    Raises:
        UnsupportedModelError: see `draft_config` and `mark_layers`; or the config has no MTP layer
            of this index.
        OptionError: see `mark_layers`.
        CheckpointError: see `draft_config`.
    """

    def __init__(
        self,
        source: Any,
        make_attention: Callable[[AttentionSite], nn.Module],
        options: DraftOptions | None = None,
        layers: HostLayers | None = None,
    ):
        super().__init__()
        options = options or DraftOptions()
        self.family, self.config = draft_config(
            source, options.architecture, host_loads=layers is not None
        )
        self.index, self._layers = options.index, layers
        ranks = None if layers is None else layers.ranks
        rows, marks = _build(self.family, self.config, options, ranks)
        self.graph = _trace(rows, self.config.get_text_config(decoder=True), options)
        self.hosted = _host_layers(self.graph, marks, layers) if layers is not None else {}
        linears = [self.hosted[name].module for name in marks.linears]
        self.sites = rows.recorder.sites(linears)
        modules = [make_attention(site) for site in self.sites]
        _call_host(self.graph, "attention", "sites", modules)
        self.embedding: Any = None
        self.own: dict[str, Tensor] = {}

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        hidden_states: Tensor,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Run the layer once.

        Args:
            input_ids: int64 [T]; may be None if `inputs_embeds` is given.
            positions: int64 [T].
            hidden_states: [T, W].
            inputs_embeds: [T, H], embeddings to use instead of those of `input_ids`.

        Returns:
            [T, W] before the final norm, [T, H] after it; see `DraftOptions.returns`.
        """
        if inputs_embeds is None:
            inputs_embeds = self.embedding(input_ids)
        return self.graph(inputs_embeds, positions, hidden_states)

    @property
    def layer(self) -> MTPLayer:
        """The traced module, which owns the weights."""
        layer = self.graph.get_submodule("inner.layer")
        assert isinstance(layer, MTPLayer)
        return layer

    @property
    def final_norm(self) -> nn.Module:
        """What stands before the head: the final norm and, before it, the stream head of a layer
        with residual streams: [T, W] -> [T, H]. The host calls it if `returns_normed` is false."""
        return self._rows.hosted.readout(self.layer)

    @property
    def returns_normed(self) -> bool:
        """Whether results are hidden states after the final norm; see `DraftOptions.returns`."""
        return self._rows.normed

    @property
    def _rows(self) -> _Rows:
        rows = self.graph.get_submodule("inner")
        assert isinstance(rows, _Rows)
        return rows

    @property
    def prefix(self) -> str:
        """The prefix of the layer's tensor names in a checkpoint."""
        text = self.config.get_text_config(decoder=True)
        return self.family.layer_prefix(text.num_hidden_layers, self.index)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load this layer's weights in place from a checkpoint's tensors.

        Args:
            weights: pairs of a name in the checkpoint and a tensor. Tensors of other layers are
                ignored. The target's embedding and head should be among them, see `own`.

        Returns:
            The layer's names in the checkpoint. They include the layer's copies of the target's
            embedding and head, which are not loaded, because the host has these.

        Raises:
            CheckpointError: tensors are missing, unexpected, of a wrong shape or not finite, or
                have 8 bits in a layer that the draft computes itself. The message lists them.
        """
        loader = self.loader()
        for name, tensor in weights:
            loader.take(name, tensor)
        return loader.finish()

    def loader(self) -> LayerWeights:
        """A loader of this layer's weights, for hosts that offer each tensor to several drafts."""
        return LayerWeights(self, self.hosted, self._layers)

    def check_ends(self) -> None:
        """Check that the layer can use the target's embedding and head.

        Raises:
            UnsupportedModelError: the layer's own embedding or head differs from the target's.
        """
        if self.own:
            raise UnsupportedModelError(
                f"{self.family.name}: MTP layer {self.index} is stored with a different "
                f"{' and '.join(sorted(self.own))} than the target's, and a traced draft in a host "
                "has the target's: its drafts would be wrong; use the host's own draft"
            )


class _Rows(nn.Module):
    """The module to trace: (embeddings [T, H], positions [T], hidden [T, W]) -> [T, W].

    The result is [T, H] behind the final norm.
    """

    def __init__(self, layer: MTPLayer, rotary: TextRotary, hosted: HostedLayer, normed: bool):
        super().__init__()
        self.layer, self.rotary, self.hosted, self.normed = layer, rotary, hosted, normed
        self.recorder = SiteRecorder()

    def forward(self, embedding: Tensor, positions: Tensor, features: Tensor) -> Tensor:
        self.recorder.begin(positions)
        hidden = self.hosted.run(self.layer, self.rotary, embedding, features, self.recorder)
        out: Tensor = self.hosted.readout(self.layer)(hidden) if self.normed else hidden
        return out


def _build(
    family: ModelFamily, config: Any, options: DraftOptions, ranks: int | None
) -> tuple[_Rows, Marks]:
    """Build the layer from transformers' classes, with uninitialised weights.

    With `ranks`, the layers that the host computes are replaced by marks; see `mark_layers`.
    """
    text = config.get_text_config(decoder=True)
    count = family.num_mtp_layers(text)
    if count is None:  # The config has no count; `load_weights` checks that the tensors exist.
        text.num_nextn_predict_layers = options.index + 1
    elif options.index >= count:
        raise UnsupportedModelError(
            f"{family.name}: MTP layer {options.index} was asked for, counted from 0; the config "
            f"announces {count}"
        )
    if not family.wiring.final_norm:
        raise UnsupportedModelError(
            f"{family.name}: its MTP layer has no final norm of its own, and a traced draft in a "
            "host has no target to take one from; use the host's own draft"
        )
    register_seams()
    device = torch.device(options.device)
    with torch.device("meta"):
        target: Any = model_class(family)(config).to(options.dtype)
        use_seams(target.config)
        layer = build_mtp_layer(family, target, options.index).eval()
    marks = Marks({}, {})
    if ranks is not None:
        prefix = family.layer_prefix(text.num_hidden_layers, options.index)

        def checkpoint_name(module: str) -> str:
            return prefix + stored_name(f"{module}.weight", family).removesuffix(".weight")

        marks = mark_layers(layer, target, ranks, checkpoint_name, family.expert_names)
    decoder, text = target.get_decoder(), target.config.get_text_config(decoder=True)
    if options.zero_first_embedding is not None:
        layer.wiring = replace(layer.wiring, zero_first_embedding=options.zero_first_embedding)
    allocate(layer, dtypes_of(target, family), device)
    stand_in(layer, family.canonical)
    with device:
        own = rotary_of(decoder)
        frequencies = own and type(own)(text)
    rotary = TextRotary(frequencies, family.position_grids, family.rotary_type(text, options.index))
    hosted = hosted_layer(family)
    assert hosted is not None  # See `draft_config`.
    # Streams are fed as they are, and joined for the head alone.
    fed = layer.wiring.next_features if hosted.width(text) == text.hidden_size else "before"
    normed = (options.returns or f"{fed}_final_norm") == "after_final_norm"
    return _Rows(layer, rotary, hosted, normed).eval(), marks


def _trace(rows: _Rows, text: Any, options: DraftOptions) -> fx.GraphModule:
    """Trace the rows as a graph with a symbolic number of tokens, over the layer's own tensors."""
    embeddings, features = (
        torch.zeros(TRACE_TOKENS, width, dtype=options.dtype, device=options.device)
        for width in (text.hidden_size, rows.hosted.width(text))
    )
    positions = torch.zeros(TRACE_TOKENS, dtype=torch.int64, device=options.device)
    example = (embeddings, positions, features)
    traced = export_piece(rows, example)
    # This also drops the model's own expansion of latents, which sites use unexpanded.
    drop_identities(traced.graph)
    # Hosts call eval(), which export's module refuses, so this is a plain fx.GraphModule. It
    # contains the traced module instead of a copy, so that each tensor has one owner.
    plain = fx.GraphModule(traced, traced.graph)
    plain.add_module("inner", rows)
    return plain


def _host_layers(traced: fx.GraphModule, marks: Marks, host: HostLayers) -> dict[str, Hosted]:
    """Replace calls of marks with calls of the host's layers, which are returned by module name."""
    calls = {node.args[2]: node for node in _marks(traced, "experts")}
    hosted = {
        name: Hosted(found.site, host.linear(found.site)) for name, found in marks.linears.items()
    }
    linears = [layer.module for layer in hosted.values()]
    experts = []
    for name, marked in marks.experts.items():
        _, ids, _ = calls[marked.site.index].args[0]
        site = replace(marked.site, top_k=ids.meta["val"].shape[-1])
        experts.append(host.experts(site))
        hosted[name] = Hosted(site, experts[-1])
    _call_host(traced, "linear", "linears", linears)
    _call_host(traced, "experts", "experts", experts)
    return hosted


def _marks(traced: fx.GraphModule, kind: str) -> list[Any]:
    """The calls that mark sites of a kind; see `host_site`."""
    mark = torch.ops.mtpc.host_site.default
    nodes = traced.graph.find_nodes(op="call_function", target=mark)
    return [node for node in nodes if node.args[1] == kind]


def _call_host(traced: fx.GraphModule, kind: str, name: str, modules: Sequence[nn.Module]) -> None:
    """Replace the marks of sites of a kind with calls of the host's modules."""
    traced.add_module(name, nn.ModuleList(modules))
    for node in _marks(traced, kind):
        with traced.graph.inserting_before(node):
            call = traced.graph.call_module(f"{name}.{node.args[2]}", tuple(node.args[0]))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        traced.graph.erase_node(node)
    traced.graph.lint()
    traced.recompile()

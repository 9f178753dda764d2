"""The traced draft: one MTP layer of a model as an FX graph that calls the host's attention.

It depends on no particular host. A host's plugin gives it a config, a function that makes the
host's attention module for each `AttentionSite`, the embedding, and the checkpoint's tensors. The
draft owns the layer's weights and computes rotary embeddings itself. It has no global state: a
process may have any number of drafts of any models.
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
    rotary_of,
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

_ENDS = {"embedding": "embed_tokens.weight", "head": "lm_head.weight"}
"""Role -> how the name of the target's own tensor ends."""


@dataclass(frozen=True)
class DraftOptions:
    """Options of a draft.

    Attributes:
        index: index of the MTP layer, from 0.
        dtype: dtype of the weights. Weights that the family keeps in float32 stay in float32.
        device: device of the weights.
        architecture: see `draft_config`.
        zero_first_embedding: whether the embedding at position 0 is zeroed; None follows the
            model's authors. A host may differ from them. This changes the drafts, but not the
            emitted tokens.
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
    """One MTP layer over flat rows: (input_ids [T], positions [T], hidden [T, H]) -> [T, H].

    Row t pairs the hidden state of position t with the token of position t + 1, as every host
    does. The hidden state is the target's, or a previous result of the draft; see
    `WiringRules.first_features` for which of the target's. The host has the head.

    Args:
        source: the source of the config, see `draft_config`.
        make_attention: makes the host's attention module for a site. It is called once for each
            site, after tracing. A module may have its own weights, which `load_weights` ignores.
        options: see `DraftOptions`; None uses the defaults.

    Attributes:
        family: the model's family.
        config: a private copy of the config, of transformers' own class.
        embedding: maps token ids [T] to [T, H]; None until the host sets it.
        graph: the traced layer: (embeddings [T, H], positions [T], hidden [T, H]) -> [T, H].
        sites: the attention sites. `graph.sites` has the host's modules in the same order.
        own: the embedding and the head [V, H] that are stored with the layer and differ from the
            target's, by role. The graph uses neither; see `check_ends`.

    Raises:
        UnsupportedModelError: see `draft_config`; or the config has no MTP layer of this index.
        CheckpointError: see `draft_config`.
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
            hidden_states: [T, H].
            inputs_embeds: [T, H], embeddings to use instead of those of `input_ids`.

        Returns:
            [T, H], before or after the final norm, see `DraftOptions.returns`.
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
        """The norm before the head. The host calls it if `returns_normed` is false."""
        return self.layer.final_norm

    @property
    def returns_normed(self) -> bool:
        """Whether results are hidden states after the final norm; see `DraftOptions.returns`."""
        rows = self.graph.get_submodule("inner")
        assert isinstance(rows, _Rows)
        return rows.normed

    @property
    def prefix(self) -> str:
        """The prefix of the layer's tensor names in a checkpoint."""
        text = self.config.get_text_config(decoder=True)
        return self.family.layer_prefix(text.num_hidden_layers, self.index)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy this layer's weights in place from a checkpoint's tensors.

        Args:
            weights: pairs of a name in the checkpoint and a tensor. Tensors of other layers are
                ignored. The target's embedding and head should be among them, see `own`.

        Returns:
            The layer's names in the checkpoint. They include the layer's copies of the target's
            embedding and head, which are not loaded, because the host has these.

        Raises:
            CheckpointError: tensors are missing, unexpected, of a wrong shape, of 8 bits, or not
                finite. The message lists them.
        """
        prefix, name = self.prefix, f"MTP layer {self.index} of {self.family.name}"
        taken = {n: t for n, t in weights if self.takes(n)}
        given = {n: t for n, t in taken.items() if n.startswith(prefix)}
        own = {n.removeprefix(prefix): t for n, t in given.items()}
        self.own = self._own_ends(own, {n: t for n, t in taken.items() if n not in given})
        own = {n: t for n, t in own.items() if n not in self.family.shared_tensors}
        quantised = sorted(n for n, t in own.items() if t.dtype.itemsize == 1)
        if quantised:
            raise CheckpointError(
                f"{name}: {len(quantised)} tensor(s) of 8 bits: {listing(quantised)}; "
                "expected an unquantised checkpoint"
            )
        tensors = layer_tensors(own, self.family)
        check_tensors(self.layer, tensors, name)
        check_finite(tensors.items(), name)
        self.layer.load_state_dict(tensors)
        return set(given)

    def takes(self, name: str) -> bool:
        """Whether `load_weights` looks at a tensor: the layer's, and the target's two ends."""
        is_end = name.endswith(tuple(_ENDS.values())) and ".layers." not in name
        return name.startswith(self.prefix) or is_end

    def _own_ends(self, stored: dict[str, Tensor], rest: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is stored with the layer, by role, and is not equal to the target's in `rest`."""
        theirs = {
            role: tensor
            for role, ending in _ENDS.items()
            for name, tensor in rest.items()
            if name.endswith(ending)
        }
        if "embedding" in theirs:
            theirs.setdefault("head", theirs["embedding"])  # They are tied.
        return {
            role: stored[name]
            for name, role in self.family.shared_tensors.items()
            if getattr(self.layer.wiring, role) == "own"
            and name in stored
            and role in theirs
            and not torch.equal(stored[name], theirs[role])
        }

    def check_ends(self) -> None:
        """For hosts that give the draft the target's embedding and head.

        Raises:
            UnsupportedModelError: the layer has others of its own.
        """
        if self.own:
            raise UnsupportedModelError(
                f"{self.family.name}: MTP layer {self.index} is stored with a different "
                f"{' and '.join(sorted(self.own))} than the target's, and a traced draft in a host "
                "has the target's: its drafts would be wrong; use the host's own draft"
            )


class _Rows(nn.Module):
    """The module to trace: (embeddings [T, H], positions [T], hidden [T, H]) -> [T, H]."""

    def __init__(self, layer: MTPLayer, rotary: TextRotary, normed: bool):
        super().__init__()
        self.layer, self.rotary, self.normed = layer, rotary, normed
        self.recorder = SiteRecorder()

    def forward(self, embedding: Tensor, positions: Tensor, features: Tensor) -> Tensor:
        self.recorder.begin(positions)
        hidden = run_mtp_layer(self.layer, self.rotary, embedding, features, self.recorder)
        return self.layer.final_norm(hidden) if self.normed else hidden


def _build(family: ModelFamily, config: Any, options: DraftOptions) -> _Rows:
    """Build the layer from transformers' classes, with uninitialised weights."""
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
    decoder, text = target.get_decoder(), target.config.get_text_config(decoder=True)
    if options.zero_first_embedding is not None:
        layer.wiring = replace(layer.wiring, zero_first_embedding=options.zero_first_embedding)
    allocate(layer, dtypes_of(target), device)
    stand_in(layer, family.canonical)
    with device:
        own = rotary_of(decoder)
        frequencies = own and type(own)(text)
    rotary = TextRotary(frequencies, family.position_grids, family.rotary_type(text, options.index))
    wanted = options.returns or f"{layer.wiring.next_features}_final_norm"
    return _Rows(layer, rotary, wanted == "after_final_norm").eval()


def _trace(rows: _Rows, width: int, options: DraftOptions) -> fx.GraphModule:
    """Trace the rows as a graph with a symbolic number of tokens, over the layer's own tensors."""
    floats = torch.zeros(TRACE_TOKENS, width, dtype=options.dtype, device=options.device)
    positions = torch.zeros(TRACE_TOKENS, dtype=torch.int64, device=options.device)
    example = (floats, positions, torch.zeros_like(floats))
    traced = export_piece(rows, example)
    # This also drops the model's own expansion of latents, which sites use unexpanded.
    drop_identities(traced.graph)
    # Hosts call eval(), which export's module refuses, so this makes a plain one. It holds the
    # traced module itself instead of a copy, so that each tensor has one owner.
    plain = fx.GraphModule(traced, traced.graph)
    plain.add_module("inner", rows)
    return plain


def _call_host(traced: fx.GraphModule, modules: list[nn.Module]) -> None:
    """Replace the calls of `host_attention` with calls of the host's modules."""
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

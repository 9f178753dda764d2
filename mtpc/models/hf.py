"""Running transformers' own modules in a step, on the seams of `mtpc.models.seams`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mtpc.errors import UnsupportedModelError
from mtpc.models.caches import CachePool
from mtpc.models.family import ModelFamily, MTPWiring
from mtpc.models.heads import draft_head, final_norm_of, target_head
from mtpc.models.seams import CACHE, StepContext
from mtpc.step.drafting import Drafting


def model_class(family: ModelFamily) -> Any:
    """The class of a family's target: transformers', or the family's own."""
    if family.own_class is not None:
        return family.own_class()
    return getattr(transformers, family.hf_class)


class HFTarget(nn.Module):
    """The decoder of a causal LM over flat tokens: (ids [T], *metadata) -> features [T, H].

    Features are the hidden states before or after the final norm, see `WiringRules.first_features`.
    """

    def __init__(self, decoder: nn.Module, pool: CachePool, wiring: MTPWiring):
        super().__init__()
        self.decoder: Any = stepped_decoder(decoder, wiring)
        self.pool = pool

    def forward(self, ids: Tensor, *metadata: Tensor) -> Tensor:
        context = StepContext.of(metadata, self.pool.layers())
        images = self.pool.images
        rows: dict[str, Tensor]
        if images is None:
            rows = {"input_ids": ids[None], "position_ids": context.positions[None]}
        else:
            embedding = images.embed(self.decoder.get_input_embeddings(), ids)
            positions = with_batch(images.positions(context))
            rows = {"inputs_embeds": embedding[None], "position_ids": positions}
        out = self.decoder(**rows, use_cache=False, mtpc_context=context, **{CACHE: context})
        return out.last_hidden_state[0]


def with_batch(positions: Tensor) -> Tensor:
    """Positions as transformers takes them: [T] -> [1, T], and [grids, T] -> [grids, 1, T]."""
    return positions[None] if positions.dim() == 1 else positions[:, None]


def stepped_decoder(decoder: Any, wiring: MTPWiring) -> nn.Module:
    """A decoder that shares all modules, but leaves out the final norm if features precede it."""
    others: dict[str, nn.Module] = {}
    if wiring.first_features == "before":
        others["norm"] = nn.Identity()
    kinds = getattr(rotary_of(decoder), "layer_types", None)
    if kinds:
        others["rotary_emb"] = OrderedRotary(decoder.rotary_emb, kinds)
    stepped = copy.copy(decoder)
    stepped._modules = {**decoder._modules, **others}
    return stepped


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """A decoder's layers: `layers`, or its first list of modules, as GPT-2's `h`."""
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    named = getattr(decoder, "layers", None)
    return named if isinstance(named, nn.ModuleList) else lists[0]


def norm_after(decoder: nn.Module, layers: nn.ModuleList) -> str:
    """The name of the norm that a decoder has after its layers.

    Raises:
        UnsupportedModelError: it has none.
    """
    names = [name for name, child in decoder.named_children() if "norm" in name or "ln_f" in name]
    if not names:
        raise UnsupportedModelError(
            f"{type(decoder).__name__} has no norm after its {len(layers)} layers; expected one: "
            "name layers whose outputs enter another one"
        )
    return "norm" if "norm" in names else names[-1]


def target_norm(decoder: Any) -> Any:
    """The norm that a decoder has after its layers; see `norm_after`."""
    return getattr(decoder, norm_after(decoder, decoder_layers(decoder)))


def rotary_of(decoder: Any) -> Any:
    """A decoder's rotary embedding; None if its attention knows no positions."""
    return getattr(decoder, "rotary_emb", None)


class OrderedRotary(nn.Module):
    """A rotary embedding for several layer types, which are computed in one order.

    transformers asks for each type once in a forward, in the order of a set. That order differs
    from process to process, and so would the traced graph.
    """

    def __init__(self, rotary: nn.Module, kinds: Sequence[str]):
        super().__init__()
        self.rotary, self.kinds = rotary, kinds
        self.made: dict[str, Any] = {}

    def forward(self, like: Tensor, positions: Tensor, layer_type: str) -> Any:
        """Cos and sin for a layer type; the first call of a forward computes those of all."""
        if layer_type not in self.made:
            self.made = {kind: self.rotary(like, positions, kind) for kind in self.kinds}
        return self.made.pop(layer_type)


class MTPLayer(nn.Module):
    """One MTP layer: norms, projection, a decoder block of the target's own class, final norm.

    Submodules have the names of `MTPWiring`'s attributes, which give their checkpoint names.

    Attributes:
        final_norm: the norm after the block; see `final_norm_of` where the wiring names none.
        stream_head: joins residual streams for the head; None for layers without them.
        head: the layer's own output head, H -> V; None: the target's.
        embedding: the layer's own token embedding [V, H]; None: the target's.
        tp_plan: of a drafter, rules of transformers' tensor plan by names of the layer's modules;
            None: the block has those of the target's decoder layers.
    """

    head: nn.Linear | None
    embedding: nn.Embedding | None
    tp_plan: Mapping[str, str] | None = None

    def __init__(
        self,
        wiring: MTPWiring,
        config: Any,
        block: nn.Module,
        norm_class: type[nn.Module],
        stream_head: nn.Module | None = None,
    ):
        super().__init__()
        self.wiring = wiring
        hidden = config.hidden_size
        eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        self.embedding_norm = norm_class(hidden, eps=eps)
        self.hidden_norm = norm_class(wiring.streams(config) * hidden, eps=eps)
        if wiring.projection:
            self.projection = nn.Linear(2 * hidden, hidden, bias=False)
        else:
            self.embedding_projection = nn.Linear(hidden, hidden, bias=False)
            self.hidden_projection = nn.Linear(hidden, hidden, bias=False)
        self.block = block
        self.final_norm = norm_class(hidden, eps=eps) if wiring.final_norm else nn.Identity()
        if stream_head is not None:
            self.stream_head = stream_head
        self.head = self.embedding = None

    def join(self, embedding: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        """The block's input, of the shape of `features` [..., T, H]. If they have a projection of
        their own, they are [..., T, streams, H], or [..., T, streams * H]. Embeddings of the rows'
        token ids are [..., T, H], and positions int64 [T]."""
        if self.wiring.zero_first_embedding:
            embedding = torch.where(positions[..., None] == 0, 0, embedding)
        parts = [self.embedding_norm(embedding), self.hidden_norm(features)]
        if not self.wiring.projection:
            embedded = self.embedding_projection(parts[0]).unsqueeze(-2)
            if parts[1].dim() == embedded.dim():
                return embedded + self.hidden_projection(parts[1])
            streams = parts[1].unflatten(-1, (-1, embedded.shape[-1]))
            return (embedded + self.hidden_projection(streams)).flatten(-2)
        if self.wiring.hidden_first:
            parts.reverse()
        return self.projection(torch.cat(parts, -1))


class TextRotary(nn.Module):
    """A decoder's rotary embedding for one layer, and positions of text or of all grids.

    (tensor of the wanted dtype and device, positions [T] or [grids, T]) -> cos and sin, each
    [1, T, D].

    Args:
        rotary: transformers' module; None: no positions, and cos and sin are None.
        grids: see `ModelFamily.position_grids`.
        kind: transformers' `layer_type` of the layer; None if the model has one rotary embedding.
    """

    def __init__(self, rotary: nn.Module | None, grids: int, kind: str | None):
        super().__init__()
        self.rotary, self.grids = rotary, grids
        self.options = {} if kind is None else {"layer_type": kind}

    def forward(self, like: Tensor, positions: Tensor) -> Any:
        if self.rotary is None:
            return None
        rows = with_batch(positions)
        if self.grids > 1:
            rows = rows.expand(self.grids, 1, -1)
        return self.rotary(like, rows, **self.options)


def run_mtp_layer(
    layer: MTPLayer,
    rotary: TextRotary,
    embedding: Tensor,
    features: Tensor,
    context: Any,
    rotated: Tensor | None = None,
    **options: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Run an MTP layer over flat rows, without its final norm.

    Takes the embedding of the rows' token ids and their features, [T, H] both. `context` is in
    place of transformers' cache; it has `positions` [T], `layers` and `update`. `rotated` is what
    the rotary embedding takes, see `TextRotary`; None: the positions. `options` are the block's.

    Returns:
        Hidden states before the final norm, [T, H]; what else the block gives, or None.
    """
    positions = context.positions
    hidden = layer.join(embedding, features, positions)[None]
    out = layer.block(
        hidden,
        attention_mask=None,
        position_ids=positions[None],
        use_cache=False,
        position_embeddings=rotary(hidden, positions if rotated is None else rotated),
        mtpc_context=context,
        **{CACHE: context},
        **options,
    )
    # Some layers also give what they attended to.
    return (out[0][0], out[1]) if isinstance(out, tuple) else (out[0], None)


def embedding_of(decoder: Any, layer: MTPLayer) -> nn.Module:
    """The token embedding that an MTP layer reads."""
    own = layer.embedding if layer.wiring.embedding == "own" else None
    return own or decoder.get_input_embeddings()


class HFDraft(nn.Module):
    """An MTP layer over flat tokens: (ids [T], features [T, H], *metadata) -> features [T, H].

    Features are the hidden states before or after the layer's final norm, see
    `WiringRules.next_features`.
    """

    def __init__(self, decoder: Any, rotary: TextRotary, layer: MTPLayer, pool: CachePool):
        super().__init__()
        self.embedding, self.rotary = embedding_of(decoder, layer), rotary
        self.layer, self.pool = layer, pool
        self.target_norm = None if layer.wiring.final_norm else final_norm_of(decoder, layer)

    def forward(self, ids: Tensor, features: Tensor, *metadata: Tensor) -> Any:
        return self.run(ids, features, metadata)[0]

    def run(
        self, ids: Tensor, features: Tensor, metadata: tuple[Tensor, ...], **options: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The features, and what else the layer's block gives; `options` are the block's."""
        context = StepContext.of(metadata, self.pool.layers())
        images = self.pool.images
        if images is None:
            embedding, rotated = self.embedding(ids), None
        else:
            embedding = images.embed_next(self.embedding, ids, context)
            rotated = images.positions(context)
        rows = (embedding, features, context, rotated)
        hidden, more = run_mtp_layer(self.layer, self.rotary, *rows, **options)
        if self.layer.wiring.next_features == "before":
            return hidden, more
        return (self.target_norm or self.layer.final_norm)(hidden), more


class HandingDraft(HFDraft):
    """An `HFDraft` that also gives what its rows hand on, see `ModelFamily.hands_on`: [T, ...]."""

    def forward(self, ids: Tensor, features: Tensor, *metadata: Tensor) -> Any:
        return self.run(ids, features, metadata)


class LaterDraft(HFDraft):
    """An `HFDraft` that takes what was handed on to its rows, behind the metadata: [T, ...]."""

    def forward(self, ids: Tensor, features: Tensor, *rows: Tensor) -> Any:
        *metadata, handed = rows
        return self.run(ids, features, tuple(metadata), mtpc_handed=handed)[0]


@dataclass(frozen=True)
class DraftVocabulary:
    """The vocabulary of a drafter whose head has rows for some tokens only: `tokens` makes token
    ids of rows, int64 [R], and `logits` those of all tokens [R, V] of its rows' [R, V_d]."""

    tokens: nn.Module
    logits: nn.Module


@dataclass(frozen=True)
class HostedLayer:
    """How an MTP layer runs over a host's attention, where rows of features are flat.

    Attributes:
        width: config -> W, the features of a row.
        run: (layer, rotary, embedding [T, H], features [T, W], context) -> [T, W], before what the
            head reads. The context records attention, see `run_mtp_layer`.
        readout: layer -> module: [T, W] -> what the head reads, [T, H].
    """

    width: Callable[[Any], int]
    run: Callable[[MTPLayer, TextRotary, Tensor, Tensor, Any], Tensor]
    readout: Callable[[MTPLayer], nn.Module]


@dataclass(frozen=True)
class StepParts:
    """What makes the modules that a step runs: one for the target, the drafts and their heads.

    Attributes:
        target: (decoder, pool, wiring) -> module: (ids [T], *metadata) -> features [T, ...].
        target_head: (model, wiring) -> module: features [T, ...] -> logits [T, V].
        draft: (decoder, rotary, layer, pool) -> module: (ids [T], features [T, ...], *metadata) ->
            features [T, ...].
        draft_head: (model, layer) -> module: features [T, ...] -> logits [T, V].
        stream_head: (decoder, config) -> the stream head of a new MTP layer, its weights not set;
            None for families without residual streams.
        draft_entry: layer -> module: what `target` gives beside its features, [T, ...] -> what
            the first draft is fed. `target` then gives both. None: the features are fed.
        draft_vocabulary: layer -> its vocabulary; None, or one that gives None: the target's.
        drafting: makes the declaration of a drafter with one layer, of its first four fields.
        later_draft: makes, of the arguments of `draft`, what `Drafting` calls for later drafts.
        draft_bias: layer -> module: (logits [R, V], features, tokens [R]) -> logits; or None.
        hosted: how the MTP layer runs over a host's attention; None: a host cannot hold its state.
    """

    target: Callable[[Any, CachePool, MTPWiring], nn.Module] = HFTarget
    target_head: Callable[[Any, MTPWiring], nn.Module] = target_head
    draft: Callable[[Any, TextRotary, MTPLayer, CachePool], nn.Module] = HFDraft
    draft_head: Callable[[Any, MTPLayer], nn.Module] = draft_head
    stream_head: Callable[[Any, Any], nn.Module] | None = None
    draft_entry: Callable[[Any], nn.Module] | None = None
    draft_vocabulary: Callable[[Any], DraftVocabulary | None] = lambda layer: None
    drafting: Callable[..., Drafting] = Drafting
    later_draft: Callable[[Any, TextRotary, MTPLayer, CachePool], nn.Module] | None = None
    draft_bias: Callable[[Any], nn.Module | None] = lambda layer: None
    hosted: HostedLayer | None = None

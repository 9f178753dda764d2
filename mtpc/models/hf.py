"""Running transformers' own modules in a step.

Three interfaces of transformers redirect its modules to mtpc; here they are called seams. Attention
goes through `AttentionInterface` and experts through `ExpertsInterface`, both under the name
"mtpc". The KV cache goes through the protocol `cache.update(a, b, layer_idx)`. The user's model
does not change: mtpc copies its module tree and shares its tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.modeling_outputs import CausalLMOutputWithPast

from mtpc.errors import UnsupportedModelError
from mtpc.models.caches import CachePool, LayerCache
from mtpc.models.family import Canonical, ModelFamily, MTPWiring
from mtpc.models.heads import draft_head, final_norm_of, target_head
from mtpc.ops.experts import experts, relu2_experts
from mtpc.step.records import Metadata

SEAM_NAME = "mtpc"
_ACTIVATIONS = {"silu": False, "swish": False, "gelu_pytorch_tanh": True}
"""transformers' names for activations of experts with gates -> whether `mtpc::experts` has GELU."""

CACHE = next(
    field.name
    for field in fields(CausalLMOutputWithPast)
    if field.name in ("cache", "past_key_values")
)
"""transformers' name for the KV cache as an argument and as an output: "cache" since 5.24, and
"past_key_values" before."""


@dataclass(frozen=True)
class StepContext(Metadata):
    """Metadata of one forward and the caches of its layers, in place of transformers' cache.

    `layers` holds a `LayerCache`, or state of another kind, by layer index.
    """

    layers: dict[int, Any]

    @classmethod
    def of(cls, metadata: tuple[Tensor, ...], layers: dict[int, Any]) -> StepContext:
        """From the fields of `Metadata`, in its order."""
        return cls(**vars(Metadata(*metadata)), layers=layers)

    def update(
        self, first: Tensor, second: Tensor, layer_idx: int, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values to its cache: the cache protocol of transformers."""
        self.layers[layer_idx].write(first, second, self)
        return first, second


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    mtpc_context: StepContext | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls; it reads keys and values from the caches."""
    if mtpc_context is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not pass keyword arguments to its attention function; "
            "expected `mtpc_context` among them; add a canonical module to its family"
        )
    scale = module.head_dim**-0.5 if scaling is None else scaling
    cache: LayerCache = mtpc_context.layers[module.layer_idx]
    return cache.attend(module, query, scale, mtpc_context, **options), None


def _experts(module: Any, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
    """The experts function that transformers calls."""
    if not getattr(module, "has_gate", True):
        return _experts_without_gate(module, x, expert_ids, expert_weights)
    name = getattr(module.config, "hidden_activation", None) or module.config.hidden_act
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"the experts have the activation {name!r}; expected one of {', '.join(_ACTIVATIONS)}, "
            "which mtpc::experts computes"
        )
    weights = (module.gate_up_proj, module.down_proj, expert_ids, expert_weights)
    limit = getattr(module, "limit", None)
    # Modules with a limit clamp the gate in `_apply_gate`, as `limit_input` asks for.
    bounds = (float(limit or 0), limit is not None)
    return experts(x, *weights, *bounds, _ACTIVATIONS[name])


def _experts_without_gate(
    module: Any, x: Tensor, expert_ids: Tensor, expert_weights: Tensor
) -> Tensor:
    if module.config.mlp_hidden_act != "relu2":
        raise UnsupportedModelError(
            f"the experts have the activation {module.config.mlp_hidden_act!r} and no gate; "
            "expected 'relu2', as mtpc::relu2_experts computes it"
        )
    return relu2_experts(x, module.up_proj, module.down_proj, expert_ids, expert_weights)


def model_class(family: ModelFamily) -> Any:
    """The class of a family's target: transformers', or the family's own."""
    if family.own_class is not None:
        return family.own_class()
    return getattr(transformers, family.hf_class)


def register_seams() -> None:
    """Register "mtpc" in transformers' interfaces; existing entries do not change."""
    AttentionInterface.register(SEAM_NAME, _attention)
    ExpertsInterface.register(SEAM_NAME, _experts)


def share_model(model: nn.Module, canonical: Mapping[str, Canonical]) -> nn.Module:
    """Copy the module tree, share every tensor, select the "mtpc" seams, and set eval mode.

    Args:
        model: transformers' model; it does not change.
        canonical: class name -> what makes the module that replaces one of that class.
    """
    register_seams()
    tensors = [*model.parameters(), *model.buffers()]
    shared = copy.deepcopy(model, {id(t): t for t in tensors})
    use_seams(shared.config)
    stand_in(shared, canonical)
    return shared.eval()


def stand_in(root: nn.Module, canonical: Mapping[str, Canonical]) -> None:
    """Replace modules below `root` by their canonical modules, in place."""
    for name, module in list(root.named_modules()):
        make = canonical.get(type(module).__name__)
        if make is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(root.get_submodule(parent), leaf, make(module))


def use_seams(config: Any) -> None:
    """Select mtpc's attention and experts in a config, which must be a private copy."""
    for part in (config, config.get_text_config(decoder=True)):
        part._attn_implementation = SEAM_NAME
        part._experts_implementation = SEAM_NAME


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
        out = self.decoder(
            **rows,
            use_cache=False,
            mtpc_context=context,
            **{CACHE: context},
        )
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


def rotary_of(decoder: Any) -> Any:
    """A decoder's rotary embedding; None if its attention knows no positions."""
    return getattr(decoder, "rotary_emb", None)


class OrderedRotary(nn.Module):
    """A rotary embedding for several layer types, which are computed in one order.

    transformers asks for each type once in a forward, in the order of a set. That order differs
    from process to process, and so would the traced graph.

    Args:
        rotary: transformers' module.
        kinds: the layer types, in the order to compute them.
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

    Args:
        wiring: how the layer joins embedding and features.
        config: the language model's.
        block: the decoder block.
        norm_class: RMSNorm class of the target.
        stream_head: joins residual streams for the head; None for layers without them.

    Attributes:
        final_norm: the norm after the block; see `final_norm_of` where the wiring names none.
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
        """The block's input, of the shape of `features`.

        Args:
            embedding: of the rows' token ids, [..., T, H].
            features: [..., T, H]. If they have a projection of their own, [..., T, streams, H], or
                [..., T, streams * H].
            positions: int64 [T].
        """
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

    Args:
        layer: the MTP layer.
        rotary: the layer's rotary embedding.
        embedding: of the rows' token ids, [T, H].
        features: of the rows, [T, H].
        context: in place of transformers' cache; has `positions` [T], `layers` and `update`.
        rotated: what the rotary embedding takes, see `TextRotary`; None: the positions.
        options: of the block.

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

    Args:
        decoder: the target's decoder; gives the embedding if the layer has none.
        rotary: the layer's rotary embedding.
        layer: the MTP layer.
        pool: state of all layers.
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
    """The vocabulary of a drafter whose head has rows for some tokens only.

    Attributes:
        tokens: rows of the head, int64 [R] -> token ids [R].
        logits: logits of its rows [R, V_d] -> of all tokens [R, V].
    """

    tokens: nn.Module
    logits: nn.Module


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
        single_position: whether the drafter keeps no state, and makes all drafts at the last
            accepted row. `draft` then gives the next features and what `draft_head` takes.
    """

    target: Callable[[Any, CachePool, MTPWiring], nn.Module] = HFTarget
    target_head: Callable[[Any, MTPWiring], nn.Module] = target_head
    draft: Callable[[Any, TextRotary, MTPLayer, CachePool], nn.Module] = HFDraft
    draft_head: Callable[[Any, MTPLayer], nn.Module] = draft_head
    stream_head: Callable[[Any, Any], nn.Module] | None = None
    draft_entry: Callable[[Any], nn.Module] | None = None
    draft_vocabulary: Callable[[Any], DraftVocabulary | None] = lambda layer: None
    single_position: bool = False

"""EAGLE-3 heads: a drafter in a checkpoint of its own, for targets that have no MTP layers.

A head is fed the residual stream as it enters three layers of the target, joined to one row of 3H
and projected to the head's own width (`fc`). Its one layer attends with the concatenation of two
norms, of the token embedding and of the features. What the layer gives, before the head's norm, is
fed to the next draft. Its output head has a row for frequent tokens only; `d2t` says which.

Source: the authors' eagle/model/cnets.py; docs/models.md has the rules, and what vLLM and SGLang
read differently.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as llama

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.models.caches import CachePool, paged_kv_specs
from mtpc.models.family import ModelFamily, MTPWiring
from mtpc.models.hf import (
    DraftVocabulary,
    HFTarget,
    MTPLayer,
    StepParts,
    TextRotary,
    decoder_layers,
    embedding_of,
    norm_after,
)
from mtpc.models.read_config import describing
from mtpc.models.rotary import check_rotary
from mtpc.models.seams import CACHE, StepContext, use_seams
from mtpc.weights.paired_checkpoint import DRAFT, TOKEN_MAP, PairedCheckpoint

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3DraftModel",
    "Eagle3Speculator",
)
"""What config.json of EAGLE-3 heads has: the authors' and SpecForge's, vLLM's, speculators'."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""Entry of config.json that names the layers whose inputs a head is fed."""
_BLOCKS = ("midlayer.", "layers.0.")
"""Prefixes of the layer's names: the authors' and SpecForge's, and speculators'."""
_NORM_FIRST, _NORM_OUTPUT = "norm_before_residual", "norm_output"
_UNKNOWN = ("norm_before_fc", "fc_norm")
"""Entries for parts that mtpc does not know, if they are set."""


@dataclass(frozen=True)
class Eagle3Config:
    """What config.json of a head says.

    Attributes:
        llama: of the head's layer; its attention and cache are mtpc's.
        layer_ids: the target's layers whose inputs are captured, ascending; the number of layers
            stands for the input of the final norm.
        draft_vocab_size: rows of the head.
        target_width: width of a captured row.
        norm_first: whether the residual is taken after the norm of the features.
        norm_output: whether the next draft is fed what the head's norm gives (EAGLE-3.1).
    """

    llama: Any
    layer_ids: tuple[int, ...]
    draft_vocab_size: int
    target_width: int
    norm_first: bool
    norm_output: bool

    @classmethod
    def read(cls, checkpoint: PairedCheckpoint, target: Any, layers: int) -> Eagle3Config:
        """From the drafter's config.json, for a target of this config and so many decoder layers.

        Raises:
            CheckpointError: the head was made for a target of other sizes.
            UnsupportedModelError: the head has parts that mtpc does not know.
        """
        given, where = checkpoint.draft.config, checkpoint.draft.directory
        entries = {**given, **(given.get("transformer_layer_config") or {})}
        config = LlamaConfig(**describing(entries))
        use_seams(config)
        _check_known(entries, config, where)
        check_rotary(config, where)
        vocab, width = config.vocab_size, entries.get("target_hidden_size") or config.hidden_size
        for what, found, expected in (
            ("vocab_size", vocab, target.vocab_size),
            ("target_hidden_size or hidden_size", width, target.hidden_size),
        ):
            if found != expected:
                raise CheckpointError(
                    f"{where}: {what} is {found}, and the target's is {expected}; use an EAGLE-3 "
                    "head that was trained for this target"
                )
        rows = entries.get("draft_vocab_size") or vocab
        if rows != vocab and TOKEN_MAP not in checkpoint.draft.tensors:
            raise CheckpointError(
                f"{where} lacks {TOKEN_MAP}, which says what tokens the {rows} rows of its head "
                f"stand for (vocab_size is {vocab}); download or export the head again"
            )
        found = _layer_ids(entries, layers, where)
        rules = (bool(entries.get(name)) for name in (_NORM_FIRST, _NORM_OUTPUT))
        return cls(config, found, rows, width, *rules)


def _check_known(entries: Mapping[str, Any], config: Any, where: Any) -> None:
    kinds = entries.get("layer_types") or []
    unknown = [f"{name}={entries[name]!r}" for name in _UNKNOWN if entries.get(name)]
    if config.num_hidden_layers != 1:
        unknown.append(f"num_hidden_layers={config.num_hidden_layers}")
    if "sliding_attention" in kinds:
        unknown.append(f"layer_types={kinds!r}")
    if (entries.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        unknown.append("use_aux_hidden_state=False")
    if unknown:
        raise UnsupportedModelError(
            f"{where} is an EAGLE-3 head with {', '.join(unknown)}; expected one layer with full "
            "attention, fed by captured layers"
        )


def _layer_ids(entries: Mapping[str, Any], layers: int, where: Any) -> tuple[int, ...]:
    """The layers whose inputs are captured.

    At the top of config.json, ids are vLLM's and speculators': the input of layer i. In
    `eagle_config` they are those of the trainers SpecForge and ModelOpt: the output of layer i. But
    the authors' own choice of inputs, and ids that name the final norm, are taken as they are.
    """
    authors = [2, layers // 2, layers - 3]
    nested = (entries.get("eagle_config") or {}).get(LAYER_IDS) or []
    if sorted(nested) != authors and layers not in nested:
        nested = [i + 1 for i in nested]
    ids = entries.get(LAYER_IDS) or nested or authors
    found = tuple(sorted(set(ids)))
    if len(found) != len(ids) or not 0 <= found[0] <= found[-1] <= layers:
        raise CheckpointError(
            f"{where}: the layers to capture are {ids}; expected different ones of the target's "
            f"{layers}; set {LAYER_IDS} in its config.json"
        )
    return found


class Eagle3Layer(MTPLayer):
    """An EAGLE-3 head: `projection` (fc), norms, the layer, `final_norm`, `head`, `d2t`.

    Args:
        wiring: names its parts.
        config: the head's.
        index: layer index of its cache.
        own: what it has of its own, of "embedding", "head" and "d2t".

    Attributes:
        d2t: int64 [V_d], what to add to a row of the head for its token id; None: nothing.
    """

    d2t: Tensor | None

    def __init__(self, wiring: MTPWiring, config: Eagle3Config, index: int, own: set[str]):
        nn.Module.__init__(self)
        self.wiring, self.config = wiring, config
        hidden, eps = config.llama.hidden_size, config.llama.rms_norm_eps
        self.embedding_norm = llama.LlamaRMSNorm(hidden, eps=eps)
        self.hidden_norm = llama.LlamaRMSNorm(hidden, eps=eps)
        captured = len(config.layer_ids) * config.target_width
        self.projection = nn.Linear(captured, hidden, bias=False)
        self.block = Eagle3Block(config.llama, index)
        self.final_norm = llama.LlamaRMSNorm(hidden, eps=eps)
        with torch.device("cpu"):  # Frequencies are computed, not read.
            self.rotary = llama.LlamaRotaryEmbedding(config.llama)
        size = config.llama.vocab_size
        self.embedding = nn.Embedding(size, hidden) if "embedding" in own else None
        rows = config.draft_vocab_size
        self.head = nn.Linear(hidden, rows, bias=False) if "head" in own else None
        offsets = torch.zeros(rows, dtype=torch.int64) if TOKEN_MAP in own else None
        self.register_buffer(TOKEN_MAP, offsets)
        rules = config.llama.base_model_tp_plan
        self.tp_plan = {name.replace("layers.*", "block"): style for name, style in rules.items()}

    def run(self, embedding: Tensor, features: Tensor, context: StepContext) -> Tensor:
        """Embeddings and features of rows, each [T, H] -> the layer's output [T, H]."""
        normed = self.hidden_norm(features)
        residual = normed if self.config.norm_first else features
        rows = torch.cat([self.embedding_norm(embedding), normed], -1)[None]
        angles = self.rotary(rows, context.positions[None])
        return self.block(rows, residual, angles, context)


class Eagle3Block(nn.Module):
    """A Llama layer whose attention takes rows of 2H, normed before."""

    def __init__(self, config: Any, index: int):
        super().__init__()
        self.self_attn: Any = llama.LlamaAttention(config, index)
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = getattr(self.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, plain.out_features, plain.bias is not None)
            setattr(self.self_attn, name, wide)
        self.mlp = llama.LlamaMLP(config)
        self.post_attention_layernorm = llama.LlamaRMSNorm(
            config.hidden_size, eps=config.rms_norm_eps
        )

    def forward(self, rows: Tensor, residual: Tensor, angles: Any, context: StepContext) -> Tensor:
        attended, _ = self.self_attn(
            rows,
            position_embeddings=angles,
            attention_mask=None,
            mtpc_context=context,
            **{CACHE: context},
        )
        hidden = residual + attended[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class CapturingTarget(HFTarget):
    """The decoder over flat tokens: (ids [T], *metadata) -> features [T, H], captured [T, n H].

    Args:
        layer_ids: the layers whose inputs are captured, ascending.
    """

    def __init__(
        self, layer_ids: tuple[int, ...], decoder: Any, pool: CachePool, wiring: MTPWiring
    ):
        super().__init__(decoder, pool, wiring)
        self.layer_ids, self.captured = layer_ids, list[Tensor]()
        stepped: Any = self.decoder
        own = decoder_layers(stepped)
        layers = list(own)
        for index in layer_ids:
            if index < len(layers):
                layers[index] = self._watched(layers[index])
            else:
                name = norm_after(stepped, own)
                stepped._modules[name] = self._watched(stepped._modules[name])
        name = next(name for name, child in stepped.named_children() if child is own)
        stepped._modules[name] = nn.ModuleList(layers)

    def _watched(self, module: nn.Module) -> nn.Module:
        """A module that shares all of this one, and notes what it is given."""
        watched = copy.copy(module)
        watched._forward_pre_hooks = OrderedDict()
        watched._forward_pre_hooks_with_kwargs = OrderedDict()
        watched.register_forward_pre_hook(self._note, with_kwargs=True)
        return watched

    def _note(self, module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        self.captured.append(args[0] if args else given["hidden_states"])

    def forward(self, ids: Tensor, *metadata: Tensor) -> Any:
        self.captured.clear()
        features = super().forward(ids, *metadata)
        captured = torch.cat([hidden[0] for hidden in self.captured], -1)
        self.captured.clear()
        return features, captured


class Eagle3Draft(nn.Module):
    """A head over flat tokens: (ids [T], features [T, H], *metadata) -> features [T, H]."""

    def __init__(self, decoder: Any, rotary: TextRotary, layer: Any, pool: CachePool):
        super().__init__()
        self.embedding, self.layer, self.pool = embedding_of(decoder, layer), layer, pool

    def forward(self, ids: Tensor, features: Tensor, *metadata: Tensor) -> Tensor:
        context = StepContext.of(metadata, self.pool.layers())
        hidden = self.layer.run(self.embedding(ids), features, context)
        if self.layer.wiring.next_features == "before":
            return hidden
        return self.layer.final_norm(hidden)


class TokenIds(nn.Module):
    """Rows of a head [R] -> the token ids that they stand for [R]."""

    offsets: Tensor

    def __init__(self, offsets: Tensor):
        super().__init__()
        self.register_buffer("offsets", offsets)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.offsets[rows]


class WholeLogits(nn.Module):
    """Logits of a head [R, V_d] -> of the whole vocabulary [R, V]: -inf where it has no row."""

    offsets: Tensor

    def __init__(self, offsets: Tensor, vocab_size: int):
        super().__init__()
        self.register_buffer("offsets", offsets)
        self.vocab_size = vocab_size

    def forward(self, logits: Tensor) -> Tensor:
        ids = self.offsets + torch.arange(self.offsets.shape[0], device=logits.device)
        whole = logits.new_full((logits.shape[0], self.vocab_size), float("-inf"))
        return whole.index_copy(1, ids, logits)


def _vocabulary(layer: Eagle3Layer) -> DraftVocabulary | None:
    if layer.d2t is None:
        return None
    size = layer.config.llama.vocab_size
    return DraftVocabulary(TokenIds(layer.d2t), WholeLogits(layer.d2t, size))


def eagle3_family(family: ModelFamily, checkpoint: PairedCheckpoint, target: Any) -> ModelFamily:
    """A target's family with an EAGLE-3 head in place of MTP layers.

    Args:
        family: the target's.
        checkpoint: the target's, with the head's.
        target: the target's config, of its language model.

    Raises:
        CheckpointError: the head does not fit the target, or lacks what it needs.
        UnsupportedModelError: the head or the target has parts that mtpc does not know.
    """
    where = checkpoint.draft.directory
    if family.parts is not None:
        raise UnsupportedModelError(
            f"{where} is an EAGLE-3 head, and {family.name} has no residual stream of one row that "
            "it could be fed; expected another target"
        )
    layers = target.num_hidden_layers // family.caches_per_layer
    config = Eagle3Config.read(checkpoint, target, layers)
    stored = checkpoint.draft.tensors
    _check_ends(stored, config, target, where)
    block = next((b for b in _BLOCKS if any(name.startswith(b) for name in stored)), _BLOCKS[0])
    mapped = {TOKEN_MAP} & stored.keys()

    def cache_specs(of: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
        if layer < of.num_hidden_layers:
            return family.cache_specs(of, layer, dtype)
        return paged_kv_specs(config.llama, layer, dtype)

    wiring = MTPWiring(
        embedding_norm=f"{block}input_layernorm",
        hidden_norm=f"{block}hidden_norm",
        projection="fc",
        final_norm="norm",
        next_features="after" if config.norm_output else "before",
        only_rules=("next_features", "embedding"),
    )
    return replace(
        family,
        wiring=wiring,
        num_mtp_layers=lambda of: 1,
        layer_prefix=lambda layers, index: DRAFT,
        block_prefix=block,
        cache_specs=cache_specs,
        make_layer=lambda wiring, index, own: Eagle3Layer(wiring, config, index, {*own, *mapped}),
        shared_tensors={"embed_tokens.weight": "embedding", "lm_head.weight": "head"},
        parts=StepParts(
            target=partial(CapturingTarget, config.layer_ids),
            draft=Eagle3Draft,
            draft_entry=lambda layer: layer.projection,
            draft_vocabulary=_vocabulary,
        ),
    )


def _check_ends(stored: Collection[str], config: Eagle3Config, target: Any, where: Any) -> None:
    """Refuse a head without an embedding or an output head that the target's cannot stand for."""
    same_width = config.llama.hidden_size == target.hidden_size
    fits = {
        "embed_tokens.weight": same_width,
        "lm_head.weight": same_width and config.draft_vocab_size == target.vocab_size,
    }
    lacking = [name for name, fit in fits.items() if name not in stored and not fit]
    if lacking:
        raise CheckpointError(
            f"{where} lacks {', '.join(lacking)}, and the target's is of another shape; download "
            "or export the head again"
        )

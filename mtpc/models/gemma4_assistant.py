"""Gemma 4's assistant: a drafter of a few layers that attend to the target's keys and values.

It has no keys and values of its own. A layer attends to what the target's last layer of its type
that stores keys has stored. It is fed the target's scaled embedding of the last token and the
target's features, projected to its own width (`pre_projection`). What its layers give goes to its
head and, projected back (`post_projection`), to the next draft. All drafts of an iteration are made
at one position (`mtpc.step.single_position`). The heads of small assistants look at the tokens of a
few clusters only (`OrderedHead`).

Source: transformers' gemma4_assistant; docs/models.md has what vLLM, SGLang and llama.cpp do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.models.drafter import DrafterPass, Pairing
from mtpc.models.families.gemma4 import kv_layer
from mtpc.models.family import ModelFamily, MTPWiring
from mtpc.models.hf import MTPLayer, StepParts
from mtpc.models.read_config import describing
from mtpc.models.refused_config import said
from mtpc.models.seams import StepContext, use_seams
from mtpc.step.single_position import SinglePosition
from mtpc.weights.checkpoint import DRAFT
from mtpc.weights.paired_checkpoint import PairedCheckpoint

TARGETS = {
    "Gemma4AssistantForCausalLM": "gemma4",
    "Gemma4UnifiedAssistantForCausalLM": "gemma4_unified",
}
"""Architectures of assistants -> the family of the targets that they are made for."""


class AssistantLayer(MTPLayer):
    """An assistant: projections, layers below `block.model`, `final_norm` and `head`. For each
    layer type, `kv_layers` says which layer's keys and values of the target are attended to."""

    def __init__(self, wiring: MTPWiring, assistant: Any, kv_layers: Mapping[str, int]):
        nn.Module.__init__(self)
        self.wiring, model = wiring, assistant.model
        use_seams(model.config)
        self.projection = assistant.pre_projection
        self.hidden_projection = assistant.post_projection
        self.final_norm, self.head, self.embedding = model.norm, assistant.lm_head, None
        self.block: Any = nn.Module()
        self.block.model = nn.Module()
        self.block.model.layers = model.layers
        rules = model.config.base_model_tp_plan
        self.tp_plan = {f"block.model.{name}": style for name, style in rules.items()}
        if assistant.masked_embedding is not None:
            self.block.masked_embedding = assistant.masked_embedding
            self.tp_plan |= {"head": "replicate"}  # A few of its rows are read, by token id.
        with torch.device("cpu"):  # Frequencies are computed, not read.
            self.rotary = type(model.rotary_emb)(model.config)
        for layer in model.layers:
            layer.self_attn.layer_idx = kv_layers[layer.self_attn.layer_type]

    def run(self, embedding: Tensor, features: Tensor, context: StepContext) -> Tensor:
        """Embeddings and features of rows, each [R, H] -> the normed output [R, H_a].

        A row attends to what its own position and earlier ones have stored. Its query is rotated as
        one of the position after it, where its token stands.
        """
        hidden = self.projection(torch.cat([embedding, features], -1))[None]
        places = context.positions[None] + 1
        kinds = self.rotary.layer_types
        angles = {kind: self.rotary(hidden, places, kind) for kind in kinds}
        stored = dict.fromkeys(kinds, (hidden, hidden))  # Taken from the caches in its place.
        for layer in self.block.model.layers:
            hidden = layer(
                hidden,
                shared_kv_states=stored,
                position_embeddings=angles[layer.self_attn.layer_type],
                mtpc_context=context,
            )
        out: Tensor = self.final_norm(hidden)
        return out[0]


class AssistantDraft(DrafterPass):
    """(ids [R], features [R, H], *metadata) -> features of the next draft [R, H], and what the head
    takes [R, H_a]."""

    def forward(self, ids: Tensor, features: Tensor, *metadata: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.layer.run(self.embedding(ids), features, self.context(metadata))
        return self.layer.hidden_projection(rows), rows


class OrderedHead(nn.Module):
    """A head H_a -> V over the tokens of the best clusters; other tokens get -inf. `clusters` is
    transformers' module: `centroids`, and `token_ordering`, the tokens by cluster."""

    ordering: Tensor

    def __init__(self, head: nn.Linear, clusters: Any):
        super().__init__()
        self.head, self.centroids = head, clusters.centroids
        self.count: int = clusters.centroid_intermediate_top_k
        self.register_buffer("ordering", clusters.token_ordering)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [R, H_a] -> logits [R, V]."""
        best = self.centroids(rows).topk(self.count, -1).indices
        tokens = self.ordering.view(self.centroids.out_features, -1)[best].flatten(1)
        logits = (self.head.weight[tokens] @ rows[..., None])[..., 0]
        whole = logits.new_full((rows.shape[0], self.head.out_features), float("-inf"))
        return whole.scatter(1, tokens, logits)


def _head(model: Any, layer: Any) -> nn.Module:
    """What makes logits of an assistant's rows."""
    clusters = getattr(layer.block, "masked_embedding", None)
    return layer.head if clusters is None else OrderedHead(layer.head, clusters)


def assistant_family(pair: Pairing) -> ModelFamily:
    """A target's family with an assistant in place of MTP layers; see `drafted_family`."""
    family, checkpoint = pair.family, pair.checkpoint
    name = next(n for n in checkpoint.draft.config["architectures"] if n in TARGETS)
    if family.name != TARGETS[name]:
        raise UnsupportedModelError(
            f"{pair.where} is a {name}, and the target is of {family.name}; expected one of "
            f"{TARGETS[name]}, whose keys and values it reads"
        )
    config = _read_config(checkpoint, name)
    kv_layers = _check_fits(checkpoint, config, pair.target)
    return replace(
        family,
        wiring=MTPWiring(
            embedding_norm="",
            hidden_norm="",
            projection="pre_projection",
            hidden_projection="post_projection",
            final_norm="model.norm",
            only_rules=("first_features",),
        ),
        num_mtp_layers=lambda of: 1,
        layer_prefix=lambda layers, index: DRAFT,
        make_layer=lambda wiring, index, own: AssistantLayer(
            wiring, getattr(transformers, name)(config), kv_layers
        ),
        shared_tensors={"model.embed_tokens.weight": "head", "lm_head.weight": "head"},
        parts=StepParts(draft=AssistantDraft, draft_head=_head, drafting=SinglePosition),
    )


def _read_config(checkpoint: PairedCheckpoint, name: str) -> Any:
    """The assistant's config, of transformers' class; its model can be built."""
    kind = getattr(transformers, name.replace("ForCausalLM", "Config"))
    try:
        config = kind(**describing(checkpoint.draft.config))
        with torch.device("meta"):
            getattr(transformers, name)(config)
        return config
    except Exception as error:  # transformers raises errors of any kind.
        raise CheckpointError(
            f"{checkpoint.draft.config_path}: transformers refuses it: {said(error)}; expected "
            f"that of a released {name}: correct the file or download it again"
        ) from error


def _check_fits(checkpoint: PairedCheckpoint, config: Any, target: Any) -> dict[str, int]:
    """Layer type of the assistant -> the target's layer that it reads. Raises CheckpointError: the
    target is of other sizes, or the clusters are."""
    text, where = config.get_text_config(), checkpoint.draft.config_path
    if text.num_kv_shared_layers != text.num_hidden_layers:
        raise CheckpointError(
            f"{where}: num_kv_shared_layers is {text.num_kv_shared_layers}; expected that all "
            f"{text.num_hidden_layers} layers read the target's keys: download the assistant again"
        )
    sizes = [
        ("vocab_size", text.vocab_size, target.vocab_size),
        ("backbone_hidden_size", config.backbone_hidden_size, target.hidden_size),
        ("sliding_window", text.sliding_window, target.sliding_window),
    ]
    kv_layers: dict[str, int] = {}
    for index, kind in enumerate(text.layer_types):
        layer = kv_layer(target, kind)
        if layer is None:
            sizes.append(("layer_types", text.layer_types, target.layer_types))
            break
        kv_layers[kind] = layer
        own, theirs = text.per_layer_config[index], target.per_layer_config[layer]
        for name in ("head_dim", "num_key_value_heads"):
            what = f"{name} of its {kind} (per_layer_config)"
            sizes.append((what, getattr(own, name), getattr(theirs, name)))
    for name, found, expected in sizes:
        if found != expected:
            raise CheckpointError(
                f"{where}: {name} is {found}, and the target's is {expected}, by "
                f"{checkpoint.config_path}; use the assistant that was made for this target"
            )
    count, best = config.num_centroids, config.centroid_intermediate_top_k
    if config.use_ordered_embeddings and not (0 < best <= count and text.vocab_size % count == 0):
        raise CheckpointError(
            f"{where}: num_centroids is {count}, of which {best} are looked at; expected a divisor "
            f"of vocab_size, {text.vocab_size}, and no more of them: download the assistant again"
        )
    return kv_layers

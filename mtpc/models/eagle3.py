"""EAGLE-3 and P-EAGLE heads: drafters in checkpoints of their own, for any target.

A head is fed the residual stream as it enters three layers of the target, joined to one row of 3H
and projected to the head's own width (`fc`). Its one layer attends with the concatenation of two
norms, of the token embedding and of the features. What the layer gives, before the head's norm, is
fed to the next draft. Its output head has a row for frequent tokens only; `d2t` says which.

P-EAGLE makes the drafts after the first one in one pass: their rows hold a mask's token and, in
place of features, the row that `fc` makes of `mask_hidden`. Such a head may have several layers.

Source: the authors' eagle/model/cnets.py; docs/models.md has the rules, and what vLLM and SGLang
read differently. P-EAGLE: speculators 0.9 (models/peagle), and vLLM's llm_base_proposer.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as llama

from mtpc.errors import UnsupportedModelError
from mtpc.models.drafter import (
    CapturingTarget,
    DrafterConfig,
    DrafterLayer,
    DrafterPass,
    Pairing,
    draft_vocabulary,
)
from mtpc.models.family import ModelFamily, MTPWiring
from mtpc.models.hf import StepParts
from mtpc.models.seams import CACHE, StepContext
from mtpc.step.blocks import Blocks

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3DraftModel",
    "Eagle3Speculator",
)
"""What config.json of EAGLE-3 heads has: the authors' and SpecForge's, vLLM's, speculators'."""
PEAGLE = ("PEagleDraftModel", "PEagleSpeculator")
"""speculators' names of P-EAGLE; other writers have EAGLE-3's. All of its heads store `_MASK`."""
_MASK = "mask_hidden"
_MASK_IDS = ("mask_token_id", "ptd_token_id", "pard_token")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""Entry of config.json that names the layers whose inputs a head is fed."""
_BLOCKS = ("midlayer.", "layers.0.")
"""Prefixes of the layer's names: the authors' and SpecForge's, and speculators'."""
_NORM_FIRST, _NORM_OUTPUT = "norm_before_residual", "norm_output"
_UNKNOWN = ("norm_before_fc", "fc_norm")
"""Entries for parts that mtpc does not know, if they are set."""


@dataclass(frozen=True)
class Eagle3Config(DrafterConfig):
    """What config.json of a head says.

    Attributes, in addition to those of `DrafterConfig`:
        norm_first: whether the residual is taken after the norm of the features.
        norm_output: whether the next draft is fed what the head's norm gives (EAGLE-3.1).
        mask_id: of P-EAGLE, the mask's token; None: drafts follow from each other.
        mask_shape: of P-EAGLE, the shape of `mask_hidden`.
    """

    norm_first: bool
    norm_output: bool
    mask_id: int | None = None
    mask_shape: tuple[int, ...] = ()

    @classmethod
    def read(cls, pair: Pairing) -> Eagle3Config:
        """From the drafter's config.json.

        Raises:
            CheckpointError: the head was made for a target of other sizes.
            UnsupportedModelError: the head or the target has parts that mtpc does not know.
        """
        entries, stored = pair.entries, pair.checkpoint.draft
        is_parallel = _MASK in stored.tensors
        config, rows, width = pair.read_layers(LlamaConfig, entries, "an EAGLE-3 head")
        kinds = entries.get("layer_types") or []
        unknown = [f"{name}={entries[name]!r}" for name in _UNKNOWN if entries.get(name)]
        if config.num_hidden_layers != 1 and not is_parallel:
            unknown.append(f"num_hidden_layers={config.num_hidden_layers}")
        if "sliding_attention" in kinds:
            unknown.append(f"layer_types={kinds!r}")
        if (entries.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
            unknown.append("use_aux_hidden_state=False")
        if unknown:
            raise UnsupportedModelError(
                f"{pair.where} is an EAGLE-3 head with {', '.join(unknown)}; expected one layer "
                "with full attention, fed by captured layers"
            )
        # At the top of config.json, ids are vLLM's and speculators': the input of layer i. In
        # `eagle_config` they are those of the trainers SpecForge and ModelOpt: the output of layer
        # i. But the authors' own choice of inputs, and ids that name the final norm, are taken as
        # they are.
        authors = list(authors_layers(pair.num_layers))
        nested = (entries.get("eagle_config") or {}).get(LAYER_IDS) or []
        if sorted(nested) != authors and pair.num_layers not in nested:
            nested = [i + 1 for i in nested]
        found = pair.check_layer_ids(entries.get(LAYER_IDS) or nested or authors, LAYER_IDS)
        first, output = (bool(entries.get(name)) for name in (_NORM_FIRST, _NORM_OUTPUT))
        head = cls(config, found, rows, width, first, output)
        if not is_parallel:
            return head
        mask = next((entries[n] for n in _MASK_IDS if entries.get(n) is not None), None)
        shape = tuple(stored.meta_tensor(_MASK).shape)
        return replace(head, mask_id=pair.check_mask(mask), mask_shape=shape)


def authors_layers(layers: int) -> tuple[int, int, int]:
    """The layers whose inputs the authors capture, of a target with so many."""
    return 2, layers // 2, layers - 3


class Eagle3Layer(DrafterLayer):
    """An EAGLE-3 head, whose cache is that of layer `index`."""

    config: Eagle3Config

    def __init__(self, wiring: MTPWiring, config: Eagle3Config, index: int, own: Collection[str]):
        super().__init__(wiring, config, own, llama.LlamaRMSNorm, llama.LlamaRotaryEmbedding)
        layers = config.layers
        self.embedding_norm = llama.LlamaRMSNorm(layers.hidden_size, eps=layers.rms_norm_eps)
        first, later = Eagle3Block(layers, index), range(1, layers.num_hidden_layers)
        others = [llama.LlamaDecoderLayer(layers, index + i) for i in later]
        self.block: Any = nn.ModuleList([first, *others]) if others else first
        if config.mask_id is not None:
            self.mask_hidden = nn.Parameter(torch.empty(config.mask_shape))
        rules, blocks = layers.base_model_tp_plan, "block.*" if others else "block"
        self.tp_plan = {name.replace("layers.*", blocks): style for name, style in rules.items()}

    def run(self, embedding: Tensor, features: Tensor, context: StepContext) -> Tensor:
        """Embeddings and features of rows, each [T, H] -> the layer's output [T, H]."""
        normed = self.hidden_norm(features)
        residual = normed if self.config.norm_first else features
        rows = torch.cat([self.embedding_norm(embedding), normed], -1)[None]
        angles = self.rotary(rows, context.positions[None])
        first, *others = self.block if isinstance(self.block, nn.ModuleList) else [self.block]
        hidden, given = first(rows, residual, angles, context), {"mtpc_context": context}
        for layer in others:
            more = {"position_embeddings": angles, "attention_mask": None, CACHE: context}
            hidden = layer(hidden[None], **given, **more)[0]
        return hidden


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


class Eagle3Draft(DrafterPass):
    """A head over flat tokens: (ids [T], features [T, H], *metadata) -> features [T, H]."""

    def forward(self, ids: Tensor, features: Tensor, *metadata: Tensor) -> Tensor:
        hidden = self.layer.run(self.embedding(ids), features, self.context(metadata))
        if self.layer.wiring.next_features == "before":
            return hidden
        return self.layer.final_norm(hidden)


class ParallelDraft(Eagle3Draft):
    """A P-EAGLE head over rows of masks: (ids [T], *metadata) -> features [T, H]."""

    def forward(self, ids: Tensor, *metadata: Tensor) -> Tensor:
        masked = self.layer.projection(self.layer.mask_hidden.reshape(1, -1))
        return super().forward(ids, masked.expand(ids.shape[0], -1), *metadata)


def eagle3_family(pair: Pairing) -> ModelFamily:
    """A target's family with an EAGLE-3 head in place of MTP layers; see `drafted_family`."""
    config, stored = Eagle3Config.read(pair), pair.checkpoint.draft.tensors
    block = next((b for b in _BLOCKS if any(name.startswith(b) for name in stored)), _BLOCKS[0])
    wiring = MTPWiring(
        embedding_norm=f"{block}input_layernorm",
        hidden_norm=f"{block}hidden_norm",
        projection="fc",
        final_norm="norm",
        next_features="after" if config.norm_output else "before",
        only_rules=("next_features", "embedding"),
    )
    parts = StepParts(
        target=partial(CapturingTarget, config.layer_ids),
        draft=Eagle3Draft,
        draft_entry=lambda layer: layer.projection,
        draft_vocabulary=draft_vocabulary,
    )
    if config.mask_id is not None:
        form = partial(Blocks, mask_id=config.mask_id, opens=False, skips=False, both_ways=False)
        parts = replace(parts, later_draft=ParallelDraft, drafting=form)
    prefix = block if config.layers.num_hidden_layers == 1 else "layers."
    return pair.family_with(config, wiring, Eagle3Layer, block_prefix=prefix, parts=parts)

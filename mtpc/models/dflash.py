"""DFlash, DFlash2 and DSpark: a few layers that make all drafts of a step in one pass over a block.

A block is the last token and a mask's token for each draft, at the positions L' and on. Its rows
attend to each other both ways, and to all committed rows. Keys and values of committed rows are not
the drafter's own hidden states: each layer projects the same rows, which `fc` and `hidden_norm`
make of the residual stream after some of the target's layers. Embedding and head are the target's.

DSpark's blocks have one row less, because the last token's row gives the first draft. Its Markov
head adds to the logits of each draft what the token before it says, so drafts are chosen in order.

DFlash2's blocks are DFlash's; `mtpc.models.dflash2` has what it adds.

Source: the authors' dflash/model.py (github.com/z-lab/dflash, at 44947fb), for the entries that
later checkpoints have vLLM's qwen3_dflash.py, and for DSpark vLLM's qwen3_dspark.py and speculators
0.9 (models/dspark); docs/models.md has the rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from mtpc.errors import UnsupportedModelError
from mtpc.models.dflash2 import CandidateSelector, ConvolvedLayer, DFlash2Config, Selection
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
from mtpc.ops.ragged import request_of
from mtpc.step.blocks import Blocks

ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator")
DSPARK = ("Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel", "DSparkSpeculator")
DFLASH2 = ("DFlash2DraftModel",)
"""What config.json has: the authors', and speculators'."""
_OWN_IDS, _IDS = "aux_hidden_state_layer_ids", "dflash_config.target_layer_ids"
"""speculators' entry has layers whose inputs are captured, the authors' those whose outputs are."""
_UNKNOWN = (
    *("attention_sink_bias", "use_swa", "projector_type", "use_gemma_norm"),
    *("attention_value_scale", "use_aux_hidden_norms", "gating"),
)
_HALVES = ("rope_is_neox_style", "is_neox_style")
"""Entries that say whether angles turn a head's halves, if they are set."""
_SLIDING = "sliding_attention"


@dataclass(frozen=True)
class DFlashConfig(DrafterConfig):
    """What config.json of a block drafter says.

    Attributes, in addition to those of `DrafterConfig`:
        mask_id: the mask's token.
        causal: for each layer, whether rows of a block see earlier ones of it only.
        skips: whether the first row of a block, the last token's, gives no draft.
        markov_rank: width of the Markov head; 0: there is none.
        confidence_width: of the rows that the confidence head takes; 0: there is none.
        second: what DFlash2 adds; None: it is none.
        embedding_scale: of the embeddings of a block's rows.
    """

    mask_id: int
    causal: tuple[bool, ...]
    skips: bool
    markov_rank: int
    confidence_width: int
    second: DFlash2Config | None
    embedding_scale: float

    @classmethod
    def read(cls, pair: Pairing) -> DFlashConfig:
        """From the drafter's config.json.

        Raises:
            CheckpointError: the drafter was made for a target of other sizes, or an entry is wrong.
            UnsupportedModelError: the drafter or the target has parts that mtpc does not know.
        """
        given, entries, where = pair.checkpoint.draft.config, pair.entries, pair.where
        entries |= {**(given.get("dflash_config") or {}), **(given.get("dspark_config") or {})}
        windowed = {"use_sliding_window": _SLIDING in (entries.get("layer_types") or ())}
        sizes = {**entries, **windowed}
        config, rows, width = pair.read_layers(Qwen3Config, sizes, "a block drafter")
        causal = _causal(entries, config, where)
        ids = entries.get("target_layer_ids")
        found = [i + 1 for i in ids] if ids else entries.get(_OWN_IDS) or []
        captured = pair.check_layer_ids(found, _IDS)
        if list(captured) != list(found):
            raise UnsupportedModelError(
                f"{where}: the layers to capture are {list(found)}; expected ascending ones: the "
                "authors join them as they are listed, and servers in the order of layers"
            )
        mask = pair.check_mask(entries.get("mask_token_id"))
        is_spark, is_second = (
            bool(set(given["architectures"]) & set(names)) for names in (DSPARK, DFLASH2)
        )
        skips = not entries.get("sample_from_anchor", is_spark)
        rank = (entries.get("markov_rank") or 0) if is_spark else 0
        reads_both = entries.get("confidence_head_with_markov", False)
        confident = config.hidden_size + rank * bool(reads_both) if is_spark else 0
        confident *= "confidence_head.proj.weight" in pair.checkpoint.draft.tensors
        widths = (config.hidden_size, config.vocab_size)
        second = DFlash2Config.read(entries, *widths, where) if is_second else None
        scale = float(entries.get("input_embedding_scale") or 1.0)
        says = (mask, causal, skips, rank, confident, second, scale)
        return cls(config, captured, rows, width, *says)


def _causal(entries: Mapping[str, Any], config: Any, where: Any) -> tuple[bool, ...]:
    """For each layer, whether it is causal within a block; as vLLM resolves it."""
    slides = [kind == _SLIDING for kind in config.layer_types]
    given = next((entries[n] for n in ("is_causal", "causal") if entries.get(n) is not None), None)
    if entries.get("sliding_window_non_causal"):
        given = False
    causal = tuple(bool(each if given is None else given) for each in slides)
    unknown = [f"{name}={entries[name]!r}" for name in _UNKNOWN if entries.get(name)]
    if any(slides) and not entries.get("sliding_window"):
        unknown.append("layers of sliding_attention without sliding_window")
    if entries.get("model_type") not in (None, "qwen3", "dflash", "dspark"):
        unknown.append(f"model_type={entries['model_type']!r}")
    unknown += [f"{name}=False" for name in _HALVES if entries.get(name) is False]
    if entries.get("markov_head_type") not in (None, "vanilla"):
        unknown.append(f"markov_head_type={entries['markov_head_type']!r}")
    if unknown:
        raise UnsupportedModelError(
            f"{where} is a block drafter with {', '.join(unknown)}; expected layers as Qwen3 has "
            "them, and no head but a plain Markov head or DFlash2's selector"
        )
    return causal


class DFlashLayer(DrafterLayer):
    """A block drafter, with its layers in `block`. The caches of these begin at layer `index`."""

    config: DFlashConfig

    def __init__(self, wiring: MTPWiring, config: DFlashConfig, index: int, own: Collection[str]):
        super().__init__(wiring, config, own, qwen3.Qwen3RMSNorm, qwen3.Qwen3RotaryEmbedding)
        layers, second = config.layers, config.second
        made: list[Any] = [
            ConvolvedLayer(layers, i, second) if second else qwen3.Qwen3DecoderLayer(layers, i)
            for i in range(layers.num_hidden_layers)
        ]
        for number, layer in enumerate(made):
            layer.self_attn.layer_idx = index + number
        self.block: Any = nn.ModuleList(made)
        rules = layers.base_model_tp_plan
        self.tp_plan = {name.replace("layers.", "block."): style for name, style in rules.items()}
        hidden, size = layers.hidden_size, layers.vocab_size
        if config.markov_rank:
            self.markov_head = MarkovHead(size, config.draft_vocab_size, config.markov_rank)
        if second:
            self.candidate_selector = CandidateSelector(hidden, size, second)
        if config.confidence_width:  # No step reads it.
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(config.confidence_width, 1)})

    def keep(self, rows: Tensor, context: StepContext) -> None:
        """Write keys and values of committed rows [T, H] to each layer's cache."""
        angles = self.rotary(rows[None], context.positions[None])
        for layer in self.block:
            attention: Any = layer.self_attn
            heads = (1, rows.shape[0], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(rows).view(heads)).transpose(1, 2)
            values = attention.v_proj(rows).view(heads).transpose(1, 2)
            _, turned = qwen3.apply_rotary_pos_emb(keys, keys, *angles)
            context.layers[attention.layer_idx].write(turned, values, context)

    def run(self, rows: Tensor, context: StepContext) -> Tensor:
        """Embeddings of the blocks' rows [T, H] -> what the last layer gives, [T, H]."""
        # Each row is a request of one row that has the length of its own request, so it attends to
        # all rows of its block. A window ends before the block, so it is wider by the block's rows.
        count, reqs = rows.shape[0], context.seq_lens.shape[0]
        starts = torch.arange(count + 1, device=rows.device, dtype=torch.int32)
        request = request_of(starts[:-1].long(), context.query_start_loc).clamp(max=reqs - 1)
        alone = replace(
            context,
            block_table=context.block_table[request],
            seq_lens=context.seq_lens[request],
            query_start_loc=starts,
            ahead=count // reqs,
        )
        scale = self.config.embedding_scale
        hidden = (rows if scale == 1 else rows * scale)[None]
        angles = self.rotary(hidden, context.positions[None])
        given: dict[str, Any] = {"position_embeddings": angles, "attention_mask": None}
        if self.config.second:
            place = torch.arange(rows.shape[0], device=rows.device)
            given["place"] = place - context.query_start_loc[request]
        for layer, is_causal in zip(self.block, self.config.causal, strict=True):
            seen = context if is_causal else alone
            hidden = layer(hidden, **given, **{"mtpc_context": seen, CACHE: seen})
        return hidden[0]

    @property
    def bias(self) -> nn.Module | None:
        """What the choice of a draft adds to its logits."""
        if self.config.second:
            return Selection(self)
        return self.markov_head if self.config.markov_rank else None


class MarkovHead(nn.Module):
    """What the token before a draft adds to its logits: (logits [R, V_d], features, tokens [R])."""

    def __init__(self, size: int, rows: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(size, rank)
        self.markov_w2 = nn.Linear(rank, rows, bias=False)

    def forward(self, logits: Tensor, features: Tensor, before: Tensor) -> Tensor:
        return logits + self.markov_w2(self.markov_w1(before))


class DFlashContext(DrafterPass):
    """The pass over all rows: (ids [T], rows [T, H], *metadata) -> rows; writes their keys."""

    def forward(self, ids: Tensor, rows: Tensor, *metadata: Tensor) -> Tensor:
        self.layer.keep(rows, self.context(metadata))
        return rows


class DFlashBlock(DrafterPass):
    """The pass over blocks: (ids [T], *metadata) -> features before the norm [T, H]."""

    def forward(self, ids: Tensor, *metadata: Tensor) -> Tensor:
        out: Tensor = self.layer.run(self.embedding(ids), self.context(metadata))
        return out


def dflash_family(pair: Pairing) -> ModelFamily:
    """A target's family with a DFlash, DFlash2 or DSpark drafter in place of MTP layers; see
    `drafted_family`."""
    config = DFlashConfig.read(pair)
    wiring = MTPWiring(
        embedding_norm="",
        hidden_norm="hidden_norm",
        projection="fc",
        final_norm="norm",
        next_features="before",
        only_rules=("embedding", "head"),
    )
    blocks = partial(
        Blocks,
        mask_id=config.mask_id,
        skips=config.skips,
        both_ways=not all(config.causal),
        has_bias=config.markov_rank > 0 or config.second is not None,
        has_confidence=config.confidence_width > 0,
    )
    parts = StepParts(
        target=partial(CapturingTarget, config.layer_ids),
        draft=DFlashContext,
        later_draft=DFlashBlock,
        draft_entry=lambda layer: nn.Sequential(layer.projection, layer.hidden_norm),
        draft_bias=lambda layer: layer.bias,
        draft_vocabulary=draft_vocabulary,
        drafting=blocks,
    )
    return pair.family_with(config, wiring, DFlashLayer, block_prefix="layers.", parts=parts)

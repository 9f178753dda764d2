"""Qwen4-Exp (Qwen3.8-Flash-Next): residual streams, chosen blocks, embeddings of n-grams.

Three of four layers are Gated DeltaNet, whose output gate may be a sigmoid; the others attend to
blocks that an indexer chooses. Some of the former add embeddings of the last token ids. The
residual is several streams side by side, [T, streams * H], which gates mix before and after each
sublayer.

The MTP layer is fed all streams: the target's, from before its last mixer, or its own for further
drafts. Its block is an attention layer; its mixer and the target's head make logits.

Source: transformers' Qwen4Exp (5.24) for the target. It drops the MTP layer. That is vLLM's
qwen4_exp/nvidia/mtp.py and SGLang's qwen4_exp_mtp.py, which agree: one norm over all streams, one
projection for each stream, and the token's own projection added to each.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor, nn

from mtpc.layout import VERIFY, BufferSpec
from mtpc.layout.buffers import K_MAX, P, S
from mtpc.models.caches import CachePool, paged_kv_specs, paged_spec, slot_spec
from mtpc.models.families.qwen3_next import SEPARATE, gated_delta_specs, num_mtp_layers
from mtpc.models.family import ModelFamily, MTPWiring, layers_after
from mtpc.models.heads import head_of
from mtpc.models.hf import HFDraft, MTPLayer, StepParts, TextRotary
from mtpc.models.qwen4_exp_layers import (
    BlockAttention,
    BlockRotary,
    IndexedKV,
    LinearState,
    NGramLayer,
)
from mtpc.models.seams import CACHE, StepContext

_GRIDS = 3


def _cache_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """State buffers by the layer's type; MTP layers follow the last and attend.

    With n-gram embeddings, a request has its last n - 1 + K token ids, and the last
    (kernel size - 1) n + K inputs of the convolution.
    """
    if layer >= config.num_hidden_layers or config.layer_types[layer] != "linear_attention":
        meaning = "Qwen4-Exp: indexer keys of tokens and blocks by page, as keys"
        page = (P, config.indexer_head_dim)
        index = paged_spec(f"kv.{layer}.index", page, dtype, meaning)
        return (*paged_kv_specs(config, layer, dtype), index)
    specs = gated_delta_specs(config, layer, dtype)
    if layer + 1 not in config.ple_layer_ids:
        return specs
    ids = (S, config.ngram_size - 1 + K_MAX, 1)
    past = (config.ple_conv_kernel_size - 1) * config.ngram_size
    rows = (S, sympy.Max(1, past + K_MAX), config.hc_count * config.hidden_size)
    return (
        *specs,
        slot_spec(f"kv.{layer}.ple_ids", ids, torch.int64, "Qwen4-Exp: last token ids", VERIFY),
        slot_spec(f"kv.{layer}.ple_rows", rows, dtype, "Qwen4-Exp: last rows to convolve", VERIFY),
    )


class StreamTarget(nn.Module):
    """The decoder over flat tokens, without its last mixer: (ids [T], ...) -> [T, streams * H]."""

    def __init__(self, decoder: Any, pool: CachePool, wiring: MTPWiring):
        super().__init__()
        self.embedding, self.layers, self.pool = decoder.embed_tokens, decoder.layers, pool
        self.streams = decoder.config.hc_count
        rotary = TextRotary(decoder.rotary_emb, _GRIDS, None)
        self.rotary = BlockRotary(rotary, decoder.config.indexer_compress_ratio)

    def forward(self, ids: Tensor, *metadata: Tensor) -> Tensor:
        embedding = self.embedding(ids)
        context = StepContext.of(metadata, self.pool.layers())
        given: dict[str, Any] = {
            "position_embeddings": self.rotary(embedding, context.positions),
            "ple_input_ids": ids[None],
            CACHE: context,
        }
        hidden = torch.cat([embedding] * self.streams, -1)[None]
        for layer in self.layers:
            hidden = layer(hidden, **given)
        return hidden[0]


def _draft(decoder: Any, rotary: TextRotary, layer: MTPLayer, pool: CachePool) -> nn.Module:
    """The MTP layer over flat tokens, whose attention needs the angles of blocks, too."""
    attention: Any = layer.block.self_attn
    angles: Any = BlockRotary(rotary, attention.ratio)
    return HFDraft(decoder, angles, layer, pool)


def _target_head(model: Any, wiring: MTPWiring) -> nn.Module:
    mixer = model.get_decoder().hyper_connection_mixer
    return nn.Sequential(mixer, model.get_output_embeddings())


def _draft_head(model: Any, layer: MTPLayer) -> nn.Module:
    return nn.Sequential(layer.stream_head, head_of(model, layer))


QWEN4_EXP = ModelFamily(
    name="qwen4_exp",
    architectures=("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
    wiring=MTPWiring(
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        projection="",
        embedding_projection="fc_embedding",
        hidden_projection="fc_hidden",
        final_norm="",
        stream_head=("hyper_connection_mixer.", ""),
        streams=lambda config: int(config.hc_count),
        only_rules=("zero_first_embedding",),
    ),
    num_mtp_layers=num_mtp_layers,
    layer_prefix=lambda num_hidden_layers, i: "mtp.",
    block_prefix="layers.0.",
    block_config=lambda config: layers_after(config, 1, layer_types="indexed_attention"),
    cache_specs=_cache_specs,
    cache_kinds=(LinearState, IndexedKV),
    canonical={
        "Qwen4ExpTextGatedDeltaNet": SEPARATE,
        "Qwen4ExpTextAttention": BlockAttention,
        "Qwen4ExpTextPLELayer": NGramLayer,
    },
    parts=StepParts(
        *(StreamTarget, _target_head, _draft, _draft_head),
        stream_head=lambda decoder, config: type(decoder.hyper_connection_mixer)(
            config, use_combine=False
        ),
    ),
    position_grids=_GRIDS,
    stored_prefixes=(("model.", "model.language_model."),),
    computed={
        "attn_output_gate": True,
        "mtp_use_dedicated_embeddings": False,
        "index_share_for_mtp_iteration": False,
        "mtp.mtp_use_hidden_state_from_layer": None,
    },
)
"""The text model, which released checkpoints hold inside a multimodal model."""

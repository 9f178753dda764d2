"""DeepSeek-V4: residual streams, sliding-window attention, compressed entries; one MTP layer.

The MTP layer is fed all residual streams, [T, streams, H]: the target's, from before its stream
head, or its own for further drafts. It uses the target's embedding and output head, and has a norm
and a stream head of its own.

Source: transformers' DeepseekV4 (5.17 to 5.24) for the target. transformers does not build the MTP
layer: the released tensor names (`mtp.0.*`) and vLLM's predictor are its source.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import sympy
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from mtpc.errors import UnsupportedModelError
from mtpc.layout import STEP, VERIFY, BufferSpec, dtype_name
from mtpc.layout.buffers import K_MAX, M, P, S
from mtpc.models.caches import CachePool, slot_spec
from mtpc.models.deepseek_v4_attention import CompressedState, WindowedAttention
from mtpc.models.family import ModelFamily, MTPWiring, layers_after
from mtpc.models.heads import head_of
from mtpc.models.hf import HFDraft, HostedLayer, MTPLayer, StepParts, TextRotary
from mtpc.models.seams import StandIn, StepContext
from mtpc.models.slot_rings import SlotRing, WindowMasks
from mtpc.ops.sinkhorn import sinkhorn

_LINEARS = {
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.compressor.wkv": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.compressor.norm": "self_attn.compressor.kv_norm",
    "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.compressor.norm": "self_attn.compressor.indexer.kv_norm",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
}
STORED_NAMES = (
    *((f"{stored}.", f"{ours}.") for stored, ours in _LINEARS.items()),
    # The name that transformers 5.23 writes for this norm.
    ("attn.norm.", "self_attn.kv_norm."),
    ("attn.attn_sink", "self_attn.sinks"),
    ("attn.compressor.ape", "self_attn.compressor.position_bias"),
    ("attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"),
    ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    ("ffn.", "mlp."),
    ("hc_attn_", "attn_hc."),
    ("hc_ffn_", "ffn_hc."),
)
"""Parts of names in a decoder block: in released checkpoints, and in transformers' modules."""
STORED_PREFIXES = (
    ("model.layers.", "layers."),
    ("model.embed_tokens.", "embed."),
    ("lm_head.", "head."),
    ("model.norm.", "norm."),
    ("model.hc_head.hc_", "hc_head_"),
)
"""Name prefixes of the target: in transformers' model, and in released checkpoints."""
_MAIN = "main"
"""transformers' name for the rotary embedding of layers without compressed entries."""


_ROLES = {
    "window": "DeepSeek-V4: a ring of the last keys, by request slot",
    "raw": "DeepSeek-V4: inputs of the compressor, by request slot",
    "entries": "DeepSeek-V4: compressed entries, by request slot",
    "index_raw": "DeepSeek-V4: inputs of the indexer, by request slot",
    "index_entries": "DeepSeek-V4: compressed entries of the indexer, by request slot",
}
"""What each buffer of a layer holds."""


def cache_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """State of one layer by request slot: the window's ring and, in compressed layers, more.

    K is the largest number of drafts, r the compression ratio, D and I are the head sizes of
    attention and indexer. Values of one request:

    - every layer: (window - 1 + max(K, 1)) D for the window, one place more than any row sees;
    - an HCA layer: (r - 1 + K) 2D more, and D for each r tokens of `max_len`;
    - a CSA layer: (2r - 1 + K) 4(D + I) more, and D + I for each r tokens of `max_len`.
    """
    kinds = [*config.layer_types, "sliding_attention"]
    kind, width = kinds[min(layer, len(kinds) - 1)], config.head_dim

    def spec(role: str, rows: Any, features: int) -> BufferSpec:
        dims, writers = (S, sympy.Max(1, rows), features), STEP if role == "window" else VERIFY
        return slot_spec(f"kv.{layer}.{role}", dims, dtype, _ROLES[role], writers)

    # A place that a row does not see says where its oldest key is: operators add in that order.
    specs = [spec("window", config.sliding_window - 1 + sympy.Max(1, K_MAX), width)]
    if kind == "sliding_attention":
        return tuple(specs)
    ratio = config.compress_rates[kind]
    entries = sympy.floor(M * P / ratio)
    parts = [("raw", "entries", width)]
    if kind == "compressed_sparse_attention":
        parts.append(("index_raw", "index_entries", config.index_head_dim))
    # CSA's windows overlap by one: an entry reads two windows, and each token has two halves.
    halves = len(parts)
    for raw, made, size in parts:
        specs.append(spec(raw, halves * ratio - 1 + K_MAX, 2 * halves * size))
        specs.append(spec(made, entries, size))
    return tuple(specs)


class HyperConnection(StandIn):
    """Computes the weights that join residual streams before a sublayer and mix them after it.

    All rounds of normalisation are one operator. A trace of transformers' module has about ten
    nodes for each of `hc_sinkhorn_iters` rounds, twice per layer.
    """

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of the streams, and the streams joined for the sublayer.

        Args:
            streams: [B, T, n, H].

        Returns:
            post [B, T, n]: weight of the sublayer's output in each new stream;
            mix [B, T, n, n]: weights of the old streams in each new stream;
            joined [B, T, H]: the sublayer's input, in the dtype of `streams`.
            The weights are float32 or wider.
        """
        n = self.hc_mult
        flat = self.input_norm(streams.flatten(2).float())
        sizes = [n, n, n * n]
        pre, post, mix = F.linear(flat, self.fn.float()).split(sizes, -1)
        pre_base, post_base, mix_base = self.base.split(sizes)
        pre = torch.sigmoid(pre * self.scale[0] + pre_base) + self.hc_eps
        post = 2 * torch.sigmoid(post * self.scale[1] + post_base)
        logits = (mix * self.scale[2] + mix_base).view(-1, n, n)
        mix = sinkhorn(logits, self.hc_sinkhorn_iters, self.hc_eps)
        joined = (pre.unsqueeze(-1) * streams).sum(2).to(streams.dtype)
        return post, mix.view(*post.shape, n), joined


class StreamTarget(nn.Module):
    """The decoder over flat tokens, without its stream head: (ids [T], ...) -> [T, streams, H].

    Raises:
        UnsupportedModelError: this transformers' norms do not keep the model's dtype.
    """

    def __init__(self, decoder: Any, pool: CachePool, wiring: MTPWiring):
        super().__init__()
        # In transformers 5.17 a float32 weight makes the norm's results float32.
        embedding = decoder.embed_tokens.weight
        found = decoder.norm(torch.empty_like(embedding[:1])).dtype
        if found != embedding.dtype:
            raise UnsupportedModelError(
                f"the norms of DeepSeek-V4 give {dtype_name(found)} for "
                f"{dtype_name(embedding.dtype)} in transformers {transformers.__version__}, which "
                "its linears do not take; install 5.23 or later, or use dtype='float32'"
            )
        self.embedding, self.rotary = decoder.embed_tokens, decoder.rotary_emb
        self.layers, self.config, self.pool = decoder.layers, decoder.config, pool

    def forward(self, ids: Tensor, *metadata: Tensor) -> Tensor:
        embedding = self.embedding(ids)
        hidden = embedding[:, None].expand(-1, self.config.hc_mult, -1).contiguous()[None]
        context = StepContext.of(metadata, self.pool.layers())
        given = _layer_inputs(context, 0, self.config.sliding_window)
        kinds = sorted({layer.self_attn.rope_layer_type for layer in self.layers})
        positions = context.positions[None]
        angles = {k: self.rotary(embedding, positions, layer_type=k) for k in kinds}
        for layer in self.layers:
            hidden = layer(hidden, input_ids=ids[None], position_embeddings=angles, **given)
        return hidden[0]


class StreamDraft(HFDraft):
    """The MTP layer over flat tokens.

    (ids [T], features [T, streams, H], *metadata) -> features [T, streams, H].
    """

    def forward(self, ids: Tensor, features: Tensor, *metadata: Tensor) -> Tensor:
        context = StepContext.of(metadata, self.pool.layers())
        attention: Any = self.layer.block.self_attn
        given = _layer_inputs(context, attention.layer_idx, attention.sliding_window)
        return _run_layer(self.layer, self.rotary, self.embedding(ids), features, given)


def _run_layer(
    layer: MTPLayer, rotary: TextRotary, embedding: Tensor, features: Tensor, given: dict[str, Any]
) -> Tensor:
    """Embeddings [T, H] and features [T, streams, H] -> [T, streams, H]; for `given` see
    `_layer_inputs`. The layer's experts are chosen by score, so it needs no token ids."""
    positions, attention = given["mtpc_context"].positions, layer.block.self_attn
    hidden = layer.join(embedding, features, positions)[None]
    angles = {attention.rope_layer_type: rotary(embedding, positions)}  # type: ignore[union-attr]
    out: Tensor = layer.block(hidden, position_embeddings=angles, **given)[0]
    return out


def _run_hosted(
    layer: MTPLayer, rotary: TextRotary, embedding: Tensor, features: Tensor, context: Any
) -> Tensor:
    """The layer over a host's attention; the host has streams as flat rows, [T, streams * H]."""
    streams = features.unflatten(-1, (-1, embedding.shape[-1]))
    given = {"mtpc_context": context, "masks": None}
    return _run_layer(layer, rotary, embedding, streams, given).flatten(1)


def _layer_inputs(context: StepContext, layer: int, window: int) -> dict[str, Any]:
    """Keyword arguments of the attention modules; all layers share the masks of `layer`'s ring."""
    masks = WindowMasks.of(context, SlotRing(context.layers[layer].window), window)
    return {"mtpc_context": context, "masks": masks}


class StreamReadout(nn.Module):
    """What the output head reads of features [T, streams, H], or of such rows that are flat,
    [T, streams * H]: stream head and norm -> [T, H]."""

    def __init__(self, stream_head: Any, norm: Any):
        super().__init__()
        self.stream_head, self.norm = stream_head, norm

    def forward(self, features: Tensor) -> Tensor:
        if features.dim() == 2:
            features = features.unflatten(-1, (-1, self.norm.weight.shape[0]))
        out: Tensor = self.norm(self.stream_head(features[None]))[0]
        return out


def _target_head(model: Any, wiring: MTPWiring) -> nn.Module:
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    return nn.Sequential(StreamReadout(decoder.hc_head, decoder.norm), head)


def _draft_head(model: Any, layer: MTPLayer) -> nn.Module:
    return nn.Sequential(_readout(layer), head_of(model, layer))


def _readout(layer: MTPLayer) -> StreamReadout:
    return StreamReadout(layer.stream_head, layer.final_norm)


DEEPSEEK_V4 = ModelFamily(
    name="deepseek_v4",
    architectures=("DeepseekV4ForCausalLM",),
    wiring=MTPWiring(
        embedding_norm="enorm",
        hidden_norm="hnorm",
        projection="",
        embedding_projection="e_proj",
        hidden_projection="h_proj",
        final_norm="norm",
        stream_head=("hc_head_", "hc_"),
        only_rules=("zero_first_embedding", "head", "embedding"),
    ),
    layer_prefix=lambda num_hidden_layers, i: f"mtp.{i}.",
    cache_specs=cache_specs,
    cache_kinds=(CompressedState,),
    # Its experts are chosen by score.
    block_config=partial(layers_after, layer_types="sliding_attention", mlp_layer_types="moe"),
    shared_tensors={"emb.tok_emb.weight": "embedding", "head.weight": "head"},
    canonical={
        "DeepseekV4Attention": WindowedAttention,
        "DeepseekV4HyperConnection": HyperConnection,
    },
    parts=StepParts(
        *(StreamTarget, _target_head, StreamDraft, _draft_head),
        stream_head=lambda decoder, config: type(decoder.hc_head)(config),
        hosted=HostedLayer(
            lambda config: config.hc_mult * config.hidden_size, _run_hosted, _readout
        ),
    ),
    rotary_type=lambda config, i: _MAIN,
    stored_names=STORED_NAMES,
    stored_prefixes=STORED_PREFIXES,
    expert_names=("w1", "w3", "w2"),
)

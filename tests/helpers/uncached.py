"""Whole texts through a tiny model's target and MTP layers, uncached."""

from __future__ import annotations

from typing import Any

import torch

from helpers.tiny import family_of, text_config
from mtpc.models.heads import final_norm_of
from mtpc.models.hf import MTPLayer


def target_features(target: Any, ids: torch.Tensor) -> torch.Tensor:
    """The target's features of rows [B, L]: after the final norm, or before a stream head."""
    decoder, seen = target.get_decoder(), []
    head = stream_head(decoder)
    if head is None:
        return decoder(input_ids=ids, use_cache=False).last_hidden_state
    hook = head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    decoder(input_ids=ids, use_cache=False)
    hook.remove()
    return seen[0]


def stream_head(decoder: Any) -> Any:
    """What joins a decoder's residual streams: DeepSeek-V4's or Qwen4-Exp's; None elsewhere."""
    return getattr(decoder, "hc_head", None) or getattr(decoder, "hyper_connection_mixer", None)


def fed_features(name: str, target: Any, ids: torch.Tensor) -> torch.Tensor:
    """The features of rows [B, L] that the first MTP layer is fed."""
    if family_of(name).wiring.first_features == "after":
        return target_features(target, ids)
    seen: list[torch.Tensor] = []
    decoder = target.get_decoder()
    hook = decoder.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    decoder(input_ids=ids, use_cache=False)
    hook.remove()
    return seen[0]


def logits_of(target: Any, features: torch.Tensor, layer: MTPLayer | None = None) -> torch.Tensor:
    """Logits of the target's features, or of a layer's own."""
    decoder, head = target.get_decoder(), target.get_output_embeddings()
    if layer is not None:
        head = layer.head or head
    if stream_head(decoder) is None:
        is_bare = layer is not None and layer.wiring.next_features == "before"
        return head(final_norm_of(decoder, layer)(features) if layer and is_bare else features)
    if layer is None:
        norm = getattr(decoder, "norm", torch.nn.Identity())
        return head(norm(stream_head(decoder)(features)))
    return head(layer.final_norm(layer.stream_head(features)))


def run_mtp_uncached(
    name: str, target: Any, layer: MTPLayer, ids: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """The features of an MTP layer that the next draft is fed, over whole rows [B, L], uncached.

    Attention is transformers' own.
    """
    positions = torch.arange(ids.shape[1])[None]
    embedding = target.get_input_embeddings()(ids)
    if features.dim() == 4:  # [B, L, streams, H]
        hidden = layer.embedding_projection(layer.embedding_norm(embedding))[:, :, None]
        hidden = hidden + layer.hidden_projection(layer.hidden_norm(features))
        mask = torch.full((ids.shape[1], ids.shape[1]), float("-inf"), dtype=hidden.dtype)
        window = target.config.sliding_window
        return layer.block(
            hidden,
            input_ids=ids,
            attention_mask=(mask.triu(1) + mask.tril(-window))[None, None],
            position_ids=positions,
            position_embeddings={"main": rotate(target, embedding, positions, "main")},
        )
    hidden = layer.join(embedding, features, positions.expand_as(ids))
    distance = positions.T - positions
    attention = getattr(layer.block, "self_attn", None)
    window = getattr(attention, "sliding_window", None) or ids.shape[1]
    mask = torch.where((distance >= 0) & (distance < window), 0.0, float("-inf"))
    config = text_config(target)
    number = getattr(attention, "layer_idx", config.num_hidden_layers)
    kind = family_of(name).rotary_type(config, number - config.num_hidden_layers)
    out = layer.block(
        hidden,
        attention_mask=mask.to(hidden.dtype).expand(len(ids), 1, -1, -1),
        position_ids=positions,
        position_embeddings=rotate(target, hidden, positions.expand_as(ids), kind),
    )
    hidden = out[0] if isinstance(out, tuple) else out
    if layer.wiring.next_features == "before":
        return hidden
    return final_norm_of(target.get_decoder(), layer)(hidden)


def rotate(
    target: Any, hidden: torch.Tensor, positions: torch.Tensor, kind: str | None = None
) -> Any:
    """Rotary embedding of text at positions [B, L], of an attention type where types differ;
    Qwen3.5 wants them for three grids."""
    rotary = getattr(target.get_decoder(), "rotary_emb", None)
    if rotary is None:
        return None
    grids = positions.expand(3, *positions.shape) if _has_grids(rotary) else positions
    return rotary(hidden, grids, **({"layer_type": kind} if kind else {}))


def _has_grids(rotary: Any) -> bool:
    return hasattr(rotary, "mrope_section")

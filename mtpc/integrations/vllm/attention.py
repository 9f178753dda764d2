"""vLLM's attention layers for the sites of a traced draft."""

from __future__ import annotations

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention, MLAAttention

from mtpc.errors import UnsupportedModelError
from mtpc.integrations.attention_site import AttentionSite, expand_latent
from mtpc.integrations.vllm.rules import OWN_DRAFT


def make_attention(site: AttentionSite, vllm_config: VllmConfig, prefix: str) -> nn.Module:
    """Make vLLM's layer for a site.

    Args:
        site: the site.
        vllm_config: vLLM's config for the draft.
        prefix: prefix of the layer's name, by which vLLM finds the layer's KV cache. It contains
            exactly one number, and no other layer has the same prefix.

    Raises:
        UnsupportedModelError: the site has sinks, or keys that are values; or vLLM gives the layer
            another window.
    """
    if site.sinks is not None or site.kind == "shared":
        what = "sinks" if site.sinks is not None else "keys that are its values"
        raise UnsupportedModelError(
            f"{prefix}: the draft has attention with {what}, which mtpc does not support in vLLM; "
            f"{OWN_DRAFT}"
        )
    if site.kind == "latent" and vllm_config.model_config.use_mla:
        return LatentAttention(site, vllm_config, prefix)
    return FullAttention(site, vllm_config, prefix)


class FullAttention(nn.Module):
    """`Attention` over keys and values. It expands a latent if vLLM's MLA is switched off.

    Values narrower than keys are padded, as in vLLM's own classes, because some backends support
    only one width.
    """

    def __init__(self, site: AttentionSite, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        self.site = site
        self.attention = Attention(
            site.num_heads,
            site.head_dim,
            site.scale,
            num_kv_heads=site.num_kv_heads,
            cache_config=vllm_config.cache_config,
            logits_soft_cap=site.softcap or None,
            per_layer_sliding_window=site.sliding_window or None,
            prefix=f"{prefix}.attn",
        )
        window = self.attention.sliding_window or 0
        if window != site.sliding_window:
            raise UnsupportedModelError(
                f"{prefix}: vLLM gives the layer a window of {window}; the model has one of "
                f"{site.sliding_window} (0 is none): {OWN_DRAFT}"
            )

    def forward(self, q: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """See `AttentionSite`."""
        site = self.site
        is_latent = site.kind == "latent"
        keys, values = expand_latent(site, first, second) if is_latent else (first, second)
        values = nn.functional.pad(values, (0, site.head_dim - site.v_head_dim))
        out = self.attention(q.contiguous(), keys.contiguous(), values.contiguous())
        return out.view(-1, site.num_heads, site.head_dim)[..., : site.v_head_dim]


class LatentAttention(nn.Module):
    """`MLAAttention`, which stores latents in vLLM's cache."""

    def __init__(self, site: AttentionSite, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        self.site = site
        unrotated = site.head_dim - site.rope_head_dim
        # vLLM reads the expansion's weight, and may call it and expect a pair.
        site.expansion.return_bias = True
        self.attention = MLAAttention(
            num_heads=site.num_heads,
            scale=site.scale,
            qk_nope_head_dim=unrotated,
            qk_rope_head_dim=site.rope_head_dim,
            v_head_dim=site.v_head_dim,
            q_lora_rank=vllm_config.model_config.hf_text_config.q_lora_rank,
            kv_lora_rank=site.latent_rank,
            kv_b_proj=site.expansion,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, q: Tensor, latent: Tensor, rope_key: Tensor) -> Tensor:
        """See `AttentionSite`."""
        site = self.site
        shape = (q.shape[0], site.num_heads * site.v_head_dim)
        out = self.attention(
            q.contiguous(), latent.contiguous(), rope_key[:, None].contiguous(), output_shape=shape
        )
        return out.view(-1, site.num_heads, site.v_head_dim)

"""SGLang's attention layers for the sites of a traced draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool
from sglang.srt.runtime_context import attention_backends, get_exec, get_platform
from torch import Tensor, nn

from mtpc.errors import UnsupportedModelError
from mtpc.integrations.attention_site import AttentionSite, expand_latent


@dataclass
class DraftRun:
    """The current forward of one draft, for the draft's sites.

    A traced graph calls its sites with tensors only, so the sites read SGLang's batch from here.
    Each draft has its own object, so that drafts do not see each other's batches.

    Attributes:
        forward_batch: SGLang's `ForwardBatch`; None between forwards.
    """

    forward_batch: Any = None


def make_attention(site: AttentionSite, layer_id: int, run: DraftRun) -> nn.Module:
    """Make SGLang's attention for a site.

    Args:
        site: a site of the traced draft.
        layer_id: the site's layer in the draft's KV pool.
        run: the draft's current forward.

    Raises:
        UnsupportedModelError: the site has sinks, and keys apart from its values; or see
            `SharedAttention`.
    """
    if site.kind == "shared":
        return SharedAttention(site, layer_id, run)
    if site.sinks is not None:
        raise UnsupportedModelError(
            "the draft has attention with sinks, which SGLang passes to each attention backend in "
            "its own way; use SGLang's own draft"
        )
    kind = LatentAttention if site.kind == "latent" else Attention
    return kind(site, layer_id, run)


class Attention(nn.Module):
    """Multi-head attention over SGLang's K and V pools: (q, k, v), each [T, heads, D]."""

    def __init__(self, site: AttentionSite, layer_id: int, run: DraftRun):
        super().__init__()
        self.run, self.v_head_dim = run, site.v_head_dim
        self.radix = RadixAttention(
            site.num_heads,
            site.head_dim,
            site.scale,
            site.num_kv_heads,
            layer_id,
            logit_cap=site.softcap,
            v_head_dim=site.v_head_dim,
            # SGLang's window does not count a row's own position.
            sliding_window_size=site.sliding_window - 1 if site.sliding_window else -1,
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with queries [T, N, D], keys [T, H_kv, D] and values; returns [T, N, D_v]."""
        out: Tensor = self.radix(q.flatten(1), k.flatten(1), v.flatten(1), self.run.forward_batch)
        return out.view(*q.shape[:2], self.v_head_dim)


class LatentAttention(nn.Module):
    """Attention over SGLang's latent pool: (q [T, N, D], latent [T, rank], rope_key [T, D_rope]).

    The two halves of the expansion are applied to the query and to the output, as in DeepSeek-V2
    (section 2.1.2). So SGLang attends to one head of latents, and stores only latents. SGLang's
    aiter backend cannot attend so in a prompt's rows: there it gets expanded keys and values.

    Attributes:
        to_key: [N, D - D_rope, rank].
        to_value: [N, D_v, rank].
        quant_method: SGLang's loader calls it after each load, when all weights are in their final
            form: `read_expansion`.
    """

    to_key: Tensor
    to_value: Tensor

    def __init__(self, site: AttentionSite, layer_id: int, run: DraftRun):
        super().__init__()
        self.run, self.site = run, site
        options = dict(scaling=site.scale, layer_id=layer_id, logit_cap=site.softcap)
        width, rank = site.latent_rank + site.rope_head_dim, site.latent_rank
        self.radix = RadixAttention(
            site.num_heads, width, num_kv_heads=1, v_head_dim=rank, **options
        )
        self.expanded = RadixAttention(
            site.num_heads,
            site.head_dim,
            num_kv_heads=site.num_heads,
            v_head_dim=site.v_head_dim,
            **options,
        )
        # The aiter backend expands the latents of a prompt's cached beginning with it.
        self.expanded.kv_b_proj = _Expansion(site.expansion)
        for name, size in (
            ("to_key", site.head_dim - site.rope_head_dim),
            ("to_value", site.v_head_dim),
        ):
            half = torch.zeros(site.num_heads, size, rank)
            self.register_buffer(name, half, persistent=False)
        self.quant_method = _AfterLoading()

    @torch.no_grad()
    def read_expansion(self) -> None:
        """Set both halves, in place, from what the expansion makes of unit vectors.

        So they are right however SGLang stores the expansion's weight: quantised or packed.
        """
        site = self.site
        units = torch.eye(site.latent_rank, dtype=self.to_key.dtype, device=self.to_key.device)
        by_head = site.expansion(units).T.unflatten(0, (site.num_heads, -1))
        for half, part in zip(
            (self.to_key, self.to_value),
            by_head.split([self.to_key.shape[1], site.v_head_dim], 1),
            strict=True,
        ):
            half.copy_(part)

    def forward(self, q: Tensor, latent: Tensor, rope_key: Tensor) -> Tensor:
        """Attend with queries, latents and rope keys; returns [T, N, D_v]."""
        site, batch = self.site, self.run.forward_batch
        key = torch.cat([latent, rope_key], -1)[:, None]
        if needs_expanded_heads(batch):
            get_token_to_kv_pool().set_kv_buffer(
                self.radix, KVWriteLoc.for_batch(batch), key, latent[:, None]
            )
            expanded = expand_latent(site, latent, rope_key)
            out: Tensor = self.expanded(q, *expanded, batch, save_kv_cache=False)
            return out.view(-1, site.num_heads, site.v_head_dim)
        plain, rotated = q.split([self.to_key.shape[1], site.rope_head_dim], -1)
        query = torch.cat([torch.einsum("tnd,ndr->tnr", plain, self.to_key), rotated], -1)
        # The query keeps its heads: the aiter backend asserts three dimensions.
        out = self.radix(query, key, latent[:, None], batch)
        out = out.view(-1, site.num_heads, site.latent_rank)
        return torch.einsum("tnr,ndr->tnd", out, self.to_value)


class SharedAttention(nn.Module):
    """Attention over the window of SGLang's DeepSeek-V4 pool: (q [T, N, D], k [T, D], k).

    The keys are normalised, rotated, and also the values. SGLang's V4 backends store them in the
    pool's own format, as its own draft does.

    Raises:
        UnsupportedModelError: SGLang's backend has another window or scale, or its pool takes keys
            in another form.
    """

    def __init__(self, site: AttentionSite, layer_id: int, run: DraftRun):
        super().__init__()
        _check_window(site)
        self.run, self.sinks = run, site.sinks
        self.radix = RadixAttention(
            site.num_heads, site.head_dim, site.scale, num_kv_heads=1, layer_id=layer_id
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with queries and keys; returns [T, N, D], whose rotation is not undone."""
        assert self.sinks is not None
        out: Tensor = get_attn_backend().forward(
            q=q,
            k=k,
            v=v,  # The backend asserts that it is `k`.
            layer=self.radix,
            forward_batch=self.run.forward_batch,
            compress_ratio=0,
            # The kernels read float32.
            attn_sink=self.sinks.to(torch.promote_types(self.sinks.dtype, torch.float32)),
            save_kv_cache=True,
        )
        return out.view(q.shape)


def _check_window(site: AttentionSite) -> None:
    """Refuse what SGLang's V4 backend does not compute; it has window and scale of its own."""
    from sglang.srt.layers.attention.dsv4.unified_kv_gate import is_unified_kv_fp8

    if get_platform().is_hip:
        from sglang.srt.layers.attention.deepseek_v4_backend_hip_radix import SWA_WINDOW
    else:
        from sglang.srt.layers.attention.deepseek_v4_backend import SWA_WINDOW
    found = ""
    if (site.sliding_window, site.scale) != (SWA_WINDOW, site.head_dim**-0.5):
        found = f"a window of {site.sliding_window} and a scale of {site.scale}"
    elif get_exec().kernel.dsv4_attn_backend == "trtllm":
        found = "--dsv4-attn-backend trtllm"
    elif is_unified_kv_fp8():
        found = "SGLANG_DSV4_UNIFIED_KV_FP8=1"
    if found:
        raise UnsupportedModelError(
            f"a draft of DeepSeek-V4 with {found}; expected a window of {SWA_WINDOW}, the scale "
            "D**-0.5 and a pool that takes keys after norm and rotation: use SGLang's own draft"
        )


def needs_expanded_heads(forward_batch: Any) -> bool:
    """Whether SGLang's backend takes a prompt's rows with keys and values of each head.

    As SGLang's own choice for DeepSeek does: on aiter, for all rows but those of speculation.
    """
    if not forward_batch.forward_mode.is_extend_without_speculative():
        return False
    name = get_attn_backend().prefill_attention_backend_str or attention_backends()[0]
    return bool(name == "aiter")


class _Expansion:
    """A site's expansion with the interface of SGLang's linear layers."""

    def __init__(self, linear: Any):
        self._linear = linear

    @property
    def weight(self) -> Tensor:
        """The weight as it is stored: SGLang asks for its dtype."""
        weight: Tensor = self._linear.weight
        return weight

    def __call__(self, latent: Tensor) -> tuple[Tensor, None]:
        """Expand latents [T, 1, rank] or [T, rank]; the second result is SGLang's bias."""
        return self._linear(latent), None


class _AfterLoading:
    """What SGLang's loader calls for a layer with weights, see `LatentAttention`."""

    def process_weights_after_loading(self, layer: LatentAttention) -> None:
        layer.read_expansion()

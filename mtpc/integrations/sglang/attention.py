"""SGLang's attention at the sites of a traced draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor, nn

from mtpc.errors import UnsupportedModelError
from mtpc.integrations.attention_site import AttentionSite


@dataclass
class DraftRun:
    """What the sites of one draft must know of the forward that is under way.

    One object a wrapper: a traced graph calls its sites with tensors only, and two drafts, or a
    draft and its target, must not see each other's batches.

    Attributes:
        forward_batch: SGLang's `ForwardBatch`; None between forwards.
    """

    forward_batch: Any = None


def make_attention(site: AttentionSite, layer_id: int, run: DraftRun) -> nn.Module:
    """The host's attention for a site.

    Args:
        site: of the traced draft.
        layer_id: which layer of the draft's KV pool it has.
        run: the wrapper's.

    Raises:
        UnsupportedModelError: a site with sinks.
    """
    if site.sinks is not None:
        raise UnsupportedModelError(
            "attention with sinks: SGLang passes them to each attention backend in its own way; "
            "use the host's own draft"
        )
    return (
        LatentAttention(site, layer_id, run)
        if site.kind == "latent"
        else Attention(site, layer_id, run)
    )


class Attention(nn.Module):
    """Multi-head attention over the host's K and V pools: (q, k, v), each [T, heads, D]."""

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
            # The host counts the positions before a row's own.
            sliding_window_size=site.sliding_window - 1 if site.sliding_window else -1,
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns [T, N, D_v]."""
        out: Tensor = self.radix(q.flatten(1), k.flatten(1), v.flatten(1), self.run.forward_batch)
        return out.view(*q.shape[:2], self.v_head_dim)


class LatentAttention(nn.Module):
    """Attention on the host's latent pool: (q [T, N, D], latent [T, rank], rope_key [T, D_rope]).

    The expansion's two halves move to the query and to the output, as in DeepSeek-V2 (section
    2.1.2), so that the host attends to one head of latents and stores nothing else. Both are
    views of the expansion's weight: loading it anew needs nothing here.
    """

    def __init__(self, site: AttentionSite, layer_id: int, run: DraftRun):
        super().__init__()
        self.run, self.site = run, site
        self.radix = RadixAttention(
            site.num_heads,
            site.latent_rank + site.rope_head_dim,
            site.scale,
            1,
            layer_id,
            logit_cap=site.softcap,
            v_head_dim=site.latent_rank,
        )

    def forward(self, q: Tensor, latent: Tensor, rope_key: Tensor) -> Tensor:
        """Returns [T, N, D_v]."""
        site = self.site
        assert site.expansion is not None
        width = site.head_dim - site.rope_head_dim
        by_head = site.expansion.weight.unflatten(0, (site.num_heads, -1))
        to_key, to_value = by_head.split([width, site.v_head_dim], 1)
        plain, rotated = q.split([width, site.rope_head_dim], -1)
        query = torch.cat([torch.einsum("tnd,ndr->tnr", plain, to_key), rotated], -1)
        key = torch.cat([latent, rope_key], -1)[:, None]
        out = self.radix(query.flatten(1), key, latent[:, None], self.run.forward_batch)
        out = out.view(-1, site.num_heads, site.latent_rank)
        return torch.einsum("tnr,ndr->tnd", out, to_value)

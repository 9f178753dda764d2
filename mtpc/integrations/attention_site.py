"""Attention as a host does it: the place in a traced draft where the host's own module is called.

While a draft is traced its model attends through `mtpc::host_attention`, one call a site; the
trace then calls the module that the host made for that site instead.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mtpc.errors import UnsupportedModelError


@dataclass(frozen=True)
class AttentionSite:
    """What a host must know of one attention to make a module for it.

    The module is called with flat rows. Kind "multi_head": (q [T, N, D], k [T, H_kv, D],
    v [T, H_kv, D_v]). Kind "latent": (q [T, N, D], latent [T, rank], rope_key [T, D_rope]), after
    norm and rotation; the last D_rope of a query's D values are rotated. Both return [T, N, D_v].
    The module stores what it is handed in the host's cache, at the host's slots, and attends to
    everything stored for the request up to each row's own position.

    Attributes:
        index: of the site in its draft, from 0.
        kind: see above.
        num_heads: query heads, N.
        num_kv_heads: H_kv; for latents what they are expanded to, N.
        head_dim: D.
        v_head_dim: D_v, which may be less than D: hosts with one width pad values.
        scale: of the scores.
        sliding_window: last positions attended to, own included; 0 is all.
        softcap: of the scores; 0 is none.
        sinks: logits [N] that take part in the softmax without a value, or None. The draft's own
            parameter: weights arrive in it later.
        expansion: latent [.., rank] -> [.., N * (D - D_rope + D_v)], by head keys' unrotated part,
            then values; or None. The draft's own module: weights arrive in it later.
        latent_rank: for latents.
        rope_head_dim: for latents, D_rope.
    """

    index: int
    kind: Literal["multi_head", "latent"]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    sliding_window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = field(default=None, repr=False)
    expansion: nn.Linear | None = None
    latent_rank: int = 0
    rope_head_dim: int = 0


def expand_latent(site: AttentionSite, latent: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [T, N, D] and values [T, N, D_v] of a latent site, for hosts that cache these.

    Args:
        site: of kind "latent".
        latent: [T, rank].
        rope_key: [T, D_rope], one for all heads.
    """
    assert site.expansion is not None
    expanded = site.expansion(latent).unflatten(-1, (site.num_heads, -1))
    unrotated, value = expanded.split([site.head_dim - site.rope_head_dim, site.v_head_dim], -1)
    rotated = rope_key[:, None].expand(-1, site.num_heads, -1)
    return torch.cat([unrotated, rotated], -1), value


@torch.library.custom_op("mtpc::host_attention", mutates_args=())
def host_attention(q: Tensor, first: Tensor, second: Tensor, v_head_dim: int, site: int) -> Tensor:
    """Marks a site while a draft is traced; it is never run."""
    raise UnsupportedModelError(
        f"attention site {site} was run while it was traced; a traced draft calls its host's module"
    )


@host_attention.register_fake
def _(q, first, second, v_head_dim, site):  # type: ignore[no-untyped-def]
    return q.new_empty((q.shape[0], q.shape[1], v_head_dim))


class SiteRecorder:
    """Stands in for `past_key_values` while a draft is traced, and notes the sites it meets.

    Tracing may run the model more than once: `begin` starts over.
    """

    def __init__(self) -> None:
        self.positions: Tensor | None = None
        self.layers: defaultdict[int, _SiteLayer] = defaultdict(lambda: _SiteLayer(self._found))
        self._found: list[_Found] = []

    def begin(self, positions: Tensor) -> None:
        """A forward over rows at these positions [T] begins."""
        self.positions = positions
        self._found.clear()

    def update(self, first: Tensor, second: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Cache protocol of transformers."""
        self.layers[layer_idx].write(first, second)
        return first, second

    def sites(self) -> list[AttentionSite]:
        """What was met in the last forward, with the traced module's own tensors."""
        return [found.site(index) for index, found in enumerate(self._found)]


@dataclass(frozen=True)
class _Found:
    """A site's numbers, and the module it is in: tensors are looked up once tracing has ended."""

    module: Any
    numbers: dict[str, Any]
    sinks: str | None

    def site(self, index: int) -> AttentionSite:
        sinks = None if self.sinks is None else getattr(self.module, self.sinks)
        expansion = self.module.kv_b_proj if self.numbers["kind"] == "latent" else None
        return AttentionSite(index=index, sinks=sinks, expansion=expansion, **self.numbers)


class _SiteLayer:
    """One layer's cache while tracing: what is written goes to the host with the next query."""

    def __init__(self, found: list[_Found]):
        self._found = found
        self._written: tuple[Tensor, Tensor] | None = None

    def write(self, first: Tensor, second: Tensor) -> None:
        """first, second: [1, heads, T, D] each, or latent and rope key with one head."""
        self._written = (first[0].transpose(0, 1), second[0].transpose(0, 1))

    def attend(
        self, module: Any, query: Tensor, scale: float, context: SiteRecorder, **options: Any
    ) -> Tensor:
        """query: [1, N, T, D]; returns [1, T, N, D_v]."""
        if self._written is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends without having handed keys and values to its "
                "cache; a traced draft needs both in one layer"
            )
        first, second = self._written
        self._written = None
        is_latent = hasattr(module, "kv_b_proj")
        if is_latent:
            first, second = first.squeeze(1), second.squeeze(1)
            numbers = dict(
                kind="latent",
                num_kv_heads=query.shape[1],
                v_head_dim=module.v_head_dim,
                latent_rank=first.shape[-1],
                rope_head_dim=second.shape[-1],
            )
        else:
            numbers = dict(
                kind="multi_head", num_kv_heads=first.shape[1], v_head_dim=second.shape[2]
            )
        numbers |= dict(
            num_heads=query.shape[1],
            head_dim=query.shape[3],
            scale=float(scale),
            sliding_window=options.get("sliding_window") or 0,
            softcap=options.get("softcap") or 0.0,
        )
        index = len(self._found)
        self._found.append(_Found(module, numbers, _parameter_name(module, options.get("s_aux"))))
        q, width = query[0].transpose(0, 1), numbers["v_head_dim"]
        out: Tensor = torch.ops.mtpc.host_attention(q, first, second, width, index)
        return out[None]


def _parameter_name(module: nn.Module, tensor: Tensor | None) -> str | None:
    """The name of a module's own parameter; tracing swaps parameters, names stay."""
    if tensor is None:
        return None
    for name, parameter in module.named_parameters(recurse=False):
        if parameter is tensor:
            return name
    raise UnsupportedModelError(
        f"{type(module).__name__} hands sinks to its attention that are not a parameter of its "
        "own; a host could not be given them"
    )

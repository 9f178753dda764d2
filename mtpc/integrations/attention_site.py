"""Attention sites: the places in a traced draft where the host's attention modules are called.

While a draft is traced, its model calls `mtpc::host_site` once at each site. Afterwards, the module
that the host makes for the site replaces this call in the graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mtpc.errors import UnsupportedModelError
from mtpc.integrations.layer_sites import LinearMark, host_site


@dataclass(frozen=True)
class AttentionSite:
    """One call of attention in a draft, described so that a host can make a module for it.

    The module gets flat rows. For the kind "multi_head" these are (q [T, N, D], k [T, H_kv, D],
    v [T, H_kv, D_v]). For the kind "latent" they are (q [T, N, D], latent [T, rank],
    rope_key [T, D_rope]), after norm and rotation; the last D_rope of a query's D values are
    rotated. For the kind "shared" they are (q [T, N, D], k [T, D], k): one tensor, whose rows are
    the keys and the values of all heads. All kinds return [T, N, D_v]. The module stores keys and
    values, or latents and rope keys, in the host's cache at the host's slots. Each row attends to
    everything stored for its request up to its own position.

    Attributes:
        index: index of the site in its draft, from 0.
        kind: the kind of attention.
        num_heads: N, the number of query heads. This and H_kv are a rank's.
        num_kv_heads: H_kv, the number of key and value heads; N for a latent, after expansion; 1
            for "shared".
        head_dim: D.
        v_head_dim: D_v. It may be less than D; a host that supports only one width pads values.
        scale: factor of the scores.
        sliding_window: number of last positions that a row attends to, including its own; 0 is all.
        softcap: soft limit of the scores; 0 is none.
        sinks: logits [N] that take part in the softmax without a value, or None. It is the draft's
            own parameter, which is loaded later.
        expansion: maps latents [.., rank] to [.., N * (D - D_rope + D_v)]: for each head the
            unrotated part of its key, then its value. None for other kinds. It is the draft's own
            module or the host's layer; its weights are loaded later.
        latent_rank: width of a latent; 0 for other kinds.
        rope_head_dim: D_rope; 0 for other kinds.
    """

    index: int
    kind: Literal["multi_head", "latent", "shared"]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    sliding_window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = field(default=None, repr=False)
    expansion: Any = None
    latent_rank: int = 0
    rope_head_dim: int = 0


def expand_latent(site: AttentionSite, latent: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
    """Expand latents to keys and values, for hosts that cache these.

    Args:
        site: a site of kind "latent".
        latent: [T, rank].
        rope_key: [T, D_rope], shared by all heads.

    Returns:
        Keys [T, N, D] and values [T, N, D_v].
    """
    assert site.expansion is not None
    expanded = site.expansion(latent).unflatten(-1, (site.num_heads, -1))
    unrotated, value = expanded.split([site.head_dim - site.rope_head_dim, site.v_head_dim], -1)
    rotated = rope_key[:, None].expand(-1, site.num_heads, -1)
    return torch.cat([unrotated, rotated], -1), value


class SiteRecorder:
    """Replaces transformers' cache while a draft is traced, and records the attention sites.

    Tracing may run the model several times; `begin` discards the sites of the previous run.
    """

    def __init__(self) -> None:
        self.positions: Tensor | None = None
        self.ahead = 0  # No host's draft sees positions behind its own.
        self.layers: defaultdict[int, _SiteLayer] = defaultdict(lambda: _SiteLayer(self._found))
        self._found: list[_Found] = []

    def begin(self, positions: Tensor) -> None:
        """Begin a forward over rows at these positions, int64 [T]."""
        self.positions = positions
        self._found.clear()

    def update(
        self, first: Tensor, second: Tensor, layer_idx: int, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values, as transformers' cache does. Returns them unchanged."""
        self.layers[layer_idx].write(first, second)
        return first, second

    def sites(self, linears: Sequence[nn.Module] = ()) -> list[AttentionSite]:
        """The sites of the last forward, with the traced module's own tensors.

        Args:
            linears: what replaces marks of linear layers, in the order of their sites.
        """
        return [found.site(index, linears) for index, found in enumerate(self._found)]


@dataclass(frozen=True)
class _Found:
    """A recorded site: its numbers and its module. `site` looks up the tensors after tracing."""

    module: Any
    numbers: dict[str, Any]
    sinks: str | None

    def site(self, index: int, linears: Sequence[nn.Module]) -> AttentionSite:
        sinks = None if self.sinks is None else getattr(self.module, self.sinks)
        expansion = self.module.kv_b_proj if self.numbers["kind"] == "latent" else None
        if isinstance(expansion, LinearMark):
            expansion = linears[expansion.site.index]
        return AttentionSite(index=index, sinks=sinks, expansion=expansion, **self.numbers)


class _SiteLayer:
    """One layer's cache during tracing: hands keys and values from `write` to `attend`."""

    def __init__(self, found: list[_Found]):
        self._found = found
        self._written: tuple[Tensor, Tensor] | None = None

    def write(self, first: Tensor, second: Tensor) -> None:
        """Keep keys and values, [1, heads, T, D] each, or a latent and a rope key with one head."""
        self._written = (first[0].transpose(0, 1), second[0].transpose(0, 1))

    def attend(
        self, module: Any, query: Tensor, scale: float, context: SiteRecorder, **options: Any
    ) -> Tensor:
        """Record a site, and mark it instead of attention.

        `query` is [1, N, T, D], and the result [1, T, N, D_v]. `options` are transformers' further
        arguments: sliding_window, softcap, s_aux (the sinks).
        """
        if self._written is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends before it passes keys and values to its cache; "
                "expected both in one layer: this attention cannot be traced as a draft"
            )
        first, second = self._written
        self._written = None
        is_latent = hasattr(module, "kv_b_proj")
        numbers = dict(
            kind="latent" if is_latent else "multi_head",
            num_heads=query.shape[1],
            num_kv_heads=query.shape[1] if is_latent else first.shape[1],
            head_dim=query.shape[3],
            v_head_dim=module.v_head_dim if is_latent else second.shape[2],
            scale=float(scale),
            sliding_window=options.get("sliding_window") or 0,
            softcap=options.get("softcap") or 0.0,
        )
        if is_latent:
            first, second = first.squeeze(1), second.squeeze(1)
            numbers |= dict(latent_rank=first.shape[-1], rope_head_dim=second.shape[-1])
        found = _Found(module, numbers, _parameter_name(module, options.get("s_aux")))
        return self._mark(found, query[0].transpose(0, 1), first, second)[None]

    def attend_window(
        self, attention: Any, query: Tensor, fresh: Tensor, masks: None, *entries: None
    ) -> Tensor:
        """Record a site whose keys are its values; see `CompressedState.attend_window`."""
        assert not any(entries)  # A layer with a compressor has masks.
        numbers = dict(
            kind="shared",
            num_heads=query.shape[1],
            num_kv_heads=1,
            head_dim=query.shape[2],
            v_head_dim=query.shape[2],
            scale=float(attention.scaling),
            sliding_window=attention.sliding_window,
        )
        return self._mark(_Found(attention, numbers, "sinks"), query, fresh, fresh)

    def _mark(self, found: _Found, q: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Mark a new site: queries [T, N, D] and what `AttentionSite` says -> [T, N, D_v]."""
        self._found.append(found)
        features = [found.numbers["num_heads"], found.numbers["v_head_dim"]]
        out: Tensor = host_site([q, first, second], "attention", len(self._found) - 1, features)
        return out


def _parameter_name(module: nn.Module, tensor: Tensor | None) -> str | None:
    """The name of a module's parameter, because tracing replaces parameters but keeps names."""
    if tensor is None:
        return None
    for name, parameter in module.named_parameters(recurse=False):
        if parameter is tensor:
            return name
    raise UnsupportedModelError(
        f"{type(module).__name__} passes sinks to its attention that are not a parameter of its "
        "own; expected a parameter, which a host can share"
    )

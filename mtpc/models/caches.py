"""Per-layer state of attention: what it is called, how large it is, how it is written and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mtpc import ops
from mtpc.errors import UnsupportedModelError
from mtpc.layout import NO_SLOT, NULL_PAGE, SCRATCH_SLOT, BufferSpec
from mtpc.layout.buffers import N, P, S, ring_pages
from mtpc.ops.ragged import request_of
from mtpc.step.records import Metadata


def paged_kv_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """Page pools of a grouped-query attention layer: K and V, each [N, P, H_kv, D]."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return paged_pool_specs(layer, dtype, config.num_key_value_heads, (head_dim, head_dim))


def paged_pool_specs(
    layer: int, dtype: torch.dtype, heads: int, dims: tuple[int, int]
) -> tuple[BufferSpec, ...]:
    """Page pools of K and V whose heads may differ in width, `dims`."""
    return tuple(
        BufferSpec(f"kv.{layer}.{role}", (N, P, heads, width), dtype)
        for role, width in zip(("k", "v"), dims, strict=True)
    )


def paged_latent_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """Page pool of a multi-head latent attention layer: [N, P, kv_lora_rank + rope]."""
    width = config.kv_lora_rank + config.qk_rope_head_dim
    return (BufferSpec(f"kv.{layer}.latent", (N, P, width), dtype),)


def ring_kv_specs(
    layer: int, dtype: torch.dtype, window: int, heads: int, dims: tuple[int, int]
) -> tuple[BufferSpec, ...]:
    """Rings of a sliding-window layer: K and V, as many pages a request slot as the window takes.

    Args:
        layer: layer index.
        dtype: of the cache.
        window: positions attended to, own included.
        heads: key/value heads.
        dims: width of a key head and of a value head.
    """
    pages = (S - 1) * ring_pages(window) + 1
    return tuple(
        BufferSpec(f"kv.{layer}.{role}", (pages, P, heads, width), dtype)
        for role, width in zip(("ring_k", "ring_v"), dims, strict=True)
    )


class LayerCache(Protocol):
    """One layer's state: `write` takes what the model hands its cache, `attend` queries."""

    def write(self, first: Tensor, second: Tensor, metadata: Metadata) -> None: ...

    def attend(
        self, module: Any, query: Tensor, scale: float, metadata: Metadata, **options: Any
    ) -> Tensor: ...


@dataclass(frozen=True)
class PagedKV:
    """K and V pools, [N, P, H_kv, D]."""

    k: Tensor
    v: Tensor

    def write(self, first: Tensor, second: Tensor, metadata: Metadata) -> None:
        """first, second: K and V, [1, H_kv, T, D]."""
        for cache, rows in ((self.k, first), (self.v, second)):
            ops.write_cache(cache, rows[0].transpose(0, 1), metadata.slot_mapping)

    def attend(
        self, module: Any, query: Tensor, scale: float, metadata: Metadata, **options: Any
    ) -> Tensor:
        """query: [1, N, T, D]; returns [1, T, N, D_v]."""
        out = ops.paged_attention(
            query[0].transpose(0, 1),
            self.k,
            self.v,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            scale,
            options.get("sliding_window") or 0,
            options.get("softcap") or 0.0,
            options.get("s_aux"),
        )
        return out[None]


def ring_metadata(metadata: Metadata, pages: int, page_size: int) -> Metadata:
    """Metadata for rings of `pages` pages, from metadata for paged caches.

    The block table is computed, not stored: block j of request slot s is page
    1 + (s - 1) * n + j % n of a pool with rings of n pages. With such a table, operators for paged
    caches read and write rings. Entries of older blocks name pages that hold newer tokens, which
    the window masks. A rejected row needs no rollback: its place is written again before any row
    attends to it. A row without a cache slot, an inactive request and a block without a page stay
    without one.
    """
    slots = metadata.state_slots
    first = torch.where(slots == SCRATCH_SLOT, 0, (slots - 1) * pages + 1)
    block = torch.arange(metadata.block_table.shape[1], device=slots.device)
    absent = (slots == SCRATCH_SLOT)[:, None] | (metadata.block_table == NULL_PAGE)
    table = torch.where(absent, NULL_PAGE, first[:, None] + block[None] % pages).int()
    token = torch.arange(metadata.positions.shape[0], device=slots.device)
    request = request_of(token, metadata.query_start_loc).clamp(max=slots.shape[0] - 1)
    page = first[request] + metadata.positions // page_size % pages
    slot = page * page_size + metadata.positions % page_size
    slot = torch.where(metadata.slot_mapping == NO_SLOT, NO_SLOT, slot)
    return replace(metadata, slot_mapping=slot, block_table=table)


@dataclass(frozen=True)
class RingKV:
    """K and V rings, [(S - 1) * pages + 1, P, H_kv, D], of a sliding-window layer."""

    k: Tensor
    v: Tensor
    pages: int

    def write(self, first: Tensor, second: Tensor, metadata: Metadata) -> None:
        """As `PagedKV.write`."""
        PagedKV(self.k, self.v).write(first, second, self._metadata(metadata))

    def attend(
        self, module: Any, query: Tensor, scale: float, metadata: Metadata, **options: Any
    ) -> Tensor:
        """As `PagedKV.attend`, for a layer that has a window."""
        if not options.get("sliding_window"):
            raise UnsupportedModelError(
                f"layer {module.layer_idx} has a ring for a sliding window, but attends to all "
                "positions; its family declares the wrong cache"
            )
        rings = self._metadata(metadata)
        return PagedKV(self.k, self.v).attend(module, query, scale, rings, **options)

    def _metadata(self, metadata: Metadata) -> Metadata:
        return ring_metadata(metadata, self.pages, self.k.shape[1])


@dataclass(frozen=True)
class PagedLatent:
    """The latent pool, [N, P, rank + rope]."""

    latent: Tensor

    def write(self, first: Tensor, second: Tensor, metadata: Metadata) -> None:
        """first: normalised latent [1, 1, T, rank]; second: rotated key [1, 1, T, rope]."""
        rows = torch.cat([first[0, 0], second[0, 0]], -1)
        if rows.shape[-1] != self.latent.shape[-1]:
            raise UnsupportedModelError(
                f"the model hands its cache {rows.shape[-1]} values a token, expected the latent's "
                f"{self.latent.shape[-1]} (kv_lora_rank + qk_rope_head_dim); this transformers "
                "version expands K/V before caching: use transformers >=5.17,<6"
            )
        ops.write_cache(self.latent, rows, metadata.slot_mapping)

    def attend(
        self, module: Any, query: Tensor, scale: float, metadata: Metadata, **options: Any
    ) -> Tensor:
        """query: [1, N, T, nope + rope]; returns [1, T, N, D_v]."""
        out = ops.expanded_latent_attention(
            query[0].transpose(0, 1),
            self.latent,
            module.kv_b_proj.weight,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            scale,
            module.qk_nope_head_dim,
        )
        return out[None]


@dataclass(frozen=True)
class IndexedLatent:
    """Pools of latents, [N, P, rank + rope], and of indexer keys, [N, P, D].

    `mtpc.models.families.deepseek_v32` uses it.
    """

    latent: Tensor
    index: Tensor


@dataclass(frozen=True)
class RecurrentState:
    """State of a Gated DeltaNet layer by request slot; see `mtpc.ops.gated_delta`."""

    recurrent: Tensor
    history: Tensor
    standing: Tensor

    def run(self, module: Any, rows: Tensor, metadata: Metadata) -> Tensor:
        """rows: [T, C + 2 HV], inputs; returns [T, HV, Dv] and moves the state on."""
        return ops.gated_delta_rule(
            rows,
            module.conv1d.weight.squeeze(1),
            module.A_log,
            module.dt_bias,
            self.recurrent,
            self.history,
            self.standing,
            metadata.state_slots,
            metadata.seq_lens,
            metadata.query_start_loc,
            metadata.certain_lens,
        )


@dataclass(frozen=True)
class CompressedState:
    """State of an attention layer by request slot; `mtpc.models.deepseek_v4_attention` uses it.

    Attributes:
        window: ring of the last keys, which are values too, [S, places, D].
        raw: ring of the compressor's inputs, [S, places, 2C].
        entries: compressed entries, [S, E, D].
        index_raw: as `raw`, of the indexer.
        index_entries: as `entries`, of the indexer.
    """

    window: Tensor
    raw: Tensor | None = None
    entries: Tensor | None = None
    index_raw: Tensor | None = None
    index_entries: Tensor | None = None


class CachePool(nn.Module):
    """The state tensors of all layers, as buffers, so that tracing sees them by name.

    Args:
        tensors: page pools, rings and other state by buffer name, `kv.<layer>.<role>`.
        num_slots: request slots that rings belong to, the scratch slot included.
    """

    def __init__(self, tensors: Mapping[str, Tensor], num_slots: int):
        super().__init__()
        self.num_slots = num_slots
        self.roles: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            _, layer, role = name.split(".")
            self.register_buffer(f"{layer}_{role}", tensor, persistent=False)
            self.roles.setdefault(int(layer), []).append(role)

    def layers(self) -> dict[int, Any]:
        """A `LayerCache`, or state of its own kind, for each layer, over what the buffers hold."""
        return {layer: self._bind(layer, roles) for layer, roles in self.roles.items()}

    def _bind(
        self, layer: int, roles: list[str]
    ) -> LayerCache | IndexedLatent | RecurrentState | CompressedState:
        tensors = {role: getattr(self, f"{layer}_{role}") for role in roles}
        if tensors.keys() == {"k", "v"}:
            return PagedKV(**tensors)
        if tensors.keys() == {"latent"}:
            return PagedLatent(**tensors)
        if tensors.keys() == {"latent", "index"}:
            return IndexedLatent(**tensors)
        if tensors.keys() == {"ring_k", "ring_v"}:
            pages = (tensors["ring_k"].shape[0] - 1) // (self.num_slots - 1)
            return RingKV(tensors["ring_k"], tensors["ring_v"], pages)
        if tensors.keys() == {"recurrent", "history", "standing"}:
            return RecurrentState(**tensors)
        if "window" in tensors:
            return CompressedState(**tensors)
        raise UnsupportedModelError(f"layer {layer}: no cache kind has the buffers {sorted(roles)}")

"""State that a layer keeps between steps: its buffers, and how modules write and read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from mtpc import ops
from mtpc.errors import UnsupportedModelError
from mtpc.layout import HIDDEN, NO_SLOT, NULL_PAGE, SCRATCH_SLOT, STEP, BufferSpec, Writer
from mtpc.layout.buffers import N, P, S, ring_pages
from mtpc.ops.ragged import request_of
from mtpc.step.records import Metadata

if TYPE_CHECKING:
    from mtpc.models.image_inputs import ImageInputs
    from mtpc.models.key_shifts import KeyShifts

_BY_LAYER = ". `verify` writes those of the target's layers, `propose` those of MTP layers"


CODE_DTYPES: Mapping[str, torch.dtype | None] = {
    "auto": None,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
"""Codes in page pools of K and V, by the names of `mtpc.config.KV_CACHE_DTYPES`."""


def paged_kv_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """Page pools of a layer with grouped-query attention: K and V, each [N, P, H_kv, D]."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return kv_specs(layer, dtype, config.num_key_value_heads, (width, width))


def kv_specs(
    layer: int, dtype: torch.dtype, heads: int, dims: tuple[int, int], window: int = 0
) -> tuple[BufferSpec, ...]:
    """Page pools of K and V, [N, P, heads, width], with a width of keys and one of values; of a
    sliding-window layer rings, which have `ring_pages(window)` pages per request slot. The window
    counts a row's own position; 0 is all."""
    made = []
    for role, what, width in zip(("k", "v"), ("keys", "values"), dims, strict=True):
        page = (P, heads, width)
        if window:
            meaning = f"{what} of a sliding window: request slot s has n pages, from 1+(s-1)n on"
            rings = ((S - 1) * ring_pages(window) + 1, *page)
            made.append(slot_spec(f"kv.{layer}.ring_{role}", rings, dtype, meaning))
        else:
            made.append(paged_spec(f"kv.{layer}.{role}", page, dtype, f"{what} by page{_BY_LAYER}"))
    return tuple(made)


def quantised_pools(specs: tuple[BufferSpec, ...], dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """Buffers of a layer with codes of `dtype` in its page pools of K and V, and a scale a token
    and head.

    Other buffers stay as they are: latents, rings, recurrent state and compressed entries.
    """
    found: list[BufferSpec] = []
    for spec in specs:
        if not (spec.is_paged and spec.name.endswith((".k", ".v"))):
            found.append(spec)
            continue
        meaning = f"scales of {spec.name.rpartition('.')[2]}'s codes, a token and head{_BY_LAYER}"
        found += (
            replace(spec, dtype=dtype),
            paged_spec(f"{spec.name}_scale", spec.dims[1:3], torch.float32, meaning),
        )
    return tuple(found)


def paged_spec(name: str, page: tuple[Any, ...], dtype: torch.dtype, meaning: str) -> BufferSpec:
    """A pool of pages that the block table names. A page has this shape, its P tokens first."""
    return BufferSpec(name, (N, *page), dtype, 0, STEP, meaning, needs_pad=False, is_paged=True)


def paged_latent_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """Page pool of a layer with multi-head latent attention: [N, P, kv_lora_rank + rope]."""
    return paged_spec_of_latent(layer, dtype, config.kv_lora_rank + config.qk_rope_head_dim)


def paged_spec_of_latent(layer: int, dtype: torch.dtype, width: int) -> tuple[BufferSpec, ...]:
    """Page pool of latents with their rotated keys behind them, [N, P, width]."""
    return (paged_spec(f"kv.{layer}.latent", (P, width), dtype, f"latents by page{_BY_LAYER}"),)


def hidden_spec(layer: int, dtype: torch.dtype, width: int) -> BufferSpec:
    """Page pool of hidden states, [N, P, width]."""
    return paged_spec(f"kv.{layer}.{HIDDEN}", (P, width), dtype, "hidden states by page")


def slot_spec(
    name: str,
    dims: tuple[Any, ...],
    dtype: torch.dtype,
    meaning: str,
    writers: tuple[Writer, ...] = STEP,
) -> BufferSpec:
    """State of one layer by request slot. No page holds it, and only a prefill rebuilds it."""
    return BufferSpec(name, dims, dtype, 0, writers, meaning, needs_pad=False)


@dataclass(frozen=True)
class PagedKV:
    """K and V pools, [N, P, H_kv, D]; where they hold codes, with scales [N, P, H_kv].

    `k_shift` gives what codes of K leave out, [H_kv, D].
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_shift: Callable[[], Tensor] | None = None

    def write(self, first: Tensor, second: Tensor, metadata: Metadata) -> None:
        """Write K (`first`) and V (`second`), each [1, H_kv, T, D]."""
        keys, values = (rows[0].transpose(0, 1) for rows in (first, second))
        if self.k_shift is not None:
            keys = keys - self.k_shift()
        ops.write_cache(self.k, keys, metadata.slot_mapping, self.k_scale)
        ops.write_cache(self.v, values, metadata.slot_mapping, self.v_scale)

    def attend(
        self, module: Any, query: Tensor, scale: float, metadata: Metadata, **options: Any
    ) -> Tensor:
        """Attention of query [1, N, T, D]; returns [1, T, N, D_v]."""
        adds = options.get("softcap") or options.get("s_aux") is not None
        assert self.k_shift is None or not adds, f"{type(module).__name__}: scores lose a number"
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
            self.k_scale,
            self.v_scale,
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
    # Counted, not `arange(M)`: no number of a step may depend on M.
    block = torch.ones_like(metadata.block_table[0], dtype=torch.int64).cumsum(0) - 1
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
        PagedKV(self.k, self.v).write(first, second, self._metadata(metadata))

    def attend(
        self, module: Any, query: Tensor, scale: float, metadata: Metadata, **options: Any
    ) -> Tensor:
        assert options.get("sliding_window"), f"layer {module.layer_idx} needs pages, not a ring"
        rings = self._metadata(metadata)
        return PagedKV(self.k, self.v).attend(module, query, scale, rings, **options)

    def _metadata(self, metadata: Metadata) -> Metadata:
        return ring_metadata(metadata, self.pages, self.k.shape[1])


@dataclass(frozen=True)
class PagedLatent:
    """Page pool of latents, [N, P, rank + rope]."""

    latent: Tensor

    def write(self, first: Tensor, second: Tensor, metadata: Metadata) -> None:
        """Write the normalised latent (`first`, [1, 1, T, rank]) and the rotated key (`second`,
        [1, 1, T, rope])."""
        rows = torch.cat([first[0, 0], second[0, 0]], -1)
        ops.write_cache(self.latent, rows, metadata.slot_mapping, None)

    def attend(
        self, module: Any, query: Tensor, scale: float, metadata: Metadata, **options: Any
    ) -> Tensor:
        """Attention of query [1, N, T, nope + rope]; returns [1, T, N, D_v]."""
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
class PagedRows:
    """Page pool of hidden states, [N, P, F]."""

    hidden: Tensor

    def write(self, rows: Tensor, metadata: Metadata) -> None:
        """Write the rows [T, F] of a step."""
        ops.write_cache(self.hidden, rows.to(self.hidden.dtype), metadata.slot_mapping, None)


LayerCache: TypeAlias = PagedKV | RingKV | PagedLatent
"""The cache of one attention layer: `write` stores the two tensors that the layer passes to its
cache's `update`, and `attend` is the attention of query [1, N, T, D] to it, [1, T, N, D_v]."""


class CachePool(nn.Module):
    """The state tensors of all layers as module buffers, so that traces have them by name: page
    pools, rings and other state, `kv.<layer>.<role>`.

    Args:
        num_slots: request slots, the scratch slot included.
        kinds: see `ModelFamily.cache_kinds`.
        images: what rows read of a prompt's images; None: there are none.
        shifts: what codes of keys leave out; None: nothing.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        num_slots: int,
        kinds: tuple[type, ...] = (),
        images: ImageInputs | None = None,
        shifts: KeyShifts | None = None,
    ):
        super().__init__()
        self.images, self.shifts = images, shifts
        self.num_slots, self.kinds = num_slots, (PagedKV, PagedLatent, PagedRows, *kinds)
        self.roles: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            _, layer, role = name.split(".")
            self.register_buffer(f"{layer}_{role}", tensor, persistent=False)
            self.roles.setdefault(int(layer), []).append(role)

    def layers(self) -> dict[int, Any]:
        """Layer index -> its `LayerCache`, or state of another kind, over the buffers."""
        return {layer: self._bind(layer, roles) for layer, roles in self.roles.items()}

    def _bind(self, layer: int, roles: list[str]) -> Any:
        tensors = {role: getattr(self, f"{layer}_{role}") for role in roles}
        if tensors.keys() == {"ring_k", "ring_v"}:
            pages = (tensors["ring_k"].shape[0] - 1) // (self.num_slots - 1)
            return RingKV(tensors["ring_k"], tensors["ring_v"], pages)
        for kind in self.kinds:
            # It has a field for each role, and a role for each required field.
            declared = fields(kind)
            required = {each.name for each in declared if each.default is MISSING}
            if not required <= tensors.keys() <= {each.name for each in declared}:
                continue
            if self.shifts is not None and layer in self.shifts.attentions:
                tensors["k_shift"] = partial(self.shifts, layer)
            return kind(**tensors)
        raise UnsupportedModelError(
            f"layer {layer} has the buffers {sorted(roles)}; expected those of a known cache; "
            "correct `cache_specs` or `cache_kinds` of its family"
        )

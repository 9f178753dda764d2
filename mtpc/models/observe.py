"""What a class of transformers keeps and attends to, seen by running it without values.

A decoder runs once over a few tokens on the meta device. Its attention, its masks and its cache are
then those of this module, which note what they are given: the widths of keys and values, and which
positions a row sees. So a family needs no words about them. What a step could not give the class is
refused here, before anything is traced.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface

from mtpc.errors import MtpcError, UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.models.caches import kv_specs, paged_spec_of_latent
from mtpc.models.mamba2 import MIXERS
from mtpc.models.recurrent import Recurrence, cache_of
from mtpc.models.rotary import max_positions, with_fixed_angles
from mtpc.models.seams import CACHE, StandIn, Unreadable, stand_in

_NAME = "mtpc_observed"
TOKENS = 3
_FAR = 2**40
"""A position behind any window."""
_NEAR = 64
"""Distances from a row that are looked at one by one, on both sides of a window's end."""
_COMPUTED = ("sliding_window", "softcap", "s_aux")
"""Options of attention functions that `mtpc.models.caches` reads."""
_NEUTRAL = ("mtpc_context", "position_ids", "dropout", "is_causal", "use_cache")
"""Options that change nothing in a step."""


@dataclass(frozen=True)
class LayerState:
    """What a layer keeps for each token, and how far its rows look back: a window of positions, a
    row's own included; 0 is all. `heads` is 0 for a latent, of which keys and values are made; its
    widths are those of latent and rotated key, and else of a key head and a value head. `beside` is
    what a recurrence in the same layer keeps."""

    heads: int
    widths: tuple[int, int]
    window: int
    beside: Recurrence | None = None

    def specs(self, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
        """State buffers of a layer of a model."""
        beside = self.beside.specs(layer, dtype) if self.beside else ()
        if not self.heads:
            return (*paged_spec_of_latent(layer, dtype, sum(self.widths)), *beside)
        return (*kv_specs(layer, dtype, self.heads, self.widths, self.window), *beside)


Kept: TypeAlias = LayerState | Recurrence
"""What a layer keeps: of each token, or of a request."""


@dataclass
class Observer:
    """In place of transformers' cache and of mtpc's context: notes what a forward gives to it.

    A window of `longest` positions or more is none.
    """

    longest: float
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    states: dict[int, Kept] = field(default_factory=dict)

    def update(
        self, first: Tensor, second: Tensor, layer_idx: int, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer: the cache protocol of transformers."""
        if layer_idx in self.kept:
            raise UnsupportedModelError(f"layer {layer_idx} writes to its cache twice")
        self.kept[layer_idx] = (first, second)
        first.mtpc_context = self  # type: ignore[attr-defined]
        return first, second

    def get_seq_length(self, layer_idx: int = 0) -> Unreadable:
        return Unreadable()

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"it asks its cache for {name!r}, and a step's has keys, values and Mamba-2's state"
        )

    def attend(self, module: Any, key: Tensor, value: Tensor, window: int) -> None:
        """Note an attention call.

        Raises:
            UnsupportedModelError: it attends to something else than what the layer keeps.
        """
        layer = module.layer_idx
        if layer not in self.kept:
            raise UnsupportedModelError(f"layer {layer} attends to keys that it does not keep")
        first, second = self.kept[layer]
        widths = (first.shape[-1], second.shape[-1])
        if key is first and value is second:
            state = LayerState(first.shape[1], widths, window)
        elif _expands(module, first, second, key):
            state = LayerState(0, widths, window)
        else:
            raise UnsupportedModelError(
                f"layer {layer} changes keys or values between its cache and its attention"
            )
        before = self.states.get(layer)
        if isinstance(before, LayerState):
            raise UnsupportedModelError(f"layer {layer} attends twice")
        self.states[layer] = replace(state, beside=before)

    def recur(self, layer: int, recurrence: Recurrence) -> None:
        """Note a recurrent layer, which comes before attention in the same layer."""
        if layer in self.states:
            raise UnsupportedModelError(f"layer {layer} recurs after another part of it")
        self.states[layer] = recurrence


class _Mixer(StandIn):
    """In place of a recurrent layer: notes what it keeps."""

    def __init__(self, make: Callable[[Any], Any], module: nn.Module):
        super().__init__(module)
        self.mtpc_keeps = make(module).keeps

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        cache_of(options).recur(self.layer_idx, self.mtpc_keeps)
        return torch.empty_like(hidden_states)


def _expands(module: Any, latent: Tensor, rotated: Tensor, key: Tensor) -> bool:
    """Whether keys and values are those of multi-head latent attention, of DeepSeek-V2's form."""
    up = getattr(module, "kv_b_proj", None)
    if not isinstance(up, nn.Linear) or up.bias is not None:
        return False
    is_one = latent.shape[1] == rotated.shape[1] == 1
    nope = getattr(module, "qk_nope_head_dim", 0)
    fits = up.in_features == latent.shape[-1] and key.shape[-1] == nope + rotated.shape[-1]
    return is_one and fits


class _Mask:
    """In place of a mask: the function of positions that transformers makes it from, (batch, head,
    row's position, key's position) -> bool."""

    def __init__(self, function: Callable[..., Tensor]):
        self.function = function

    @cached_property
    def window(self) -> int:
        """How many positions a row sees, its own included; 0 is all before it.

        Layers of one kind share a mask, which is looked at once.

        Raises:
            UnsupportedModelError: rows see later positions, or not the same window everywhere.
        """
        return _window(self)

    def sees(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Whether rows at positions attend to keys at positions, bool."""
        zero = torch.zeros((), dtype=torch.int64)
        try:
            with torch.device("cpu"):
                return self.function(zero, zero, rows, keys)
        except (RuntimeError, NotImplementedError) as error:
            raise UnsupportedModelError(
                "its mask follows from more than two positions, as that of chunked attention does"
            ) from error

    def _changed(self, *_: Any) -> Any:
        raise UnsupportedModelError("it changes the mask that transformers makes")

    __getattr__ = __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = _changed


def _mask(*, mask_function: Any, **_: Any) -> _Mask:
    """The mask function that transformers calls."""
    return _Mask(mask_function)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    mtpc_context: Observer | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls."""
    kind = type(module).__name__
    mtpc_context = mtpc_context or getattr(key, "mtpc_context", None)
    if mtpc_context is None:
        raise UnsupportedModelError(f"{kind} attends to other keys than those of its cache")
    if not isinstance(attention_mask, _Mask):
        raise UnsupportedModelError(f"{kind} makes its mask without transformers' mask functions")
    for name, given in options.items():
        is_off = given is None or given is False or name in _NEUTRAL
        if name not in _COMPUTED and not is_off:
            raise UnsupportedModelError(f"{kind} gives its attention {name}, which has no meaning")
    windows = (attention_mask.window, options.get("sliding_window") or 0)
    window, said = (0 if each >= mtpc_context.longest else each for each in windows)
    if said != window:
        raise UnsupportedModelError(
            f"the mask of {kind} has a window of {window}, and its attention is given {said}"
        )
    mtpc_context.attend(module, key, value, window)
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _experts(module: Any, x: Tensor, *_: Tensor) -> Tensor:
    """The experts function that transformers calls; no row of theirs sees another."""
    return torch.empty_like(x)


def _window(mask: _Mask) -> int:
    back = 2 ** torch.arange(41)
    behind = torch.full_like(back, _FAR)
    seen = mask.sees(behind, behind - back + 1)
    window = 0
    if not bool(seen.all()):
        low, high = max(back[seen].tolist(), default=0), int(back[~seen].min())
        while low + 1 < high:
            middle = torch.tensor((low + high) // 2)
            is_seen = bool(mask.sees(behind[0], behind[0] - middle + 1))
            low, high = (int(middle), high) if is_seen else (low, int(middle))
        window = low
    near = torch.arange(-_NEAR, _NEAR)
    distance = torch.cat([near, near + window])
    rows = torch.arange(_NEAR)[:, None] + torch.tensor([0, 999, 4096, _FAR])[:, None, None]
    found = mask.sees(rows, rows - distance).expand(rows.shape[0], rows.shape[1], -1)
    expected = (distance >= 0) & ((distance < window) | (window == 0))
    is_real = rows - distance >= 0
    if window < 0 or bool(((found != expected) & is_real).any()):
        raise UnsupportedModelError(
            "rows do not attend to a window of earlier positions, equal for all rows: its mask is "
            "chunked, or reaches later positions"
        )
    return window


def redirect(model: nn.Module) -> None:
    """Select this module's attention, masks and experts in the configs of a model."""
    for module in model.modules():
        own = getattr(module, "config", None)
        if own is not None:
            own._attn_implementation = own._experts_implementation = _NAME


def rows() -> tuple[Tensor, Tensor]:
    """Token ids and positions of the rows that are run, each int64 [1, TOKENS]."""
    ids = torch.zeros((1, TOKENS), dtype=torch.int64, device="meta")
    return ids, torch.arange(TOKENS, device="meta")[None]


def run_decoder(model: Any, observer: Observer) -> None:
    """Run the decoder of a model, whose cache is `observer`."""
    redirect(model)
    ids, positions = rows()
    model.get_decoder()(
        input_ids=ids,
        position_ids=positions,
        use_cache=False,
        mtpc_context=observer,
        **{CACHE: observer},
    )


def observe(
    kind: Any, config: Any, run: Callable[[Any, Observer], None] = run_decoder
) -> Mapping[int, Kept]:
    """What each layer of a decoder keeps, by its index; layers that keep nothing are left out.

    `run` runs layers of a model on the meta device, as `run_decoder` does.

    Raises:
        UnsupportedModelError: a step cannot run the class; the message says why.
    """
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    ExpertsInterface.register(_NAME, _experts)
    observer = Observer(max_positions(config.get_text_config(decoder=True)) or math.inf)
    try:
        with torch.device("meta"):
            model = kind._from_config(copy.deepcopy(config), attn_implementation="eager")
        with torch.no_grad():
            stand_in(model, {name: partial(_Mixer, make) for name, make in MIXERS.items()})
            run(with_fixed_angles(model, TOKENS).eval(), observer)
    except Exception as error:
        is_ours = isinstance(error, (MtpcError, AttributeError))
        why = str(error)
        if not is_ours:
            why = f"its forward needs values, where mtpc sees what it keeps without any ({why})"
        raise UnsupportedModelError(
            f"mtpc cannot step transformers' {kind.__name__}: {' '.join(why.split())}"
        ) from error
    unread = sorted(observer.kept.keys() - observer.states.keys())
    if unread or not observer.states:
        keeps = f"layer {unread[0]} keeps keys" if unread else "it keeps no keys"
        raise UnsupportedModelError(
            f"mtpc cannot step transformers' {kind.__name__}: {keeps}, by transformers' interfaces "
            "of caches and attention, that it attends to"
        )
    return observer.states


class ObservedCaches:
    """State buffers of a class's layers: `ModelFamily.cache_specs`. `look` makes of a config what
    its layers keep, by layer index."""

    def __init__(self, look: Callable[[Any], Mapping[int, Kept]]):
        self._look = look
        self._known: list[tuple[Any, Mapping[int, Kept]]] = []

    def __call__(self, config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
        """The buffers of a layer; none for one that keeps nothing.

        A layer after the decoder's that was not looked at keeps what the decoder's last one keeps.

        Raises:
            UnsupportedModelError: a step cannot run the class; the message says why.
        """
        layers = self._layers(config)
        state = layers.get(layer, layers.get(min(layer, config.num_hidden_layers - 1)))
        return () if state is None else state.specs(layer, dtype)

    def _layers(self, config: Any) -> Mapping[int, Kept]:
        """What the layers keep; a config is looked at once."""
        for known, layers in self._known:
            if known is config:
                return layers
        self._known.append((config, self._look(config)))
        return self._known[-1][1]

"""A family by derivation: any decoder-only causal LM of transformers, by its class and its config.

Names, shapes and what a step runs are the class's own. What its layers keep is observed
(`mtpc.models.observe`). Only what interfaces cannot say has a file in `mtpc.models.families`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mtpc.errors import UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.models import FAMILIES
from mtpc.models.caches import paged_pool_specs, paged_spec_of_latent, ring_kv_specs
from mtpc.models.family import NO_LAYERS, ModelFamily
from mtpc.models.observe import LayerState, observe
from mtpc.models.read_config import TEXT

_ENCODERS = ({"is_encoder_decoder"}, {"is_decoder", "add_cross_attention"})
"""Entries that the configs of encoders have, and of decoders that attend to one."""

_INSIDE = (
    ("model.", "model.language_model."),
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
"""Prefixes of names in a language model, and in the multimodal checkpoint that holds it."""


class ObservedCaches:
    """State buffers of a class's layers: `ModelFamily.cache_specs`.

    Args:
        kind: transformers' class of the causal LM.
    """

    def __init__(self, kind: Any):
        self.kind = kind
        self._known: list[tuple[Any, Mapping[int, LayerState]]] = []

    def __call__(self, config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
        """The buffers of a layer; none for one that keeps nothing.

        MTP layers, which follow the target's, keep what its last layer keeps.

        Raises:
            UnsupportedModelError: a step cannot run the class; the message says why.
        """
        state = self._layers(config).get(min(layer, config.num_hidden_layers - 1))
        if state is None:
            return ()
        if not state.heads:
            return paged_spec_of_latent(layer, dtype, sum(state.widths))
        if state.window:
            return ring_kv_specs(layer, dtype, state.window, state.heads, state.widths)
        return paged_pool_specs(layer, dtype, state.heads, state.widths)

    def _layers(self, config: Any) -> Mapping[int, LayerState]:
        """What the layers keep; a config is observed once."""
        for known, layers in self._known:
            if known is config:
                return layers
        self._known.append((config, observe(self.kind, config)))
        return self._known[-1][1]


def derive(architectures: Iterable[str]) -> ModelFamily | None:
    """The family of transformers' class of one of these names; None if it has no such causal LM.

    A multimodal class stands for its language model.

    Raises:
        UnsupportedModelError: the class is an encoder, or attends to one.
    """
    found = ((name, _language_model(name)) for name in architectures)
    return next((_family(name, *each) for name, each in found if each is not None), None)


def classes() -> tuple[str, ...]:
    """transformers' causal LM classes that no family of mtpc's own serves, by name."""
    known = {name for family in FAMILIES for name in (*family.architectures, family.hf_class)}
    names = dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return tuple(sorted(name for name in names if name not in known))


def why_not(name: str) -> str | None:
    """Why a step cannot run a class with its default config; None if it can."""
    if any(name in (*family.architectures, family.hf_class) for family in FAMILIES):
        return None
    try:
        family = derive([name])
        found = _language_model(name)
        if family is None or found is None:
            return "transformers has no such causal LM"
        kind, config = found
        observe(kind, _few_layers(config))
    except UnsupportedModelError as error:
        return str(error)
    return None


def _few_layers(kind: Any) -> Any:
    """A class's default config, with few layers where that is all it takes."""
    usual = kind()
    types = getattr(usual, "layer_types", None) or getattr(usual, "layers_block_type", None)
    if types or getattr(usual, "per_layer_config", None):
        return usual
    try:
        return kind(num_hidden_layers=2)
    except (TypeError, ValueError):
        return usual


def _language_model(name: str) -> tuple[Any, Any] | None:
    """A class of transformers, or that of the language model inside; and its config's class."""
    config = getattr(getattr(transformers, name, None), "config_class", None)
    if config is None:
        return None
    inner = (getattr(config, "sub_configs", None) or {}).get(TEXT)
    if inner is not None:
        # An `AutoConfig` stands for language models of any type.
        text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(getattr(inner, "model_type", ""))
        return None if text is None else (getattr(transformers, text), inner)
    is_known = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return (getattr(transformers, name), config) if is_known else None


def _family(name: str, kind: Any, config: Any) -> ModelFamily:
    base = transformers.PreTrainedConfig.__mro__
    own = [vars(each) for each in config.__mro__ if each not in base]
    known = {name for entries in own for name in (*entries, *entries.get("__annotations__", ()))}
    if any(entries <= known for entries in _ENCODERS):
        raise UnsupportedModelError(
            f"transformers' {kind.__name__} has an encoder's layers, or attends to an encoder; "
            "expected a decoder-only causal LM"
        )
    return ModelFamily(
        name=config.model_type,
        architectures=(name,),
        class_name=kind.__name__,
        hf_config_class=config.__name__,
        wiring=NO_LAYERS,
        num_mtp_layers=lambda config: 0,
        cache_specs=ObservedCaches(kind),
        stored_prefixes=() if name == kind.__name__ else _INSIDE,
    )

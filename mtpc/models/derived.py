"""A family by derivation: any decoder-only causal LM of transformers, by its class and its config.

Names, shapes and what a step runs are the class's own. What its layers keep is observed
(`mtpc.models.observe`), and MTP layers are those of transformers' `MtpModel`
(`mtpc.models.derived_mtp`). Only what interfaces cannot say has a file in `mtpc.models.families`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mtpc.errors import UnsupportedModelError
from mtpc.models.family import NO_LAYERS, ModelFamily
from mtpc.models.read_config import TEXT

_ENCODERS = ({"is_encoder_decoder"}, {"is_decoder", "add_cross_attention"})
"""Entries that the configs of encoders have, and of decoders that attend to one."""

_INSIDE = (
    ("model.", "model.language_model."),
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
"""Prefixes of names in a language model, and in the multimodal checkpoint that holds it."""
NO_ENTRIES: Mapping[str, Any] = MappingProxyType({})


def derive(
    architectures: Iterable[str], entries: Mapping[str, Any] = NO_ENTRIES
) -> ModelFamily | None:
    """The family of transformers' class of one of these names; None if it has no such causal LM.
    `entries` of its config say whether the model has MTP layers.

    A multimodal class stands for its language model.

    Raises:
        UnsupportedModelError: the class is an encoder, or attends to one.
    """
    for name in architectures:
        found = _language_model(name)
        if found is not None:
            family = _family((name,), *found)
            if name != family.hf_class:
                return replace(family, stored_prefixes=_INSIDE)
            from mtpc.models.derived_mtp import with_mtp_layers  # Not above: few are derived.

            return with_mtp_layers(family, found[0], entries)
    return None


def borrow(architectures: Iterable[str], entries: Mapping[str, Any]) -> ModelFamily | None:
    """The family of a model type that runs on the class of another model; None for other types.
    transformers may have no class of the name in config.json.

    Sarvam's two types run on the classes of GLM-4.5 and DeepSeek-V3, with configs of their own.
    """
    names, model_type = tuple(architectures), str(entries.get("model_type"))
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "")
    others = [name for name in names if name != class_name and getattr(transformers, name, None)]
    if not class_name or others:
        return None
    kind, config = getattr(transformers, class_name), transformers.CONFIG_MAPPING[model_type]
    packages = {each.__module__.rpartition(".")[0] for each in (kind, config)}
    if len(packages) == 1:
        return None
    from mtpc.models.derived_mtp import with_mtp_layers

    return with_mtp_layers(_family(names, kind, config), kind, entries)


def classes() -> tuple[str, ...]:
    """transformers' causal LM classes that no family of mtpc's own serves, by name."""
    from mtpc.models import FAMILIES  # Not above: that opens them all.

    known = {name for family in FAMILIES for name in (*family.architectures, family.hf_class)}
    names = dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return tuple(sorted(name for name in names if name not in known))


def why_not(name: str) -> str | None:
    """Why a step cannot run a class with its default config; None if it can."""
    from mtpc.models import FAMILIES
    from mtpc.models.observe import observe

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


def _family(names: tuple[str, ...], kind: Any, config: Any) -> ModelFamily:
    base = transformers.PreTrainedConfig.__mro__
    own = [vars(each) for each in config.__mro__ if each not in base]
    known = {name for entries in own for name in (*entries, *entries.get("__annotations__", ()))}
    if any(entries <= known for entries in _ENCODERS):
        raise UnsupportedModelError(
            f"transformers' {kind.__name__} has an encoder's layers, or attends to an encoder; "
            "expected a decoder-only causal LM"
        )
    from mtpc.models.mamba2 import MIXERS
    from mtpc.models.observe import ObservedCaches, observe
    from mtpc.models.recurrent import RecurrentKV, RecurrentState

    return ModelFamily(
        name=config.model_type,
        architectures=names or (kind.__name__,),
        class_name=kind.__name__,
        hf_config_class=config.__name__,
        wiring=NO_LAYERS,
        num_mtp_layers=lambda config: 0,
        cache_specs=ObservedCaches(partial(observe, kind)),
        cache_kinds=(RecurrentState, RecurrentKV),
        canonical=MIXERS,
    )

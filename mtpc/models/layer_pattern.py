"""Which layers of a decoder repeat, so that a build traces a few and copies them.

Layers repeat with a period if each is what the layer one period before it is: of the same classes,
shapes, numbers and state. A model of 60 equal layers has period 1; one with full attention in every
fourth layer has period 4. Layers before the pattern begins are traced as they are. Files of mixed
types store layers in other forms; such layers repeat until their weights are packed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from mtpc.layout.layers import LayerPattern
from mtpc.models.hf import decoder_layers
from mtpc.models.load import LoadedModel

if TYPE_CHECKING:
    from mtpc.weights.grouped_recipes import GroupSpec

_INDEX = "layer_idx"
"""transformers' name of a layer's number, which no two layers share."""


SpecOf: TypeAlias = "Callable[[str], GroupSpec | None]"
"""The name of a weight -> how it is stored in groups; None for a plain one."""


def find_pattern(loaded: LoadedModel, spec_of: SpecOf) -> LayerPattern | None:
    """The pattern that lets most layers be copied; None where too few repeat, or where what enters
    some of them is handed out."""
    if loaded.captures_layers:
        return None
    count = len(decoder_layers(loaded.target.get_decoder()))
    kinds = [_kind(loaded, index, spec_of) for index in range(count)]
    return _pattern(loaded, kinds, True) or _pattern(loaded, [made for made, _ in kinds], False)


def _pattern(loaded: LoadedModel, kinds: list[Any], stored_alike: bool) -> LayerPattern | None:
    total, best = len(kinds), None
    for period in range(1, total // 3):
        first = next(
            (i + 1 for i in reversed(range(total - period)) if kinds[i] != kinds[i + period]), 0
        )
        rest = (total - first) % period or period
        traced = first + 3 * period + rest
        if traced < total and (best is None or traced < best.traced):
            prefix, caches = layers_prefix(loaded), loaded.family.caches_per_layer
            best = LayerPattern(prefix, first, period, traced, total, caches, stored_alike)
    return best


def with_first_layers(loaded: LoadedModel, count: int) -> LoadedModel:
    """The model with its first layers only; config, weights and everything else are the model's."""
    target = copy.copy(loaded.target)
    module: Any = target
    path = layers_prefix(loaded).removesuffix(".").split(".")
    for name in path[:-1]:
        module._modules = dict(module._modules)
        module._modules[name] = copy.copy(module._modules[name])
        module = module._modules[name]
    layers = module._modules[path[-1]]
    module._modules = {**module._modules, path[-1]: nn.ModuleList(list(layers)[:count])}
    return replace(loaded, target=target)


def layers_prefix(loaded: LoadedModel) -> str:
    """The prefix of decoder layers' weight names, up to the number, such as "model.layers."."""
    layers = decoder_layers(loaded.target.get_decoder())
    name = next(name for name, module in loaded.target.named_modules() if module is layers)
    return f"{name}."


def _kind(loaded: LoadedModel, index: int, spec_of: SpecOf) -> tuple[Any, Any]:
    """Everything that determines a layer's trace, except its number; and how it is stored."""
    config, layer = loaded.config, decoder_layers(loaded.target.get_decoder())[index]
    lists = {
        name: value[index]
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) >= config.num_hidden_layers
    }
    count = loaded.family.caches_per_layer
    specs = [
        replace(spec, name=spec.name.replace(f"kv.{cache}.", f"kv.{cache % count}."))
        for cache in range(index * count, (index + 1) * count)
        for spec in loaded.cache_specs(cache)
    ]
    names = [name for name, _ in layer.named_parameters()]
    groups = {name: spec_of(f"{layers_prefix(loaded)}{index}.{name}") for name in names}
    return (repr(lists), specs, _content(layer)), groups


def _content(module: nn.Module) -> Any:
    """A module's classes, forms of tensors and plain values, without its layer's number."""
    held, constants = module._parameters | module._buffers, module._non_persistent_buffers_set
    tensors = {
        name: (type(t), t.dtype, t.shape, t.stride(), t.tolist() if name in constants else ())
        for name, t in held.items()
        if t is not None
    }
    values = {
        name: value if _is_plain(value) else id(value)
        for name, value in vars(module).items()
        if name != _INDEX and (_is_plain(value) or not name.startswith("_"))
    }
    children = {name: _content(child) for name, child in module.named_children()}
    return type(module), tensors, values, children


def _is_plain(value: Any) -> bool:
    """Whether a value equals another one only if it is the same to a trace."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))

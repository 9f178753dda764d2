"""transformers' interfaces, redirected to mtpc: attention, experts and the cache.

Here they are called seams. Attention goes through `AttentionInterface` and experts through
`ExpertsInterface`, both under the name "mtpc". The KV cache goes through the protocol
`cache.update(a, b, layer_idx)`. The user's model does not change: mtpc copies its module tree and
shares its tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.modeling_outputs import CausalLMOutputWithPast

from mtpc.errors import UnsupportedModelError
from mtpc.models.caches import LayerCache
from mtpc.models.family import Canonical
from mtpc.ops.experts import (
    biased_experts,
    clamped_swiglu,
    experts,
    relu2_experts,
    squared_relu,
    swiglu,
)
from mtpc.step.records import Metadata

SEAM_NAME = "mtpc"
CACHE = next(
    field.name
    for field in fields(CausalLMOutputWithPast)
    if field.name in ("cache", "past_key_values")
)
"""transformers' name for the KV cache as an argument and as an output: "cache" since 5.24, and
"past_key_values" before."""


class Unreadable:
    """In place of the number of tokens that a cache holds, which rows of a step do not share.

    Classes ask for it, and read it where they are given no positions.
    """

    def _read(self, *_: Any) -> Any:
        raise UnsupportedModelError("it numbers rows by the tokens in its cache")

    __index__ = __int__ = __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __sub__ = __rsub__ = _read

    def __add__(self, _: Any) -> Unreadable:
        return self

    __radd__ = __add__


@dataclass(frozen=True)
class StepContext(Metadata):
    """Metadata of one forward and the caches of its layers, in place of transformers' cache.

    `layers` holds a `LayerCache`, or state of another kind, by layer index. A window of attention
    holds `ahead` further positions: those of a row's own block, which it sees both ways.
    """

    layers: dict[int, Any]
    ahead: int = 0

    @classmethod
    def of(cls, metadata: tuple[Tensor, ...], layers: dict[int, Any]) -> StepContext:
        return cls(**vars(Metadata(*metadata)), layers=layers)

    def update(
        self, first: Tensor, second: Tensor, layer_idx: int, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values to its cache: the cache protocol of transformers."""
        self.layers[layer_idx].write(first, second, self)
        first.mtpc_context = self  # type: ignore[attr-defined]
        return first, second

    def get_seq_length(self, layer_idx: int = 0) -> Unreadable:
        """In the cache protocol, the number of tokens in a layer's cache."""
        return Unreadable()


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    mtpc_context: StepContext | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls; it reads keys and values from the caches."""
    # Some classes hand no keyword arguments on. Their keys come from the cache as they are.
    mtpc_context = mtpc_context or getattr(key, "mtpc_context", None)
    if mtpc_context is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes no `mtpc_context` to its attention function, and not "
            "the keys of its cache; add a canonical module to its family"
        )
    scale = module.head_dim**-0.5 if scaling is None else scaling
    cache: LayerCache = mtpc_context.layers[module.layer_idx]
    if options.get("sliding_window"):
        options["sliding_window"] += mtpc_context.ahead
    return cache.attend(module, query, scale, mtpc_context, **options), None


def _experts(module: Any, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
    chosen = (expert_ids, expert_weights)
    gate = getattr(module, "mtpc_gate", None)
    if isinstance(gate, Gate):
        return experts(x, module.gate_up_proj, module.down_proj, *chosen, *gate)
    if isinstance(gate, ClampedGate):
        wide = (module.gate_up_proj, module.gate_up_proj_bias)
        return biased_experts(x, *wide, module.down_proj, module.down_proj_bias, *chosen, *gate)
    if gate == _SQUARED:
        return relu2_experts(x, module.up_proj, module.down_proj, *chosen)
    return _each_expert(module, x, *chosen)


def _each_expert(module: Any, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
    """Experts as their class computes them, each over all rows: what no operator of mtpc has."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    activate = module._apply_gate if module.has_gate else module.act_fn
    out = torch.zeros_like(x)
    for expert in range(module.down_proj.shape[0]):
        rows = activate(_projected(module, name, expert, x))
        rows = _projected(module, "down_proj", expert, rows)
        if getattr(module, "has_post_expert_norm", False):
            rows = module.post_expert_norm(rows)
        chosen = expert_ids == expert
        weight = (expert_weights * chosen).sum(1, keepdim=True).to(x.dtype)
        out = torch.where(chosen.any(1, keepdim=True), out + rows * weight, out)
    return out


def _projected(module: Any, name: str, expert: int, x: Tensor) -> Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return F.linear(x, weight.T if module.is_transposed else weight, bias)


class Gate(NamedTuple):
    """How experts join gate and up projection: the last arguments of `mtpc::experts`, in order.

    Attributes:
        limit: bounds them; 0 is off.
        limit_input: whether the limit bounds the gate before its activation.
        gelu: whether the activation is GELU in its tanh form, not SiLU.
    """

    limit: float = 0.0
    limit_input: bool = False
    gelu: bool = False


class ClampedGate(NamedTuple):
    """The same of experts with biases: the last arguments of `mtpc::biased_experts`, in order: what
    bounds gate from above, and up on both sides, and alpha of the gate's sigmoid."""

    limit: float
    alpha: float


_SQUARED = "relu2"
LIMITS = ("limit", "swiglu_limit")
"""transformers' names of the limit in modules of experts."""


def gate_of(module: Any) -> Gate | ClampedGate | str | None:
    """How mtpc's operators compute a module of experts; None: as its class does, one by one.

    The module's own activation is compared with the operators', value by value.
    """
    has_gate, is_plain = getattr(module, "has_gate", True), getattr(module, "is_concatenated", True)
    others = ("is_transposed", "has_bias", "has_post_expert_norm")
    has = tuple(bool(getattr(module, name, False)) for name in others)
    has_turns = not is_plain and has == (True, True, False)  # Gate and up features come in turns.
    if not has_turns and (not is_plain or any(has)):
        return None
    rows = torch.linspace(-30, 30, 4096, dtype=torch.float64, device="cpu").view(16, -1)
    if not has_gate:
        is_squared = is_plain and torch.equal(module.act_fn(rows), squared_relu(rows))
        return _SQUARED if is_squared else None
    # In another order, so that gate and up differ.
    rows = rows.flatten()[torch.arange(4096, device="cpu") * 1009 % 4096].view_as(rows)
    with torch.no_grad():
        found = module._apply_gate(rows)

    def fits(made: Tensor) -> bool:
        return torch.allclose(made, found, 1e-12, 1e-12)

    if has_turns:
        clamped = [float(getattr(module, name, None) or 0) for name in ClampedGate._fields]
        gate = ClampedGate(*clamped)
        return gate if all(clamped) and fits(clamped_swiglu(rows, *gate)) else None
    limits = [float(getattr(module, name)) for name in LIMITS if getattr(module, name, None)]
    gates = [Gate(*each) for each in product((0.0, *limits), (False, True), (False, True))]
    return next((each for each in gates if fits(swiglu(rows, *each))), None)


class StandIn(nn.Module):
    """A canonical module: it has all that transformers' module has, parameters, submodules and
    settings, under their names, and a forward of its own."""

    def __init__(self, source: nn.Module):
        super().__init__()
        held = {name: dict(vars(source)[name]) for name in ("_parameters", "_buffers", "_modules")}
        vars(self).update(vars(source) | held)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def register_seams() -> None:
    """Register "mtpc" in transformers' interfaces; existing entries do not change."""
    AttentionInterface.register(SEAM_NAME, _attention)
    ExpertsInterface.register(SEAM_NAME, _experts)


def share_model(model: nn.Module, canonical: Mapping[str, Canonical]) -> nn.Module:
    """Copy the module tree, share every tensor, select the "mtpc" seams, and set eval mode.
    `canonical` has, by class name, what makes the module that replaces one of that class."""
    register_seams()
    tensors = [*model.parameters(), *model.buffers()]
    shared = copy.deepcopy(model, {id(t): t for t in tensors})
    use_seams(shared.config)
    stand_in(shared, canonical)
    return shared.eval()


def stand_in(root: nn.Module, canonical: Mapping[str, Canonical]) -> None:
    """Replace modules below `root` by their canonical modules, in place.

    Modules of experts get their `gate_of`, for traces, which see no values.
    """
    for name, module in list(root.named_modules()):
        make = canonical.get(type(module).__name__)
        if make is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(root.get_submodule(parent), leaf, make(module))
    for found in root.modules():
        if getattr(type(found), "_apply_gate", None):
            found.mtpc_gate = gate_of(found)  # type: ignore[assignment]


def use_seams(config: Any) -> None:
    """Select mtpc's attention and experts in a config, which must be a private copy."""
    for part in (config, config.get_text_config(decoder=True)):
        part._attn_implementation = SEAM_NAME
        part._experts_implementation = SEAM_NAME

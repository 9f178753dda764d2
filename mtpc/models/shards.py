"""Which part of each tensor a rank holds under transformers' own tensor and expert plans.

The plans are data: `model.tp_plan` and `model.ep_plan`, from the config's `base_model_tp_plan` and
`base_model_ep_plan`. The rules of decoder layers hold for the blocks of MTP layers, too; a drafter
of another architecture has those of its own config. What no rule names is on every rank, as in
transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from torch import Tensor

from mtpc.errors import OptionError, UnsupportedModelError
from mtpc.models.layer_pattern import layers_prefix
from mtpc.models.load import LoadedModel

Kind = Literal["replicated", "colwise", "rowwise", "vocab", "expert"]
Collective = Literal["all_reduce", "all_gather"]
HEAD_ROLES = frozenset({"k", "v", "k_scale", "v_scale", "ring_k", "ring_v"})
"""Roles of the buffers that have a dimension of key/value heads."""


@dataclass(frozen=True)
class Shard:
    """How one tensor is cut.

    Attributes:
        kind: "replicated": not at all; "colwise": by output features; "rowwise": by input features,
            or by columns of a table; "vocab": by rows of the vocabulary; "expert": by experts.
        dim: the dimension that is cut.
        parts: equal parts of that dimension, each cut by itself: 2 for joined gate and up.
    """

    kind: Kind = "replicated"
    dim: int = 0
    parts: int = 1

    def ranges(self, size: int, rank: int, ranks: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) along `dim`, of this size, of what a rank holds, in order.

        A vocabulary that does not divide leaves the last ranks with less, as torch.chunk does.
        """
        if self.kind == "replicated":
            return ((0, size),)
        part = size // self.parts
        step = -(-part // ranks)
        first, last = min(rank * step, part), min((rank + 1) * step, part)
        return tuple((i * part + first, i * part + last) for i in range(self.parts))

    def count(self, shape: tuple[int, ...], rank: int, ranks: int) -> int:
        """Elements of a tensor of this shape that a rank holds."""
        if self.kind == "replicated":
            return prod(shape)
        held = sum(stop - start for start, stop in self.ranges(shape[self.dim], rank, ranks))
        return prod(shape) // shape[self.dim] * held


@dataclass(frozen=True)
class Style:
    """What one of transformers' styles means: how it cuts a weight (`Shard`), and what follows the
    module."""

    kind: Kind = "replicated"
    parts: int = 1
    collective: Collective | None = None

    def shard(self, dims: int) -> Shard:
        """How a weight or a bias with so many dimensions is cut; a number is on every rank."""
        if self.kind == "replicated" or not dims or (self.kind == "rowwise" and dims == 1):
            return Shard()  # A bias is added once, to the sum.
        dim = {"rowwise": dims - 1, "colwise": max(dims - 2, 0)}.get(self.kind, 0)
        return Shard(self.kind, dim, self.parts)


_GATHERED = Style("colwise", 1, "all_gather")
_REDUCED = Style("rowwise", 1, "all_reduce")
_EXPERTS = Style("replicated", 1, "all_reduce")
STYLES: Mapping[str, Style] = {
    "colwise": Style("colwise"),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "packed_colwise": Style("colwise", 2),
    "rowwise": _REDUCED,
    "rowwise_split_input": _REDUCED,
    "rowwise_rep": _REDUCED,
    "packed_rowwise": replace(_REDUCED, parts=2),
    "embedding_rowwise": Style("vocab", 1, "all_reduce"),
    "embedding_colwise": Style("rowwise", 1, "all_gather"),
    "grouped_gemm": Style("expert"),
    "moe_tp_experts": _EXPERTS,
    "ep_dispatch_experts": _EXPERTS,
    "replicated_with_grad_allreduce": Style(),
    "mla_kv_a_proj": Style(),
    "local_params": Style(),
    "moe_identity_expert": Style(),
    "replicate": Style(),
}
"""By transformers' names. The experts' own tensors have rules; the module's rule is their sum."""


class ShardPlan:
    """How the tensors of one model are cut.

    Args:
        loaded: the model; shapes are read, and no values.
        ranks: how many devices share it.
        expert_parallel: cut experts by the expert plan, not each of them by the tensor plan.

    Raises:
        UnsupportedModelError: the model has no such plan, or one with an unknown style.
        OptionError: heads, experts or features do not divide among the ranks.
    """

    def __init__(self, loaded: LoadedModel, ranks: int, expert_parallel: bool = False):
        self.ranks, self._loaded, target = ranks, loaded, loaded.target
        self._layers = layers_prefix(loaded)
        names = {id(module): name for name, module in target.named_modules()}
        self._embedding = names[id(target.get_input_embeddings())]
        self._head = names[id(target.get_output_embeddings())]
        layer = next(iter(loaded.mtp_layers), None)
        self._drafter = dict((layer and layer.tp_plan) or {})
        self._rules = self._read(expert_parallel) if ranks > 1 else {}
        if ranks > 1:
            self._check_heads()
            for name, tensor in self._loaded.weights().items():
                shard = self.shard(name, tensor)
                if shard.kind not in ("replicated", "vocab"):
                    what = "experts" if shard.kind == "expert" else "features"
                    self._divide(tensor.shape[shard.dim] // shard.parts, what, name)

    def style(self, name: str) -> Style:
        """What the plan says of a module or a parameter by its name in `LoadedModel.weights`."""
        name = self._generic(name)
        style = STYLES[self._rules[name]] if name in self._rules else Style()
        return replace(style, kind="vocab") if name == self._head and style.kind != "replicated" \
            else style  # fmt: skip

    def shard(self, name: str, tensor: Tensor) -> Shard:
        """How a weight is cut, by its name in `LoadedModel.weights` and its shape."""
        own, module = self._generic(name), name.rpartition(".")[0]
        return self.style(own if own in self._rules else module).shard(tensor.dim())

    def is_gathered(self, name: str) -> bool:
        """Whether the plan makes whole again what the linear of a weight computes."""
        return self.style(name.rpartition(".")[0]).collective == "all_gather"

    def cuts_cache(self, name: str) -> bool:
        """Whether a buffer, "kv.LAYER.ROLE", holds a rank's own key/value heads only."""
        _, layer, role = name.split(".")
        style = self.style(f"{self._attention(int(layer))}.k_proj")
        return role in HEAD_ROLES and style.kind == "colwise" and style.collective is None

    def _read(self, expert_parallel: bool) -> dict[str, str]:
        target = self._loaded.target
        rules, experts = dict(target.tp_plan or {}), dict(getattr(target, "ep_plan", None) or {})
        missing = "tp" if not rules else "ep" if expert_parallel and not experts else None
        if missing:
            advice = "use --tensor-parallel-size 1" if missing == "tp" else \
                "leave out --enable-expert-parallel"  # fmt: skip
            raise UnsupportedModelError(
                f"{type(target).__name__} of transformers has no base_model_{missing}_plan; "
                f"expected one that says how its weights are cut; {advice}"
            )
        if expert_parallel:  # As in transformers, rules for experts replace those for tensors.
            below = tuple(f"{module}." for module in experts)
            rules = {n: s for n, s in rules.items() if not f"{n}.".startswith(below)} | experts
        rules |= {f"mtp.*.{name}": style for name, style in self._drafter.items()}
        unknown = sorted({style for style in rules.values() if style not in STYLES})
        if unknown:
            raise UnsupportedModelError(
                f"the plan of {type(target).__name__} has the style {unknown[0]!r}; expected one "
                f"of {', '.join(STYLES)}; use the transformers that mtpc was tested with"
            )
        return rules

    def _generic(self, name: str) -> str:
        """The name that a rule would have: what no rule of a drafter names stands for the target's,
        and an MTP block for a decoder layer or two."""
        own = _starred(name)
        if own in self._rules:
            return own
        name = re.sub(r"^mtp\.\d+\.block\.(\d+\.)?", f"{self._layers}0.", name)
        name = re.sub(r"^mtp\.\d+\.embedding\b", self._embedding, name)
        name = re.sub(r"^mtp\.\d+\.head\b", self._head, name)
        return _starred(name)

    def _attention(self, layer: int) -> str:
        """The attention that writes a layer's cache; MTP layers follow the target's."""
        caches = self._loaded.family.caches_per_layer
        later = layer - self._loaded.config.num_hidden_layers
        block = f"{self._layers}{layer // caches}" if later < 0 else f"mtp.{later}.block"
        if later >= 0 and "block.*.self_attn.k_proj" in self._drafter:  # It has several layers.
            block = f"mtp.0.block.{later}"
        has_several = caches > 1 and not (self._drafter and later >= 0)
        return f"{block}.self_attn" + (f".{layer % caches}" if has_several else "")

    def _check_heads(self) -> None:
        """Key/value heads by the cache's own shape, and query heads by the output projection's."""
        loaded, weights = self._loaded, self._loaded.weights()
        count = loaded.config.num_hidden_layers
        for layer in range(count + len(loaded.mtp_layers)):
            where = "the drafter" if self._drafter and layer >= count else f"layer {layer}"
            output = f"{self._attention(layer)}.o_proj"
            if self.style(output).collective is None or f"{output}.weight" not in weights:
                continue
            specs = {s.name.rpartition(".")[2]: s.dims for s in loaded.cache_specs(layer)}
            values = next((specs[role] for role in ("v", "ring_v") if role in specs), None)
            if values is None:
                heads = loaded.config.num_attention_heads
            else:
                heads = weights[f"{output}.weight"].shape[1] // int(values[-1])
                if self.cuts_cache(f"kv.{layer}.k"):
                    self._divide(int(values[-2]), "key/value heads", where)
            if self._rules[self._generic(output)] != "rowwise_split_input":  # It takes all heads.
                self._divide(heads, "attention heads", where)

    def _divide(self, count: int, what: str, where: str) -> None:
        """Refuse a count that the ranks cannot share equally."""
        if count % self.ranks == 0:
            return
        fit = [n for n in range(1, self.ranks) if count % n == 0]
        found = "more ranks than heads" if what.endswith("heads") and count < self.ranks else \
            f"{count} does not divide by {self.ranks}"  # fmt: skip
        raise OptionError(
            f"{where} has {count} {what} for {self.ranks} ranks: {found}; expected a number of "
            f"ranks that divides {count}: use --tensor-parallel-size {fit[-1]}"
        )


def _starred(name: str) -> str:
    """A name with "*" for each number, as rules have it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)

"""Linear and expert sites: the layers of a traced draft that the host computes itself.

A host's own layers implement tensor parallelism and quantisation. Before the draft is traced,
`mark_layers` replaces each linear layer and each mixture's experts by a mark. A mark calls
`mtpc::host_site`, whose results have one rank's sizes. Afterwards, the modules that the host makes
for these sites replace the calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from mtpc.errors import OptionError, UnsupportedModelError
from mtpc.models.hf import MTPLayer
from mtpc.models.seams import LIMITS, Gate, gate_of
from mtpc.models.shards import STYLES

LinearStyle = Literal["replicated", "column", "row"]
_STYLES: Mapping[str, LinearStyle] = {
    "colwise": "column",
    "rowwise": "row",
    # Every rank gets the whole result, so every rank computes it.
    "colwise_gather_output": "replicated",
    "colwise_rep": "replicated",
    "rowwise_split_input": "replicated",
}
"""By transformers' names. Other styles that cut nothing (`STYLES`) are "replicated", too."""
_LATENT: Mapping[str, LinearStyle] = {
    "q_proj": "column",
    "q_b_proj": "column",
    "kv_b_proj": "column",
    "o_proj": "row",
}
"""Styles in latent attention. transformers' plans leave it whole; hosts cut it by heads."""
_HEADS = {
    "k_proj": ("head_dim",),
    "v_proj": ("v_head_dim", "head_dim"),
    "o_proj": ("v_head_dim", "head_dim"),
}
"""Linear layers that are cut between heads -> attributes of the attention that give their width."""


@dataclass(frozen=True)
class LinearSite:
    """One linear layer of a draft, described so that a host can make its own.

    The host's module maps rows [T, in] to [T, out]. With the style "replicated" each rank computes
    everything. With "column" a rank computes part of the output from the whole input, and no
    collective follows. With "row" a rank has part of the input; the module adds up the ranks'
    results, and then the bias once.

    Attributes:
        index: index of the site among the draft's linear layers, from 0.
        name: the layer's name in the checkpoint, such as "model.layers.2.self_attn.q_proj".
        in_features: of all ranks together.
        out_features: of all ranks together.
        has_bias: whether the layer has a bias.
        style: what a rank computes.
        parts: number of equal parts that the output ("column") or the input ("row") is cut into.
            If there are fewer parts than ranks, as of few key/value heads, consecutive ranks share
            one. 1 for "replicated".
        is_joint: whether the layer joins embedding and features in front of the decoder block.
    """

    index: int
    name: str
    in_features: int
    out_features: int
    has_bias: bool
    style: LinearStyle
    parts: int
    is_joint: bool

    @property
    def width(self) -> int:
        """Features of a rank's output."""
        return self.out_features // (self.parts if self.style == "column" else 1)


@dataclass(frozen=True)
class ExpertsSite:
    """The routed experts of one mixture, described so that a host can make its own.

    The host's module gets rows x [T, H], ids int64 [T, k] of the experts chosen, and their weights
    [T, k]. It returns [T, H], the weighted sum over experts, the same on every rank.

    Attributes:
        index: index of the site among the draft's mixtures, from 0.
        name: name in the checkpoint. Tensors of expert i are named "NAME.i.PROJECTION.*".
        num_experts: of all ranks together.
        top_k: k.
        hidden_size: H.
        intermediate_size: width of one expert, of all ranks together.
        activation: transformers' name of the activation.
        projections: names of the gate, the up and the down projection. The gate is "" where
            experts have none.
        limit: bounds the gate from above and up on both sides; 0 is none.
        limit_input: whether the limit bounds the gate before its activation (DeepSeek-V4), or
            after it (Step-3.7).
    """

    index: int
    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    projections: tuple[str, str, str]
    limit: float = 0.0
    limit_input: bool = False

    def lacking(self, loaded: set[str]) -> tuple[set[str], set[str]]:
        """The missing and the unexpected names, given the loaded tensors' names below `name`."""
        leaves = {name.split(".", 2)[-1] for name in loaded} or {"weight"}
        parts = [part for part in self.projections if part]
        expected = {
            f"{expert}.{part}.{leaf}"
            for expert in range(self.num_experts)
            for part in parts
            for leaf in leaves
        }
        return expected - loaded, loaded - expected


class HostLayers(Protocol):
    """A host that computes linear layers and experts itself.

    Attributes:
        ranks: number of ranks that share the layers.
    """

    ranks: int

    def linear(self, site: LinearSite) -> nn.Module:
        """Make the host's layer for a site."""

    def experts(self, site: ExpertsSite) -> nn.Module:
        """Make the host's experts for a site."""

    def load(self, module: nn.Module, name: str, tensor: Tensor) -> set[str]:
        """Load a tensor of the checkpoint.

        Args:
            module: what `linear` or `experts` made.
            name: the tensor's name below the site's, such as "weight" or "3.up_proj.weight".
            tensor: the whole tensor, of all ranks together.

        Returns:
            The names of the parameters that were set. It is empty on a rank without the expert.

        Raises:
            LookupError: the module has no parameter for the tensor.
            CheckpointError: the tensor does not fit.
        """

    def parameters(self, module: nn.Module) -> set[str]:
        """The names of the parameters that must be loaded from the checkpoint."""


@torch.library.custom_op("mtpc::host_site", mutates_args=())
def host_site(operands: list[Tensor], kind: str, site: int, features: list[int]) -> Tensor:
    """Mark, in the trace of a draft, where a module of the host is called. It is never run.

    Args:
        operands: the module's arguments, of T rows each.
        kind: "attention", "linear" or "experts".
        site: the site's index among those of its kind.
        features: sizes of the result behind T.

    Raises:
        UnsupportedModelError: always.
    """
    raise UnsupportedModelError(
        f"{kind} site {site} was run; expected that the host's module replaces it in the graph"
    )


@host_site.register_fake
def _(operands: list[Tensor], kind: str, site: int, features: list[int]) -> Tensor:
    return operands[0].new_empty((operands[0].shape[0], *features))


class LinearMark(nn.Module):
    """Replaces a linear layer while the draft is traced."""

    def __init__(self, site: LinearSite):
        super().__init__()
        self.site = site

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., width]."""
        rows, width = x.reshape(-1, x.shape[-1]), self.site.width
        out: Tensor = host_site([rows], "linear", self.site.index, [width])
        return out.view(*x.shape[:-1], width)


class ExpertsMark(nn.Module):
    """Replaces transformers' experts while the draft is traced."""

    def __init__(self, site: ExpertsSite):
        super().__init__()
        self.site = site

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See `ExpertsSite`."""
        out: Tensor = host_site([x, ids, weights], "experts", self.site.index, [x.shape[-1]])
        return out


@dataclass(frozen=True)
class Marks:
    """The marks in an MTP layer, by the names of their modules, in the order of their sites."""

    linears: dict[str, LinearMark]
    experts: dict[str, ExpertsMark]


def mark_layers(
    layer: MTPLayer, target: Any, ranks: int, checkpoint_name: Callable[[str], str],
    projections: tuple[str, str, str],
) -> Marks:  # fmt: skip
    """Replace all linear layers and experts of an MTP layer by marks, in place.

    The draft keeps layers that derive from `nn.Linear` and compute something else.

    Args:
        layer: built on the meta device; the marks have no weights.
        target: transformers' model, whose plan says how layers are cut.
        ranks: number of ranks.
        checkpoint_name: name of a module within `layer` -> its name in checkpoints.
        projections: see `ExpertsSite`.

    Raises:
        UnsupportedModelError: the plan has a style that hosts' layers lack, or cuts a parameter
            that the draft keeps; or experts bound their activations in a way of their own.
        OptionError: heads or features do not divide among the ranks.
    """
    planner = _Planner(target, ranks)
    marks = Marks({}, {})
    for name, module in list(layer.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            style, parts = planner.plan(name, module, layer.get_submodule(parent))
            has_bias = module.bias is not None
            marks.linears[name] = LinearMark(LinearSite(
                len(marks.linears), checkpoint_name(name), module.in_features, module.out_features,
                has_bias, style, parts, is_joint=not name.startswith("block."),
            ))  # fmt: skip
            setattr(layer.get_submodule(parent), leaf, marks.linears[name])
        elif _is_experts(module):
            site = _experts_site(module, len(marks.experts), checkpoint_name(name), projections)
            marks.experts[name] = ExpertsMark(site)
            setattr(layer.get_submodule(parent), leaf, marks.experts[name])
    planner.check_kept([name for name, _ in layer.named_parameters()])
    return marks


class _Planner:
    """Styles of an MTP layer's modules, by transformers' tensor plan."""

    def __init__(self, target: Any, ranks: int):
        self.ranks = ranks
        # The rules of decoder layers hold for the blocks of MTP layers.
        found = (re.fullmatch(r".*\blayers\.\*\.(.+)", rule) for rule in target.tp_plan or {})
        plan = dict(target.tp_plan or {})
        self.rules = {match[1]: plan[match[0]] for match in found if match}

    def plan(self, name: str, linear: nn.Linear, parent: nn.Module) -> tuple[LinearStyle, int]:
        """The style of a linear layer, and the number of parts."""
        leaf = name.rpartition(".")[2]
        if hasattr(parent, "kv_b_proj"):
            style = _LATENT.get(leaf, "replicated")
        else:
            style = self._style(name)
        if style == "replicated" or self.ranks == 1:
            return style, 1
        size = linear.out_features if style == "column" else linear.in_features
        widths = (getattr(parent, width, None) for width in _HEADS.get(leaf, ()))
        head = next((width for width in widths if width), None)
        if head is not None:
            heads = size // head
            if style == "column" and heads < self.ranks and self.ranks % heads == 0:
                return style, heads
            self._divide(heads, "heads", name)
        self._divide(size, "features", name)
        return style, self.ranks

    def check_kept(self, names: list[str]) -> None:
        """Refuse a plan that cuts one of the draft's own parameters."""
        modules = {name: name.rpartition(".")[0] for name in names if self.ranks > 1}
        cut = [n for n, m in modules.items() if {self._style(n), self._style(m)} != {"replicated"}]
        if cut:
            raise UnsupportedModelError(
                f"transformers' plan cuts {cut[0]} among {self.ranks} ranks, and a traced draft "
                "keeps this parameter whole; use the host's own draft"
            )

    def _style(self, name: str) -> LinearStyle:
        rule = self.rules.get(re.sub(r"^block\.(\d+\.)?", "", name), "replicate")
        if rule in _STYLES:
            return _STYLES[rule]
        if self.ranks == 1 or (rule in STYLES and STYLES[rule].kind == "replicated"):
            return "replicated"
        raise UnsupportedModelError(
            f"transformers' plan cuts {name} in the style {rule!r}; hosts' linear layers have the "
            f"styles {', '.join(_STYLES)}: use the host's own draft"
        )

    def _divide(self, count: int, what: str, where: str) -> None:
        if count % self.ranks:
            raise OptionError(
                f"{where} has {count} {what} for {self.ranks} ranks; expected a number of ranks "
                f"that divides {count}"
            )


def _is_experts(module: nn.Module) -> bool:
    """Whether a module holds the stacked projections of all experts, [E, ...]."""
    own = dict(module.named_parameters(recurse=False))
    return "down_proj" in own and all(tensor.dim() == 3 for tensor in own.values())


def _experts_site(
    module: Any, index: int, name: str, projections: tuple[str, str, str]
) -> ExpertsSite:
    """A site whose `top_k` is not known yet."""
    gate = gate_of(module) if any(getattr(module, limit, None) for limit in LIMITS) else Gate()
    if not isinstance(gate, Gate):
        raise UnsupportedModelError(
            f"{name} are experts that bound their activations in a way of their own, which mtpc "
            "does not ask of hosts' experts: use the host's own draft"
        )
    count, hidden, width = module.down_proj.shape
    config = module.config
    names = ("hidden_activation", "hidden_act") if projections[0] else ("mlp_hidden_act",)
    activation = next(filter(None, (getattr(config, name, None) for name in names)))
    return ExpertsSite(
        *(index, name, count, 0, hidden, width, activation, projections),
        limit=gate.limit,
        limit_input=gate.limit_input,
    )

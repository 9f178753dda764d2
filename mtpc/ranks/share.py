"""One rank's part of a model: the part of each weight, and the heads of each cache.

Where no cache keeps steps, a rank is compiled over its part, which it reads from the mapped files:

    headers -> a model without values -> whole weights, placeholders of cut ones -> parts, as passes
    derive them

So it reads the slices that its steps use, and no rank has the whole model in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from mtpc.capture.graph import StepGraph, operators
from mtpc.errors import OptionError, RankError
from mtpc.layout import BufferSpec
from mtpc.models.load import LoadedModel
from mtpc.models.shards import ShardPlan
from mtpc.models.weight_recipes import weight_recipes
from mtpc.ops.attention import HEADS
from mtpc.ops.collectives import is_collective
from mtpc.passes import Pass
from mtpc.passes.shard import CutWeight, Sharding
from mtpc.weights.recipes import Recipe
from mtpc.weights.stored import StoredWeights

if TYPE_CHECKING:
    from mtpc.ranks.group import Ranks


class RankShare:
    """One rank's part of a model, by transformers' tensor plan.

    Args:
        loaded: the model. Its shapes are read, but not its values.
        ranks: this process among those that share it.

    Raises:
        OptionError: heads, features, experts or the vocabulary cannot be divided among the ranks.
        UnsupportedModelError: the model has no plan, or one that mtpc does not know.
    """

    def __init__(self, loaded: LoadedModel, ranks: Ranks):
        self.ranks, self._plan = ranks, ShardPlan(loaded, ranks.size)
        found = {name: self._cut(name, tensor) for name, tensor in loaded.weights().items()}
        self._weights = {name: cut for name, cut in found.items() if cut is not None}

    def _cut(self, name: str, tensor: Tensor) -> CutWeight | None:
        plan, rank, size = self._plan, self.ranks.rank, self.ranks.size
        shard = plan.shard(name, tensor)
        if shard.kind == "replicated":
            return None
        length = tensor.shape[shard.dim]
        step = -(-length // size) if shard.kind == "vocab" else 0
        if step * (size - 1) >= length:
            raise OptionError(
                f"{name} has {length} rows for {size} ranks, {step} each: the last rank would have "
                "none; use a smaller tensor_parallel_size"
            )
        runs = shard.ranges(length, rank, size)
        return CutWeight(shard.dim, runs, step, plan.is_gathered(name))

    @property
    def cut_weights(self) -> frozenset[str]:
        """Names of the weights of which this rank holds a part."""
        return frozenset(self._weights)

    def held(self, name: str, tensor: Tensor) -> int:
        """Elements of this rank's part of a weight."""
        cut = self._weights.get(name)
        if cut is None:
            return tensor.numel()
        held = sum(stop - start for start, stop in cut.runs)
        return tensor.numel() // tensor.shape[cut.dim] * held

    def cuts(self, spec: BufferSpec) -> bool:
        """Whether each rank holds only its own key/value heads of a buffer."""
        return spec.name.startswith("kv.") and self._plan.cuts_cache(spec.name)

    def specs(self, whole: Iterable[BufferSpec]) -> tuple[BufferSpec, ...]:
        """The buffers with this rank's key/value heads."""
        return tuple(self._part(spec) if self.cuts(spec) else spec for spec in whole)

    def _part(self, spec: BufferSpec) -> BufferSpec:
        dims = list(spec.dims)
        dims[HEADS] = int(dims[HEADS]) // self.ranks.size
        return replace(spec, dims=tuple(dims))

    def sharding(self, caches: Mapping[str, Tensor]) -> Sharding:
        """What the pass `shard` needs.

        Args:
            caches: this rank's tensors of the buffers that are cut, by name.
        """
        place = (self.ranks.rank, self.ranks.size, self.ranks.group)
        return Sharding(*place, self._weights, caches, self.ranks.peer_bytes)


def read_part(loaded: LoadedModel, ranks: Ranks, device: str) -> LoadedModel | None:
    """A model with the weights that a rank has whole, and placeholders of those that it cuts.

    A placeholder is NaN, without memory for each of its numbers. So steps are traced as if the
    device had the weight, no two placeholders are equal, and a step that reads one is noticed.
    `LoadedModel.stored` makes the rank's parts.

    Args:
        loaded: from headers, so without values; its modules are changed.
        ranks: this process among those that share the model.
        device: of the weights, as torch names it.

    Returns:
        None if transformers alone can read some weight.

    Raises:
        CheckpointError: a weight that this rank has whole holds NaN or infinity.
        OptionError: as `RankShare`.
        UnsupportedModelError: as `RankShare`.
    """
    assert loaded.checkpoint is not None
    weights, found = loaded.weights(), weight_recipes(loaded)
    if not _others(loaded).issuperset(weights.keys() - found.keys()):
        return None
    stored = {name: recipe for name, recipe in found.items() if recipe is not None}
    parts = StoredWeights(loaded.checkpoint, stored, loaded.ends() & stored.keys())
    cut, made = RankShare(loaded, ranks).cut_weights, dict[Recipe, Tensor]()
    for name, tensor in weights.items():
        if name not in stored:  # A constant of the model's code, or what no step reads.
            tensor.data = tensor.data.to(device)
            continue
        same = parts.over_tensors(name)
        if same not in made:
            whole = _placeholder(tensor, device) if name in cut else parts.make(same)[same]
            made[same] = whole.to(device)
        tensor.data = made[same]
    parts.check()
    return replace(loaded, stored=parts)


def _others(loaded: LoadedModel) -> set[str]:
    """Weights that no step reads: of a multimodal model, those outside of its language model."""
    target = loaded.target
    ends = [target.get_input_embeddings(), target.get_output_embeddings()]
    modules = [target.get_decoder(), *filter(None, ends), *loaded.mtp_layers]
    read = {id(t) for m in modules for t in (*m.parameters(), *m.buffers())}
    return {name for name, tensor in loaded.weights().items() if id(tensor) not in read}


def _placeholder(tensor: Tensor, device: str) -> Tensor:
    one = tensor.new_full((1,) * tensor.dim(), torch.nan, device=device)
    return one.expand(tensor.shape)


_CHOICE = "configs"
"""The argument of a kernel that names its configurations."""


@dataclass(frozen=True)
class AgreeOnCalls(Pass, policy="required"):
    """agree-on-calls: give each call the configuration that rank 0 has chosen for it.

    Every rank runs it on the same steps, bound to kernels and not lowered yet. It counts the calls
    that have another configuration now.

    Attributes:
        ranks: this process among those that share the model.

    Raises:
        RankError: another rank's step makes other exchanges.
    """

    ranks: Ranks

    def apply(self, graph: StepGraph) -> int:
        calls, ranks = dict(_named(graph)), self.ranks
        exchanges = [str(target) for _, target in operators(graph.graph) if is_collective(target)]
        own = {name: node.kwargs.get(_CHOICE, "") for name, node in calls.items()}
        every = ranks.tell_all((exchanges, own))
        for rank, (theirs, _) in enumerate(every):
            for index, (one, other) in enumerate(zip_longest(theirs, exchanges)):
                if one != other:
                    raise RankError(
                        f"{graph.name}: exchange {index} of rank {rank} of {ranks.size} is {one}, "
                        f"and rank {ranks.rank}'s is {other}; ranks would wait for each other for "
                        "ever: give all ranks the same machine, libraries and options"
                    )
        changed = 0
        for name, choice in every[0][1].items():
            if name in own and own[name] != choice:
                node = calls[name]
                node.kwargs = {**node.kwargs, _CHOICE: choice}
                changed += 1
        return changed


def _named(graph: StepGraph) -> Iterator[tuple[tuple[str, int], fx.Node]]:
    """Calls of kernels that have configurations, by name and how often it came before."""
    seen = Counter[str]()
    for node, target in operators(graph.graph):
        schema = getattr(target, "_schema", None)
        if schema is not None and any(one.name == _CHOICE for one in schema.arguments):
            yield (str(target), seen[str(target)]), node
            seen[str(target)] += 1

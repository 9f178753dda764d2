"""One rank's weights from the mapped files of a checkpoint, for steps that no cache keeps.

    headers -> a model without values -> whole weights, placeholders of cut ones -> parts, as passes
    derive them

So a rank reads the slices that its steps use, and no rank has the whole model in memory. Steps of
the graph cache are bound in the same way (`mtpc.program.binding`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mtpc.layout import dtype_name
from mtpc.models.load import LoadedModel
from mtpc.models.weight_recipes import weight_recipes
from mtpc.program.binding import WeightSource
from mtpc.program.rank_share import RankShare
from mtpc.program.ranks import Ranks
from mtpc.weights.packing import fill_packed
from mtpc.weights.recipes import Recipe

_WANTED = "wanted"


@dataclass(frozen=True)
class ModelRecipes:
    """How the weights of a model are made; a `binding.Explains`."""

    stored: Mapping[str, Recipe]
    dtypes: Mapping[str, str]
    ends: tuple[str, ...]
    derived: Mapping[str, Recipe] = field(default_factory=dict)


class PartWeights:
    """The weights of a checkpoint by recipes, read when they are made; an `Elsewhere`.

    Args:
        source: reads the files.
        recipes: of the weights.
    """

    def __init__(self, source: WeightSource, recipes: ModelRecipes):
        self._source, self._recipes = source, recipes

    def __contains__(self, name: object) -> bool:
        return name in self._recipes.stored

    def make(self, recipe: Recipe) -> Tensor:
        """What a recipe makes of weights of the model, in the host's memory or the mapped files."""
        return self._source.weight(_WANTED, replace(self._recipes, derived={_WANTED: recipe}))

    def made_of(self, name: str) -> Hashable:
        """What a weight is made of: the same for equal embeddings and heads."""
        recipe, dtypes = self._source.made_of(name, self._recipes)
        return recipe, *dtypes.items()

    def check(self) -> None:
        """Check what was read so far; see `WeightSource.check`."""
        self._source.check()


def read_part(loaded: LoadedModel, ranks: Ranks, device: str) -> LoadedModel | None:
    """A model with the weights that a rank has whole, and placeholders of those that it cuts.

    A placeholder is NaN, without memory for each of its numbers. So steps are traced as if the
    device had the weight, no two placeholders are equal, and a step that reads one is noticed.
    `LoadedModel.elsewhere` makes the rank's parts.

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
    dtypes = {name: dtype_name(weights[name].dtype) for name in stored}
    recipes = ModelRecipes(stored, dtypes, tuple(sorted(loaded.ends() & stored.keys())))
    parts = PartWeights(WeightSource(loaded.checkpoint, fill_packed), recipes)
    cut, made = RankShare(loaded, ranks).cut_weights, dict[Hashable, Tensor]()
    for name, tensor in weights.items():
        if name not in stored:  # A constant of the model's code, or what no step reads.
            tensor.data = tensor.data.to(device)
            continue
        key = parts.made_of(name)
        if key not in made:
            made[key] = _placeholder(tensor, device) if name in cut else parts.make(name).to(device)
        tensor.data = made[key]
    parts.check()
    return replace(loaded, elsewhere=parts)


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

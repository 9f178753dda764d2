"""What drafters with a checkpoint of their own have in common: the layers of the target that they
read, a vocabulary of their own, and checks that they fit."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.models.caches import CachePool, paged_kv_specs
from mtpc.models.family import ModelFamily, MTPWiring
from mtpc.models.hf import (
    DraftVocabulary,
    HFTarget,
    MTPLayer,
    TextRotary,
    decoder_layers,
    embedding_of,
    norm_after,
)
from mtpc.models.read_config import describing
from mtpc.models.rotary import check_rotary
from mtpc.models.seams import StepContext, use_seams
from mtpc.step.records import Metadata
from mtpc.weights.checkpoint import DRAFT
from mtpc.weights.paired_checkpoint import TOKEN_MAP, PairedCheckpoint

Config = TypeVar("Config", bound="DrafterConfig")


@dataclass(frozen=True)
class DrafterConfig:
    """What config.json of a drafter with layers of its own says.

    Attributes:
        layers: transformers' config of its layers; their attention and caches are mtpc's.
        layer_ids: the target's layers whose inputs are captured, ascending; the number of layers
            stands for the input of the final norm.
        draft_vocab_size: rows of the head.
        target_width: width of a captured row.
    """

    layers: Any
    layer_ids: tuple[int, ...]
    draft_vocab_size: int
    target_width: int

    @property
    def vocab_size(self) -> int:
        return int(self.layers.vocab_size)


class CapturingTarget(HFTarget):
    """The decoder over flat tokens: (ids [T], *metadata) -> features [T, H], captured [T, n H]: the
    inputs of layers `layer_ids`, ascending."""

    def __init__(
        self, layer_ids: tuple[int, ...], decoder: Any, pool: CachePool, wiring: MTPWiring
    ):
        super().__init__(decoder, pool, wiring)
        self.layer_ids, self.captured = layer_ids, list[Tensor]()
        stepped: Any = self.decoder
        own = decoder_layers(stepped)
        layers = list(own)
        for index in layer_ids:
            if index < len(layers):
                layers[index] = self._watched(layers[index])
            else:
                name = norm_after(stepped, own)
                stepped._modules[name] = self._watched(stepped._modules[name])
        name = next(name for name, child in stepped.named_children() if child is own)
        stepped._modules[name] = nn.ModuleList(layers)

    def _watched(self, module: nn.Module) -> nn.Module:
        """A module that shares all of this one, and notes what it is given."""
        watched = copy.copy(module)
        watched._forward_pre_hooks = OrderedDict()
        watched._forward_pre_hooks_with_kwargs = OrderedDict()
        watched.register_forward_pre_hook(self._note, with_kwargs=True)
        return watched

    def _note(self, module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        self.captured.append(args[0] if args else given["hidden_states"])

    def forward(self, ids: Tensor, *metadata: Tensor) -> Any:
        self.captured.clear()
        features = super().forward(ids, *metadata)
        captured = torch.cat([hidden[0] for hidden in self.captured], -1)
        self.captured.clear()
        return features, captured


class KeepingTarget(CapturingTarget):
    """The decoder over flat tokens, which keeps the captured rows in the pool's layer `index`."""

    def __init__(self, index: int, layer_ids: tuple[int, ...], *given: Any):
        super().__init__(layer_ids, *given)
        self.index = index

    def forward(self, ids: Tensor, *metadata: Tensor) -> Tensor:
        features, captured = super().forward(ids, *metadata)
        self.pool.layers()[self.index].write(captured, Metadata(*metadata))
        kept: Tensor = features
        return kept


class DrafterLayer(MTPLayer):
    """A drafter with a checkpoint of its own, in place of an MTP layer.

    It has `projection` (fc), norms and `rotary`, of transformers' classes, and what is its `own` of
    "embedding", "head" and "d2t"; the rest is None. d2t, int64 [V_d], is what to add to a row of
    the head for its token id.
    """

    d2t: Tensor | None

    def __init__(
        self,
        wiring: MTPWiring,
        config: DrafterConfig,
        own: Collection[str],
        norm: Callable[..., nn.Module],
        rotary: Callable[[Any], nn.Module],
    ):
        nn.Module.__init__(self)
        self.wiring, self.config, layers = wiring, config, config.layers
        hidden, rows, eps = layers.hidden_size, config.draft_vocab_size, layers.rms_norm_eps
        captured = len(config.layer_ids) * config.target_width
        self.projection = nn.Linear(captured, hidden, bias=False)
        self.hidden_norm, self.final_norm = norm(hidden, eps=eps), norm(hidden, eps=eps)
        with torch.device("cpu"):  # Frequencies are computed, not read.
            self.rotary = rotary(layers)
        self.embedding = nn.Embedding(config.vocab_size, hidden) if "embedding" in own else None
        self.head = nn.Linear(hidden, rows, bias=False) if "head" in own else None
        offsets = torch.zeros(rows, dtype=torch.int64) if TOKEN_MAP in own else None
        self.register_buffer(TOKEN_MAP, offsets)


class DrafterPass(nn.Module):
    """A pass of a drafter over flat tokens; it has no use for the target's `rotary`."""

    def __init__(self, decoder: Any, rotary: TextRotary, layer: Any, pool: CachePool):
        super().__init__()
        self.embedding, self.layer, self.pool = embedding_of(decoder, layer), layer, pool

    def context(self, metadata: tuple[Tensor, ...]) -> StepContext:
        """The metadata of the rows, and the pool's layers."""
        return StepContext.of(metadata, self.pool.layers())


class TokenIds(nn.Module):
    """Rows of a head [R] -> the token ids that they stand for [R]."""

    offsets: Tensor

    def __init__(self, offsets: Tensor):
        super().__init__()
        self.register_buffer("offsets", offsets)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.offsets[rows]


class WholeLogits(nn.Module):
    """Logits of a head [R, V_d] -> of the whole vocabulary [R, V]: -inf where it has no row."""

    offsets: Tensor

    def __init__(self, offsets: Tensor, vocab_size: int):
        super().__init__()
        self.register_buffer("offsets", offsets)
        self.vocab_size = vocab_size

    def forward(self, logits: Tensor) -> Tensor:
        ids = self.offsets + torch.arange(self.offsets.shape[0], device=logits.device)
        whole = logits.new_full((logits.shape[0], self.vocab_size), float("-inf"))
        return whole.index_copy(1, ids, logits)


def draft_vocabulary(layer: Any) -> DraftVocabulary | None:
    """The vocabulary of a drafter by its `d2t`; None: the target's."""
    if layer.d2t is None:
        return None
    size = layer.config.vocab_size
    return DraftVocabulary(TokenIds(layer.d2t), WholeLogits(layer.d2t, size))


@dataclass(frozen=True)
class Pairing:
    """A target, with its config of the language model, and the drafter of its checkpoint, which
    must fit each other."""

    family: ModelFamily
    checkpoint: PairedCheckpoint
    target: Any

    @property
    def where(self) -> Path:
        """The drafter's directory, for messages."""
        return self.checkpoint.draft.directory

    @property
    def entries(self) -> dict[str, Any]:
        """Entries of the drafter's config.json; speculators nests those of its layers."""
        given = self.checkpoint.draft.config
        return {**given, **(given.get("transformer_layer_config") or {})}

    def read_layers(self, kind: Any, entries: Mapping[str, Any], what: str) -> tuple[Any, int, int]:
        """The config of a drafter's layers, rows of its head, and the width of a captured row.
        `kind` is transformers' class of the config; messages say what the drafter is.

        Raises:
            CheckpointError: the drafter was made for a target of other sizes, or lacks the map of
                its vocabulary.
            UnsupportedModelError: the target has not one residual stream.
        """
        if self.family.parts is not None:
            raise UnsupportedModelError(
                f"{self.where} is {what}, and {self.family.name} has no residual stream of one row "
                "that it could be fed; expected another target"
            )
        config = kind(**describing(entries))
        use_seams(config)
        check_rotary(config, self.where)
        width = entries.get("target_hidden_size") or config.hidden_size
        for name, found, expected in (
            ("vocab_size", config.vocab_size, self.target.vocab_size),
            ("target_hidden_size or hidden_size", width, self.target.hidden_size),
        ):
            if found != expected:
                raise CheckpointError(
                    f"{self.where}: {name} is {found}, and the target's is {expected}; use {what} "
                    "that was trained for this target"
                )
        rows = entries.get("draft_vocab_size") or config.vocab_size
        if rows != config.vocab_size and TOKEN_MAP not in self.checkpoint.draft.tensors:
            raise CheckpointError(
                f"{self.where} lacks {TOKEN_MAP}, which says what tokens the {rows} rows of its "
                f"head stand for (vocab_size is {config.vocab_size}); download or export the head "
                "again"
            )
        return config, rows, width

    @property
    def num_layers(self) -> int:
        return self.family.num_layers(self.target)

    def check_layer_ids(self, ids: Any, entry: str) -> tuple[int, ...]:
        """Layers whose inputs are captured, ascending, as an entry of config.json has them; their
        number stands for the final norm.

        Raises:
            CheckpointError: they are no different layers of the target.
        """
        found, layers = tuple(sorted(set(ids))), self.num_layers
        if not ids or len(found) != len(ids) or not 0 <= found[0] <= found[-1] <= layers:
            raise CheckpointError(
                f"{self.where}: the layers to capture are {ids}; expected different ones of the "
                f"target's {layers}; set {entry} in its config.json"
            )
        return found

    def check_mask(self, given: Any) -> int:
        """The mask's token of a drafter.

        Raises:
            CheckpointError: it is no token.
        """
        size = self.target.vocab_size
        if type(given) is not int or not 0 <= given < size:
            raise CheckpointError(
                f"{self.where}: mask_token_id is {given}; expected one of the {size} token ids, by "
                "which rows of a block are embedded: download the drafter again"
            )
        return given

    def family_with(
        self,
        config: Config,
        wiring: MTPWiring,
        kind: Callable[[MTPWiring, Config, int, Collection[str]], Any],
        **more: Any,
    ) -> ModelFamily:
        """The target's family with a drafter whose layers have pages of keys and values. `kind`
        makes it: (wiring, config, layer index, what it has of its own) -> the drafter. `more` are
        further fields.

        Raises:
            CheckpointError: the drafter lacks an embedding or a head that the target's cannot stand
                for.
        """
        family, layers = self.family, config.layers
        # The target's embedding and head stand for those that a drafter lacks, if they fit.
        same_width = config.layers.hidden_size == self.target.hidden_size
        fits = {
            "embed_tokens.weight": same_width,
            "lm_head.weight": same_width and config.draft_vocab_size == self.target.vocab_size,
        }
        stored = self.checkpoint.draft.tensors
        lacking = [name for name, fit in fits.items() if name not in stored and not fit]
        if lacking:
            raise CheckpointError(
                f"{self.where} lacks {', '.join(lacking)}, and the target's is of another shape; "
                "download or export the head again"
            )
        mapped = {TOKEN_MAP} & set(self.checkpoint.draft.tensors)

        def cache_specs(of: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
            if layer < of.num_hidden_layers:
                return family.cache_specs(of, layer, dtype)
            caches = range(layer, layer + layers.num_hidden_layers)
            return tuple(spec for i in caches for spec in paged_kv_specs(layers, i, dtype))

        return replace(
            family,
            wiring=wiring,
            num_mtp_layers=lambda of: 1,
            layer_prefix=lambda layers, index: DRAFT,
            cache_specs=cache_specs,
            make_layer=lambda wiring, index, own: kind(wiring, config, index, {*own, *mapped}),
            shared_tensors={"embed_tokens.weight": "embedding", "lm_head.weight": "head"},
            **more,
        )

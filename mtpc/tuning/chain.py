"""The drafts of every position of whole texts in one forward, with gradients.

The MTP layers are the modules that a step runs. Only caches and experts differ, because a step's
operators have no gradients. Draft d of row t depends on the text's tokens up to t + d + 1, as in a
step that accepts all drafts before it. A draft after a rejected one is never used, so training
needs no other drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface

from mtpc.backends.cpu_kernels.levels import chosen_level
from mtpc.errors import UnsupportedModelError
from mtpc.models.eagle3 import Eagle3Layer
from mtpc.models.family import ModelFamily
from mtpc.models.heads import final_norm_of, head_of
from mtpc.models.hf import TextRotary, embedding_of, rotary_of, run_mtp_layer, target_norm
from mtpc.models.load import LoadedModel, drafted, family_of, read_target
from mtpc.models.mtp_layers import load_mtp_layers
from mtpc.models.place import place
from mtpc.models.seams import share_model
from mtpc.store.machine import cpu_flags
from mtpc.tuning.products import ROUNDED_EXPERTS, rounded_experts
from mtpc.weights.checkpoint import Checkpoint
from mtpc.wiring import Rules


class DraftRows:
    """Replaces the cache of one MTP layer: keeps its keys and values, one block per draft.

    The first block holds all rows of the texts. Each later block holds the rows of one more draft
    of the chain: row t of block j is at position t + j, and only row t of later blocks attends to
    it.

    The layer's rows are those of B texts, one text after the other.
    """

    def __init__(self, texts: int):
        self._texts = texts
        self._blocks: list[tuple[Tensor, Tensor]] = []

    def write(self, first: Tensor, second: Tensor, metadata: Any) -> None:
        """Add a block with keys (`first`) and values (`second`), each [1, H_kv, B * L, D]."""
        self._blocks.append((self._by_text(first), self._by_text(second)))

    def attend(
        self, module: Any, query: Tensor, scale: float, metadata: Any, **options: Any
    ) -> Tensor:
        """Attend with the queries of the newest block, [1, N, B * L, D].

        The options are those of `mtpc::paged_attention`. Returns [1, B * L, N, D_v].
        """
        query = self._by_text(query) * scale
        pairs = [self._heads(module, pair, query.shape[1]) for pair in self._blocks]
        window, softcap = options.get("sliding_window") or 0, options.get("softcap") or 0.0
        (keys, values), chained = pairs[0], pairs[1:]
        length, last = query.shape[2], len(chained)
        first = query @ keys.transpose(2, 3)
        own = [wide(query * k[:, :, :length]).sum(-1, keepdim=True) for k, _ in chained]
        scores = torch.cat([first, *own], -1) if own else wide(first)  # cat widens.
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        # The gradient of a sum takes no pass over the scores.
        scores = scores + self._hidden(scores, length, last, window)
        sinks = options.get("s_aux")
        if sinks is not None:
            logits = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, logits], -1)
        weights = scores.softmax(-1).to(values.dtype)
        out = weights[..., : keys.shape[2]] @ values
        for column, (_, v) in enumerate(chained, keys.shape[2]):
            out = out + weights[..., column : column + 1] * v[:, :, :length]
        return out.transpose(1, 2).flatten(0, 1)[None]

    def _heads(self, module: Any, pair: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, Tensor]:
        """Keys and values of each query head, [B, N, L, D]."""
        keys, values = (x.repeat_interleave(heads // x.shape[1], 1) for x in pair)
        return keys, values

    def _by_text(self, rows: Tensor) -> Tensor:
        """[1, H, B * L, D] -> [B, H, L, D]."""
        return rows[0].unflatten(1, (self._texts, -1)).transpose(0, 1)

    @staticmethod
    def _hidden(scores: Tensor, length: int, last: int, window: int) -> Tensor:
        """[L, L_0 + last]: -inf for what a row of block `last` does not attend to, or 0."""
        row = torch.arange(length, device=scores.device)[:, None]
        key = torch.arange(scores.shape[-1] - last, device=scores.device)[None]
        block = torch.arange(1, last + 1, device=scores.device)[None].expand(length, -1)
        back = torch.cat([row + last - key, last - block], 1)
        visible = torch.cat([key <= row, block > 0], 1)
        visible = visible & (back < window) if window else visible
        return torch.zeros_like(back, dtype=scores.dtype).masked_fill_(~visible, float("-inf"))


class DraftLatentRows(DraftRows):
    """The same for multi-head latent attention: blocks of latents and rotated keys."""

    def _heads(self, module: Any, pair: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, Tensor]:
        latent, rope = pair
        up = module.kv_b_proj(latent[:, 0]).unflatten(-1, (heads, -1)).transpose(1, 2)
        keys, values = up.tensor_split([module.qk_nope_head_dim], -1)
        return torch.cat([keys, rope.expand(-1, heads, -1, -1)], -1), values


CACHES = {
    frozenset({"k", "v"}): DraftRows,
    frozenset({"ring_k", "ring_v"}): DraftRows,
    frozenset({"latent"}): DraftLatentRows,
}
"""Roles of a layer's cache buffers -> the class that replaces the cache."""


@dataclass
class _Context:
    """Replaces transformers' cache; see `run_mtp_layer`."""

    positions: Tensor
    layers: dict[int, DraftRows]
    ahead: ClassVar[int] = 0

    def update(
        self, first: Tensor, second: Tensor, layer_idx: int, **_: Any
    ) -> tuple[Tensor, Tensor]:
        self.layers[layer_idx].write(first, second, self)
        return first, second


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Teacher:
    """A frozen target, of which a drafter has embedding and head, and from which it begins.

    Args:
        checkpoint: holds the target's tensors.
        dtype: name of the dtype to load the weights in; None keeps the checkpoint's.
        device: the device to run on.

    Attributes:
        family: the target's, before a drafter changes it.
        model: transformers' model.

    Raises:
        CheckpointError: see `mtpc.models.load.read_target`.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str | None = None, device: str = "cpu"):
        self.family, self.device = family_of(checkpoint), torch.device(device)
        self.model = read_target(checkpoint, self.family, dtype).eval().requires_grad_(False)
        self.family.as_decoded(self.model)
        self.model.to(self.device)

    @property
    def text_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)


class TrainedModel:
    """A drafter with gradients: MTP layers, or an EAGLE-3 head.

    Args:
        checkpoint: the target's, or a `PairedCheckpoint` with the drafter's.
        spec_tokens: K.
        teacher: the frozen target.
        wiring: rules that replace those of the family.
        vocabulary: ascending ids of the tokens that drafts may be, [V_d]; None: all. A head with a
            vocabulary of its own keeps that.

    Attributes:
        loaded: target and drafter, with transformers' own experts.
        count: K.
        vocabulary: int64 [V_d], the tokens that the rows of the head stand for.
        trained: the trained tensors by name: the layer's index, a dot, and the name in `MTPLayer`.
            Embeddings and heads whose rows are the target's are not trained.

    Raises:
        UnsupportedModelError: the family's layers have no gradient here.
        CheckpointError: see `mtpc.models.load.load`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec_tokens: int,
        teacher: Teacher,
        wiring: Rules = (),
        vocabulary: Tensor | None = None,
    ):
        family = drafted(teacher.family, checkpoint).wired(wiring)
        self._cache = cache_kind(family, teacher.text_config)
        target: Any = share_model(teacher.model, {})
        ExpertsInterface.register(ROUNDED_EXPERTS, rounded_experts)
        for part in (target.config, target.config.get_text_config(decoder=True)):
            part._experts_implementation = ROUNDED_EXPERTS
        layers = load_mtp_layers(checkpoint, replace(family, canonical={}), target)
        loaded = LoadedModel(family, target, layers, (), str(checkpoint.directory), None, True)
        self.loaded = place(loaded.with_layers(spec_tokens), str(teacher.device))
        self.count, self._device = spec_tokens, teacher.device
        has_halves = self.loaded.dtype.itemsize == 2
        # Processors without AMX are of two kinds: on Intel's, products of the demo model's head
        # take 1.7 times as long in bfloat16.
        self._halves = has_halves and (
            self._device.type != "cpu" or "avx512bf16" in chosen_level(cpu_flags()).extensions
        )
        self.trained = self._trained()
        self._rotaries = [
            TextRotary(
                rotary_of(target.get_decoder()),
                family.position_grids,
                family.rotary_type(self.loaded.config, index),
            )
            for index in range(len(self.loaded.mtp_layers))
        ]
        self._choose_rows(vocabulary)

    def _trained(self) -> dict[str, Tensor]:
        """The tensors to train, in the dtype of products."""
        target = self.loaded.target
        ends = (target.get_input_embeddings(), target.get_output_embeddings())
        copies = {end.weight.data_ptr() for end in ends}
        kept = "head.weight" if self.loaded.has_draft_vocabulary else ""
        trained: dict[str, Tensor] = {
            f"{index}.{name}": parameter
            for index, layer in enumerate(self.loaded.mtp_layers)
            for name, parameter in layer.named_parameters()
            if parameter.data_ptr() not in copies and name != kept
        }
        for layer in self.loaded.mtp_layers:
            layer.requires_grad_(False)
        for parameter in trained.values():
            is_half = parameter.dtype.itemsize == 2  # Some are in float32 on purpose.
            parameter.data = self._as_fed(parameter.data) if is_half else wide(parameter.data)
            parameter.requires_grad_(True)
        return trained

    def _choose_rows(self, vocabulary: Tensor | None) -> None:
        """Set `vocabulary`, and the frozen rows of each layer's head, in the dtype of products."""
        size, rows = self.loaded.vocab_size, vocabulary
        own = self.loaded.mtp_layers[0]
        if isinstance(own, Eagle3Layer):
            offsets = 0 if own.d2t is None else own.d2t
            self.vocabulary = offsets + torch.arange(own.config.draft_vocab_size)
            rows = None
        else:
            self.vocabulary = torch.arange(size) if rows is None else rows
        self.places = torch.full((size,), -1)
        self.places[self.vocabulary] = torch.arange(len(self.vocabulary))
        self._rows = None if rows is None or len(rows) == size else rows.to(self._device)
        self._heads: list[Tensor | None] = []
        for layer in self.loaded.mtp_layers:
            weight: Any = head_of(self.loaded.target, layer).weight
            frozen = None if weight.requires_grad else self._as_fed(self._chosen(weight))
            self._heads.append(frozen)

    def _chosen(self, weight: Tensor) -> Tensor:
        return weight if self._rows is None else weight[self._rows]

    def draft_states(self, ids: Tensor, fed: Tensor) -> Iterator[Tensor]:
        """The features of the K drafts, one draft after the other.

        Args:
            ids: int64 [B, L].
            fed: [B, L, F], inputs of the target's layers: of those that an EAGLE-3 head reads, or
                of the final norm.

        Yields:
            [B, L - 1 - d, H] for draft d; row t drafts token t + d + 2.
        """
        ids, last = ids.to(self._device), len(self.loaded.mtp_layers) - 1
        length = ids.shape[1]
        first = fed = self._entered(fed.to(self._device))
        for depth in range(self.count):
            index = min(depth, last)
            if depth <= last:
                cache = self._cache(len(ids))
                if self.loaded.family.wiring.chaining == "target":
                    fed = first
            rows = length - 1 - depth
            fed = self._run(index, ids[:, depth + 1 :], fed[:, :rows], depth - index, cache)
            yield fed

    def _entered(self, fed: Tensor) -> Tensor:
        """What the first draft is fed, of what is kept of the target."""
        entry, decoder = self.loaded.parts.draft_entry, self.loaded.target.get_decoder()
        if entry is not None:
            return self._as_fed(entry(self.loaded.mtp_layers[0])(self._as_fed(fed)))
        if self.loaded.family.wiring.first_features == "after":
            fed = target_norm(decoder)(fed)
        return self._as_fed(fed)

    def _run(self, index: int, ids: Tensor, fed: Tensor, chained: int, cache: DraftRows) -> Tensor:
        """Run one layer over rows [B, L]; row t is at position t + `chained`."""
        layer, decoder = self.loaded.mtp_layers[index], self.loaded.target.get_decoder()
        positions = (torch.arange(ids.shape[1], device=ids.device) + chained).repeat(len(ids))
        number = self.loaded.config.num_hidden_layers + index
        context: Any = _Context(positions, {number: cache})
        embedding = self._as_fed(embedding_of(decoder, layer)(ids.flatten()))
        fed = self._as_fed(fed.flatten(0, 1))
        if isinstance(layer, Eagle3Layer):
            hidden = layer.run(embedding, fed, context)
        else:
            hidden, _ = run_mtp_layer(layer, self._rotaries[index], embedding, fed, context)
        if layer.wiring.next_features == "after":
            hidden = final_norm_of(decoder, layer)(hidden)
        return hidden.unflatten(0, ids.shape)

    def _as_fed(self, x: Tensor) -> Tensor:
        """What layers and heads multiply: in bfloat16 where that is faster, or in float32."""
        return x.to(torch.bfloat16) if self._halves else wide(x)

    def head_rows(self, depth: int, states: Tensor) -> tuple[Tensor, Tensor]:
        """What makes logits of draft `depth`: rows [..., H] of its features, and the head [V_d, H].

        Row i of the head is of token `vocabulary[i]`.
        """
        index = min(depth, len(self.loaded.mtp_layers) - 1)
        layer, head = self.loaded.mtp_layers[index], self._heads[index]
        if layer.wiring.next_features == "before":
            norm = final_norm_of(self.loaded.target.get_decoder(), layer)
            states = self._as_fed(norm(states))
        if head is None:
            weight: Any = head_of(self.loaded.target, layer).weight
            head = self._chosen(weight)
        return states, head


def cache_kind(family: ModelFamily, config: Any) -> type[DraftRows]:
    """What replaces the cache of an MTP layer.

    Raises:
        UnsupportedModelError: the family's layers have no gradient here.
    """
    if family.parts is not None and family.parts.draft_entry is None:
        reason = "its MTP layer is fed residual streams"
    else:
        specs = family.cache_specs(config, config.num_hidden_layers, torch.float32)
        roles = frozenset(spec.name.rpartition(".")[2] for spec in specs)
        if roles in CACHES:
            return CACHES[roles]
        reason = "its MTP layer attends by an indexer"
    raise UnsupportedModelError(
        f"training has no gradient for {family.name}: {reason}; expected a family whose MTP "
        "layers attend to all positions of their cache or window: docs/evaluation.md lists them"
    )

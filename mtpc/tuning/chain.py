"""The drafts of every position of whole texts in one forward, with gradients.

The MTP layers are the modules that a step runs. Only caches and experts differ, because a step's
operators have no gradients. Draft d of row t depends on the text's tokens up to t + d + 1, as in a
step that accepts all drafts before it. A draft after a rejected one is never used, so training
needs no other drafts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface

from mtpc.backends.cpu_kernels.levels import chosen_level
from mtpc.errors import UnsupportedModelError
from mtpc.models.heads import draft_head, final_norm_of, target_head
from mtpc.models.hf import TextRotary, embedding_of, rotary_of, run_mtp_layer, stepped_decoder
from mtpc.models.load import LoadedModel, family_of, read_target
from mtpc.models.mtp_layers import load_mtp_layers
from mtpc.models.place import place
from mtpc.models.seams import share_model
from mtpc.store.machine import cpu_flags
from mtpc.tuning.experts import ROUNDED_EXPERTS, rounded_experts
from mtpc.weights.checkpoint import Checkpoint
from mtpc.wiring import Rules


class DraftRows:
    """Replaces the cache of one MTP layer: keeps its keys and values, one block per draft.

    The first block holds all rows of the texts. Each later block holds the rows of one more draft
    of the chain: row t of block j is at position t + j, and only row t of later blocks attends to
    it.

    Args:
        texts: B. The layer's rows are those of B texts, one text after the other.
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
        query = self._by_text(query)
        pairs = [self._heads(module, pair, query.shape[1]) for pair in self._blocks]
        window, softcap = options.get("sliding_window") or 0, options.get("softcap") or 0.0
        (keys, values), chained = pairs[0], pairs[1:]
        length, last = query.shape[2], len(chained)
        first = query @ keys.transpose(2, 3)
        own = [(query * k[:, :, :length]).sum(-1, keepdim=True) for k, _ in chained]
        scores = _wide(torch.cat([first, *own], -1)) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~self._visible(scores, length, last, window), float("-inf"))
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
    def _visible(scores: Tensor, length: int, last: int, window: int) -> Tensor:
        """bool [L, L_0 + last]: what the rows of block `last` attend to."""
        row = torch.arange(length, device=scores.device)[:, None]
        key = torch.arange(scores.shape[-1] - last, device=scores.device)[None]
        block = torch.arange(1, last + 1, device=scores.device)[None].expand(length, -1)
        back = torch.cat([row + last - key, last - block], 1)
        visible = torch.cat([key <= row, block > 0], 1)
        return visible & (back < window) if window else visible


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

    def update(
        self, first: Tensor, second: Tensor, layer_idx: int, **_: Any
    ) -> tuple[Tensor, Tensor]:
        self.layers[layer_idx].write(first, second, self)
        return first, second


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class TrainedModel:
    """A frozen target, and its MTP layers with gradients.

    Args:
        checkpoint: holds the tensors.
        spec_tokens: K.
        dtype: name of the dtype to load the weights in; None keeps the checkpoint's. Trained
            tensors are at least float32.
        wiring: rules that replace those of the family.
        device: the device to train on.

    Attributes:
        loaded: target and MTP layers, with transformers' own experts.
        count: K.
        trained: the trained tensors by name: the layer's index, a dot, and the name in `MTPLayer`.
            Embeddings and heads that are copies of the target's are not trained.

    Raises:
        UnsupportedModelError: the family's layers have no gradient here.
        CheckpointError: see `mtpc.models.load.load`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec_tokens: int,
        dtype: str | None = None,
        wiring: Rules = (),
        device: str = "cpu",
    ):
        family = family_of(checkpoint).wired(wiring)
        if family.parts is not None:
            raise _no_gradient(family.name, "its MTP layer is fed residual streams")
        self._model = read_target(checkpoint, family, dtype).eval().requires_grad_(False)
        family.as_decoded(self._model)
        target: Any = share_model(self._model, {})
        ExpertsInterface.register(ROUNDED_EXPERTS, rounded_experts)
        for part in (target.config, target.config.get_text_config(decoder=True)):
            part._experts_implementation = ROUNDED_EXPERTS
        layers = load_mtp_layers(checkpoint, replace(family, canonical={}), target)
        loaded = LoadedModel(family, target, layers, (), str(checkpoint.directory), None, True)
        self.loaded = place(loaded.with_layers(spec_tokens), device)
        self._model.to(device)
        self.count, self._device = spec_tokens, torch.device(device)
        self._cache = self._cache_kind()
        target = self.loaded.target
        ends = (target.get_input_embeddings(), target.get_output_embeddings())
        copies = {end.weight.data_ptr() for end in ends}
        self.trained = {
            f"{index}.{name}": parameter
            for index, layer in enumerate(self.loaded.mtp_layers)
            for name, parameter in layer.named_parameters()
            if parameter.data_ptr() not in copies
        }
        for parameter in self.trained.values():
            parameter.data = _wide(parameter.data)
            parameter.requires_grad_(True)
        has_halves = self.loaded.dtype.itemsize == 2
        self._halves = has_halves and _multiplies_halves(self._device)
        if has_halves and not self._halves:
            self._widen_heads(target)
        family, rotary = self.loaded.family, rotary_of(target.get_decoder())
        self._rotaries = [
            TextRotary(rotary, family.position_grids, family.rotary_type(self.loaded.config, index))
            for index in range(len(self.loaded.mtp_layers))
        ]
        decoder = self._model.get_decoder()
        self._decoder = stepped_decoder(decoder, self.loaded.family.wiring)
        self._head = target_head(target, self.loaded.family.wiring)

    def _widen_heads(self, target: Any) -> None:
        """Give the copies of the target's head weights in float32; the target's own stays."""
        head = target.get_output_embeddings()
        wide = copy.deepcopy(head).float()
        target.set_output_embeddings(wide)
        for layer in self.loaded.mtp_layers:
            if layer.head is not None and layer.head.weight.data_ptr() == head.weight.data_ptr():
                layer.head = wide

    def _cache_kind(self) -> type[DraftRows]:
        loaded = self.loaded
        layer = loaded.config.num_hidden_layers
        specs = loaded.family.cache_specs(loaded.config, layer, loaded.dtype)
        roles = frozenset(spec.name.rpartition(".")[2] for spec in specs)
        if roles not in CACHES:
            raise _no_gradient(loaded.family.name, "its MTP layer attends by an indexer")
        return CACHES[roles]

    def mixed(self) -> Any:
        """An autocast context: matrix products of 16 bits, where that is faster."""
        dtype = self.loaded.dtype if self._halves else None
        return torch.autocast(self._device.type, dtype, self._halves)

    @torch.no_grad()
    def features(self, ids: Tensor) -> Tensor:
        """The target's features, which the MTP layers are fed: token ids [B, L] -> [B, L, H]."""
        out = self._decoder(input_ids=ids.to(self._device), use_cache=False)
        return out.last_hidden_state

    @torch.no_grad()
    def target_logits(self, features: Tensor) -> Tensor:
        """Logits of the target's features, [..., H] -> [..., V]."""
        return self._head(self._as_fed(features))

    def draft_states(self, ids: Tensor, features: Tensor) -> Iterator[Tensor]:
        """The features of the K drafts, one draft after the other.

        Args:
            ids: int64 [B, L].
            features: [B, L, H], the target's.

        Yields:
            [B, L - 1 - d, H] for draft d; row t drafts token t + d + 2.
        """
        ids = ids.to(self._device)
        length, last, fed = ids.shape[1], len(self.loaded.mtp_layers) - 1, features
        for depth in range(self.count):
            index = min(depth, last)
            if depth <= last:
                cache = self._cache(len(ids))
                if self.loaded.family.wiring.chaining == "target":
                    fed = features
            rows = length - 1 - depth
            fed = self._run(index, ids[:, depth + 1 :], fed[:, :rows], depth - index, cache)
            yield fed

    def _run(self, index: int, ids: Tensor, fed: Tensor, chained: int, cache: DraftRows) -> Tensor:
        """Run one MTP layer over rows [B, L]; row t is at position t + `chained`."""
        layer, decoder = self.loaded.mtp_layers[index], self.loaded.target.get_decoder()
        positions = torch.arange(ids.shape[1], device=ids.device) + chained
        number = self.loaded.config.num_hidden_layers + index
        context = _Context(positions.repeat(len(ids)), {number: cache})
        embedding = self._as_fed(embedding_of(decoder, layer)(ids.flatten()))
        fed = self._as_fed(fed.flatten(0, 1))
        hidden, _ = run_mtp_layer(layer, self._rotaries[index], embedding, fed, context)
        if layer.wiring.next_features == "after":
            hidden = final_norm_of(decoder, layer)(hidden)
        return hidden.unflatten(0, ids.shape)

    def _as_fed(self, x: Tensor) -> Tensor:
        """What layers and heads multiply: in float32, unless products are of 16 bits."""
        return x if self._halves else _wide(x)

    def draft_logits(self, depth: int, states: Tensor) -> Tensor:
        """Logits of draft `depth` from its features, [..., H] -> [..., V]."""
        layer = self.loaded.mtp_layers[min(depth, len(self.loaded.mtp_layers) - 1)]
        return draft_head(self.loaded.target, layer)(states)


def _multiplies_halves(device: torch.device) -> bool:
    """Whether a device multiplies 16 bits faster than 32. Processors without AMX are of two kinds:
    on Intel's, products of the demo model's head take 1.7 times as long in bfloat16."""
    return device.type != "cpu" or "avx512bf16" in chosen_level(cpu_flags()).extensions


def _no_gradient(family: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"mtpc tune-head has no gradient for {family}: {reason}; expected a family whose MTP "
        "layers attend to all positions of their cache or window: docs/evaluation.md lists them"
    )

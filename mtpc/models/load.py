"""From what the user passes (a model object or a directory) to a `LoadedModel` ready to step."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mtpc.errors import CheckpointError, OptionError, UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.layout.buffers import chain_specs
from mtpc.models import FAMILIES, ModelFamily
from mtpc.models.caches import CachePool
from mtpc.models.hf import (
    MTPLayer,
    StepParts,
    TextRotary,
    model_class,
    share_model,
    stand_in,
)
from mtpc.models.mtp_layers import load_mtp_layer
from mtpc.weights.checkpoint import (
    Checkpoint,
    as_ids,
    check_finite,
    check_repeated,
    checkpoint_of,
    listing,
)
from mtpc.weights.served_model import ServedModel


@dataclass(frozen=True)
class LoadedModel:
    """A target that shares the user's tensors, its MTP layers, and what goes with them.

    `owned`: it was read from a directory, so that nobody else holds its tensors.
    """

    family: ModelFamily
    target: Any
    mtp_layers: tuple[MTPLayer, ...]
    stop_ids: tuple[int, ...]
    source: str
    checkpoint: Checkpoint | None
    owned: bool = False

    @property
    def config(self) -> Any:
        """The language model's, also where transformers nests it in a multimodal one's."""
        return self.target.config.get_text_config(decoder=True)

    @property
    def dtype(self) -> torch.dtype:
        return self.target.get_input_embeddings().weight.dtype

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.target.get_input_embeddings().weight.shape[0]

    def served(self) -> ServedModel:
        """What serving it takes, without the model."""
        directory = self.checkpoint.directory if self.checkpoint else None
        return ServedModel(self.source, self.vocab_size, self.stop_ids, directory)

    def with_layers(self, count: int) -> LoadedModel:
        """This model with its first `count` MTP layers: more are not used, and need no state."""
        return replace(self, mtp_layers=self.mtp_layers[:count])

    @property
    def chain_window(self) -> int:
        """Rows before a step's own that the MTP layers compute again; see `mtpc.step.chaining`."""
        return max(len(self.mtp_layers) - 1, 0)

    def state_specs(self) -> tuple[BufferSpec, ...]:
        """Buffers of the target's layers, of the MTP layers', and of their chain."""
        count = self.config.num_hidden_layers + len(self.mtp_layers)
        caches = (
            spec
            for layer in range(count)
            for spec in self.family.cache_specs(self.config, layer, self.dtype)
        )
        chain = chain_specs(self.chain_window, (self.config.hidden_size,), self.dtype)
        return (*caches, *chain)

    def weights(self) -> dict[str, Tensor]:
        """All parameters and constant buffers by name; tensors tied together appear once."""
        roots = [("", self.target), *((f"mtp.{i}.", m) for i, m in enumerate(self.mtp_layers))]
        named: dict[int, tuple[str, Tensor]] = {}
        for prefix, module in roots:
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                named.setdefault(id(tensor), (prefix + name, tensor))
        return dict(named.values())


class SteppedModel:
    """A `LoadedModel` on given page pools, in the form that a step wants: a `StepModel`."""

    def __init__(self, loaded: LoadedModel, pools: Mapping[str, Tensor], num_slots: int):
        pool = CachePool(pools, num_slots)
        family, target = loaded.family, loaded.target
        parts, decoder = family.parts or StepParts(), target.get_decoder()
        self.target: nn.Module = parts.target(decoder, pool)
        self.target_head: nn.Module = parts.target_head(target)
        kinds = [family.rotary_type(loaded.config, i) for i in range(len(loaded.mtp_layers))]
        self.drafts = nn.ModuleList(
            parts.draft(
                decoder, TextRotary(decoder.rotary_emb, family.position_grids, kind), layer, pool
            )
            for kind, layer in zip(kinds, loaded.mtp_layers, strict=True)
        )
        self.draft_heads = nn.ModuleList(
            parts.draft_head(target, layer, self.target_head) for layer in loaded.mtp_layers
        )
        self.vocab_size = loaded.vocab_size

    def draft_index(self, step: int) -> int:
        """MTP layer that draft step `step` uses; beyond their number, the last is recycled."""
        return min(step, len(self.drafts) - 1)


def load(source: Any, dtype: str | None, needs_mtp: bool) -> LoadedModel:
    """Load a checkpoint directory, or adopt a transformers model object.

    Args:
        source: a directory's path, its `Checkpoint`, or a `PreTrainedModel` (shared, not copied,
            not changed).
        dtype: dtype name for directories; None keeps the checkpoint's.
        needs_mtp: whether MTP layers are required (spec_tokens > 0).

    Raises:
        CheckpointError: see `Checkpoint`, `load_mtp_layer`, `check_finite`.
        UnsupportedModelError: architecture not in `FAMILIES`.
    """
    if isinstance(source, (str, Path)):
        source = Checkpoint(Path(source))
    if isinstance(source, Checkpoint):
        return _load_directory(source, dtype, needs_mtp)
    if isinstance(source, transformers.PreTrainedModel):
        if dtype is not None:
            raise OptionError("dtype applies to directories; a model object keeps its own")
        return _adopt(source, needs_mtp)
    raise OptionError(
        f"cannot compile a {type(source).__name__}; expected a checkpoint directory or a "
        "transformers PreTrainedModel"
    )


def place(loaded: LoadedModel, device: str) -> LoadedModel:
    """The model on a device.

    Raises:
        OptionError: it is a model object of the user's, on another device; it is not moved.
    """
    here, there = loaded.target.get_input_embeddings().weight.device, torch.device(device)
    if here.type == there.type and there.index in (None, here.index):
        return loaded
    if not loaded.owned:
        raise OptionError(
            f"the model object is on {here}; this backend runs on {device}: move it there first, "
            f"model.to({device!r}), or pass the checkpoint's directory"
        )
    for module in (loaded.target, *loaded.mtp_layers):
        module.to(device)
    return loaded


def find_family(architectures: list[str]) -> ModelFamily:
    """The family that serves one of `architectures`."""
    for family in FAMILIES:
        if set(architectures) & set(family.architectures):
            return family
    known = [name for family in FAMILIES for name in family.architectures]
    near = [hit for name in architectures for hit in difflib.get_close_matches(name, known, 1)]
    hint = f" (the nearest is {near[0]})" if near else ""
    raise UnsupportedModelError(
        f"architecture {architectures} is not among those known{hint}: {', '.join(known)}"
    )


def _load_directory(checkpoint: Checkpoint, dtype: str | None, needs_mtp: bool) -> LoadedModel:
    directory = checkpoint.directory
    family = find_family(checkpoint.config.get("architectures") or [])
    config_class = getattr(transformers, family.hf_config_class)
    own = ("model_type", "quantization_config")
    is_nested = "text_config" in getattr(config_class, "sub_configs", {})
    # A copy: transformers takes entries out of nested configs that it is given.
    fields = copy.deepcopy(checkpoint.config if is_nested else checkpoint.text_config)
    config = config_class(**{k: v for k, v in fields.items() if k not in own})
    try:
        with _quiet_transformers():
            model, info = model_class(family).from_pretrained(
                **_weights_for_transformers(checkpoint),
                config=config,
                dtype=getattr(torch, dtype) if dtype else "auto",
                local_files_only=True,
                output_loading_info=True,
            )
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"transformers cannot load {directory}: {error}") from error
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise CheckpointError(
            f"{directory} lacks {len(names)} tensor(s) of the target: {names[:6]}"
        )
    target = _share(model, family, str(directory))
    layers = _load_mtp_layers(checkpoint, family, target) if needs_mtp else ()
    return LoadedModel(
        family, target, layers, checkpoint.stop_ids(), str(directory), checkpoint, True
    )


def _weights_for_transformers(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `from_pretrained` is to read: the files, or, where they hold FP8, what we read there."""
    if not checkpoint.is_block_scaled:
        return {"pretrained_model_name_or_path": checkpoint.directory}
    state = {name: _Unread(checkpoint, name) for name in checkpoint.tensors}
    return {"pretrained_model_name_or_path": None, "state_dict": state}


@dataclass(frozen=True)
class _Unread:
    """A tensor that transformers reads, as it does a file's slice, when its turn comes."""

    checkpoint: Checkpoint
    name: str

    @property
    def dtype(self) -> torch.dtype:
        """Asked for the first tensor only, where config.json names no dtype."""
        return torch.bfloat16

    def is_floating_point(self) -> bool:
        return True

    def __getitem__(self, index: Any) -> Tensor:
        return self.checkpoint.tensor(self.name)[index]


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No report of "unexpected" MTP tensors (we read them ourselves), no second progress bar."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _adopt(model: Any, needs_mtp: bool) -> LoadedModel:
    checkpoint = checkpoint_of(model)
    names = checkpoint.config.get("architectures") if checkpoint else None
    family = find_family(names or [type(model).__name__])
    is_nested = getattr(model.config, "text_config", None) is not None
    if is_nested and type(model).__name__ != family.hf_class:
        raise UnsupportedModelError(
            f"{type(model).__name__} is a multimodal model; expected its text model: load it with "
            f"transformers.{family.hf_class}, or pass the checkpoint's directory"
        )
    if not isinstance(model, model_class(family)):
        raise UnsupportedModelError(
            f"the model is a {type(model).__module__}.{type(model).__name__}; expected "
            f"transformers' {family.hf_class}, whose modules mtpc steps: pass the checkpoint's "
            "directory"
        )
    if checkpoint is None and needs_mtp:
        raise CheckpointError(
            f"the model's name_or_path is {model.name_or_path!r}, which is no local directory: "
            "transformers drops MTP tensors on load, so mtpc reads them from the checkpoint; load "
            "the model from a directory, or use spec_tokens=0"
        )
    source = model.name_or_path or "model object"
    target = _share(model, family, source)
    layers = _load_mtp_layers(checkpoint, family, target) if checkpoint and needs_mtp else ()
    return LoadedModel(family, target, layers, _stop_ids(model), source, checkpoint)


def _share(model: Any, family: ModelFamily, source: str) -> Any:
    """The user's model on mtpc's seams, once its weights are known to be sound."""
    quantised = [n for n, p in model.named_parameters() if p.dtype.itemsize == 1]
    if quantised:
        raise UnsupportedModelError(
            f"{source} holds {len(quantised)} parameter(s) of 8 bits: {listing(quantised)}; "
            "compile the checkpoint's directory instead, which is read as bfloat16"
        )
    check_finite(model.named_parameters(), source)
    return share_model(model, family.canonical)


def _load_mtp_layers(
    checkpoint: Checkpoint, family: ModelFamily, target: Any
) -> tuple[MTPLayer, ...]:
    config = target.config.get_text_config(decoder=True)
    count = _count_mtp_layers(checkpoint, family, config)
    if count == 0:
        raise CheckpointError(
            f"{checkpoint.directory} announces no MTP layers (num_nextn_predict_layers is 0 or "
            "absent); spec_tokens=0 decodes without them"
        )
    prefixes = [family.layer_prefix(config.num_hidden_layers, i) for i in (0, count)]
    if not checkpoint.names(prefixes[0]):
        raise CheckpointError(
            f"{checkpoint.directory} holds no MTP layer: no tensor is named {prefixes[0]}*; "
            f"expected {count}; spec_tokens=0 decodes without them"
        )
    if prefixes[0] == prefixes[1] and count > 1:
        raise UnsupportedModelError(
            f"{checkpoint.directory} has {count} MTP layers; {family.name} is known with one only"
        )
    if count > 1 and family.wiring.stream_head:
        raise UnsupportedModelError(
            f"{checkpoint.directory} has {count} MTP layers that are fed residual streams; "
            "expected one: chains of several are known for features [T, H] only"
        )
    more = checkpoint.names(prefixes[1])
    if more and prefixes[0] != prefixes[1]:
        raise CheckpointError(
            f"{checkpoint.directory} announces {count} MTP layer(s), but stores more: "
            f"{listing(more)}; mend num_nextn_predict_layers in its config.json"
        )
    for name, weight in repeated_tensors(checkpoint, family, target, count).items():
        check_repeated(checkpoint, name, weight)
    layers = tuple(load_mtp_layer(checkpoint, family, target, i) for i in range(count))
    for layer in layers:
        stand_in(layer, family.canonical)
    for index, layer in enumerate(layers):
        check_finite(layer.named_parameters(), f"MTP layer {index} of {checkpoint.directory}")
    return layers


def _count_mtp_layers(checkpoint: Checkpoint, family: ModelFamily, config: Any) -> int:
    """MTP layers that the config announces or, where it is silent, that are stored."""
    count = family.num_mtp_layers(config)
    if count is None:
        count = 0
        while checkpoint.names(family.layer_prefix(config.num_hidden_layers, count)):
            count += 1
        config.num_nextn_predict_layers = count  # A private copy's: blocks are built by it.
    return count


def repeated_tensors(
    checkpoint: Checkpoint, family: ModelFamily, target: Any, count: int
) -> dict[str, Tensor]:
    """Stored tensors of `count` MTP layers that repeat the target's embedding or head."""
    modules = {"embedding": target.get_input_embeddings(), "head": target.get_output_embeddings()}
    layers = target.config.get_text_config(decoder=True).num_hidden_layers
    prefixes = [family.layer_prefix(layers, i) for i in range(count)]
    return {
        prefix + name: modules[role].weight
        for prefix in prefixes
        for name, role in family.shared_tensors.items()
        if prefix + name in checkpoint.tensors
    }


def _stop_ids(model: Any) -> tuple[int, ...]:
    """End-of-sequence ids of a model object: its generation config's, else its config's."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    return as_ids(getattr(model.config, "eos_token_id", None) if ids is None else ids)

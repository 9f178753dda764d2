"""From what the user passes (a model object or a directory) to a `LoadedModel` ready to step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mtpc.checkpoint import Checkpoint, as_ids, check_finite, check_repeated, checkpoint_of
from mtpc.errors import CheckpointError, OptionError, UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.models import FAMILIES, ModelFamily
from mtpc.models.caches import CachePool
from mtpc.models.family import find_norm_class
from mtpc.models.hf import HFDraft, HFTarget, MTPLayer, share_model
from mtpc.models.mtp_layers import load_mtp_layer
from mtpc.serving import ServedModel


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
        return self.target.config

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

    def cache_specs(self) -> tuple[BufferSpec, ...]:
        """State buffers of the target's layers and the MTP layers'."""
        count = self.config.num_hidden_layers + len(self.mtp_layers)
        return tuple(
            spec
            for layer in range(count)
            for spec in self.family.cache_specs(self.config, layer, self.dtype)
        )

    def weights(self) -> dict[str, Tensor]:
        """All parameters and constant buffers by name; tensors tied together appear once."""
        roots = [("", self.target), *((f"mtp.{i}.", m) for i, m in enumerate(self.mtp_layers))]
        named: dict[int, tuple[str, Tensor]] = {}
        for prefix, module in roots:
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                named.setdefault(id(tensor), (prefix + name, tensor))
        return dict(named.values())


class SteppedModel:
    """A `LoadedModel` on given page pools, in the form that `mtpc.step` wants (a `StepModel`)."""

    def __init__(self, loaded: LoadedModel, pools: Mapping[str, Tensor]):
        pool = CachePool(pools)
        decoder, head = loaded.target.get_decoder(), loaded.target.get_output_embeddings()
        embedding = loaded.target.get_input_embeddings()
        self.target: nn.Module = HFTarget(decoder, pool)
        self.target_head: nn.Module = head
        self.drafts = nn.ModuleList(
            HFDraft(embedding, decoder.rotary_emb, layer, pool) for layer in loaded.mtp_layers
        )
        self.draft_heads = nn.ModuleList(head for _ in loaded.mtp_layers)
        self.vocab_size: int = embedding.weight.shape[0]

    def draft_index(self, step: int) -> int:
        """MTP layer that draft step `step` uses: the one there is, recycled."""
        return 0


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
    here = loaded.target.get_input_embeddings().weight.device.type
    if here == torch.device(device).type:
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
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise UnsupportedModelError(f"architecture {architectures} is not among those known: {known}")


def _load_directory(checkpoint: Checkpoint, dtype: str | None, needs_mtp: bool) -> LoadedModel:
    directory = checkpoint.directory
    family = find_family(checkpoint.config.get("architectures") or [])
    config_class = getattr(transformers, family.hf_config_class)
    fields = {k: v for k, v in checkpoint.config.items() if k != "model_type"}
    config = config_class(**fields)
    try:
        with _quiet_transformers():
            model, info = getattr(transformers, family.hf_class).from_pretrained(
                directory,
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
    target = _share(model, str(directory))
    layers = _load_mtp_layers(checkpoint, family, target) if needs_mtp else ()
    return LoadedModel(
        family, target, layers, checkpoint.stop_ids(), str(directory), checkpoint, True
    )


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
    if checkpoint is None and needs_mtp:
        raise CheckpointError(
            f"the model's name_or_path is {model.name_or_path!r}, which is no local directory: "
            "transformers drops MTP tensors on load, so mtpc reads them from the checkpoint; load "
            "the model from a directory, or use spec_tokens=0"
        )
    source = model.name_or_path or "model object"
    target = _share(model, source)
    layers = _load_mtp_layers(checkpoint, family, target) if checkpoint and needs_mtp else ()
    return LoadedModel(family, target, layers, _stop_ids(model), source, checkpoint)


def _share(model: Any, source: str) -> Any:
    """The user's model on mtpc's seams, once its weights are known to be sound."""
    check_finite(model.named_parameters(), source)
    return share_model(model)


def _load_mtp_layers(
    checkpoint: Checkpoint, family: ModelFamily, target: Any
) -> tuple[MTPLayer, ...]:
    count = family.num_mtp_layers(target.config)
    if count == 0:
        raise CheckpointError(
            f"{checkpoint.directory} announces no MTP layers (num_nextn_predict_layers is 0 or "
            "absent); spec_tokens=0 decodes without them"
        )
    if count > 1:
        raise UnsupportedModelError(
            f"{checkpoint.directory} has {count} MTP layers; only one, applied recursively, is "
            "supported so far (layer 2 would need its own KV of every context token)"
        )
    decoder = target.get_decoder()
    sample = decoder.layers[-1]
    dtype = target.get_input_embeddings().weight.dtype
    for name, weight in repeated_tensors(checkpoint, family, target, count).items():
        check_repeated(checkpoint, name, weight)
    layers = tuple(
        load_mtp_layer(
            checkpoint, family, target.config, i, type(sample), find_norm_class(sample), dtype
        )
        for i in range(count)
    )
    for index, layer in enumerate(layers):
        check_finite(layer.named_parameters(), f"MTP layer {index} of {checkpoint.directory}")
    return layers


def repeated_tensors(
    checkpoint: Checkpoint, family: ModelFamily, target: Any, count: int
) -> dict[str, Tensor]:
    """Stored tensors of `count` MTP layers that repeat the target's embedding or head."""
    modules = {"embedding": target.get_input_embeddings(), "head": target.get_output_embeddings()}
    prefixes = [family.layer_prefix(target.config.num_hidden_layers, i) for i in range(count)]
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

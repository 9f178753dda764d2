"""Loading: from a checkpoint directory or a transformers model to a `LoadedModel`."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mtpc.errors import CheckpointError, OptionError, UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.layout.buffers import chain_specs
from mtpc.models.caches import CODE_DTYPES, hidden_spec, quantised_pools
from mtpc.models.derived import NO_ENTRIES, borrow, derive
from mtpc.models.families import MODULES, serving
from mtpc.models.family import ModelFamily
from mtpc.models.header_weights import HeaderWeights
from mtpc.models.hf import (
    MTPLayer,
    StepParts,
    model_class,
)
from mtpc.models.mtp_layers import load_mtp_layers
from mtpc.models.read_config import quiet_transformers, read_config
from mtpc.models.refused_config import check_size, explaining, misshapen
from mtpc.models.rotary import max_positions, with_fixed_angles
from mtpc.models.seams import share_model
from mtpc.plan import Plan
from mtpc.weights.checkpoint import Checkpoint, as_ids, check_finite, listing, open_checkpoint
from mtpc.weights.checkpoint_files import ConfigFile
from mtpc.weights.served_model import ServedModel, tokenizer_ends
from mtpc.weights.stored import StoredWeights
from mtpc.wiring import Rules


@dataclass(frozen=True)
class LoadedModel:
    """A target and its MTP layers.

    Attributes:
        family: row of the family table.
        target: copy of transformers' model that shares its tensors.
        mtp_layers: in order; () if they were not asked for.
        stop_ids: end-of-sequence token ids.
        source: directory or model name, for messages.
        checkpoint: where the tensors were read; None for a model object without a directory.
        owned: whether mtpc read the target from a directory. Nothing else then holds its tensors.
        headers: if tensors are memory without contents, the stored tensors behind them; else None.
        kv_cache_dtype: dtype of the codes in page pools of K and V; None is the model's own dtype.
        shifts_keys: whether codes of keys leave out what `KeyShifts` has; on GPUs they do not.
        kept_layers: see `CompileOptions.hidden_state_layers`.
        stored: makes a rank's parts of weights, in whose places the modules have placeholders;
            None: the modules have all values, or none.
    """

    family: ModelFamily
    target: Any
    mtp_layers: tuple[MTPLayer, ...]
    stop_ids: tuple[int, ...]
    source: str
    checkpoint: Checkpoint | None
    owned: bool = False
    headers: HeaderWeights | None = None
    kv_cache_dtype: torch.dtype | None = None
    shifts_keys: bool = True
    kept_layers: tuple[int, ...] = ()
    stored: StoredWeights | None = field(default=None, repr=False)

    @property
    def config(self) -> Any:
        """Config of the language model, even inside the config of a multimodal model."""
        return self.target.config.get_text_config(decoder=True)

    @property
    def max_positions(self) -> int | None:
        """How far the angles of rotary embeddings reach; see `mtpc.models.rotary`."""
        return max_positions(self.config)

    @property
    def dtype(self) -> torch.dtype:
        return self.target.get_input_embeddings().weight.dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; every token id is smaller."""
        return self.target.get_input_embeddings().weight.shape[0]

    @property
    def tables(self) -> set[int]:
        """The `id` of each tensor of which steps read single rows: embeddings that are no head."""
        modules = [m for root in (self.target, *self.mtp_layers) for m in root.modules()]
        heads = {id(m.weight) for m in modules if isinstance(m, nn.Linear)}
        return {id(m.weight) for m in modules if isinstance(m, nn.Embedding)} - heads

    def served(self) -> ServedModel:
        """What serving needs in addition to the model itself."""
        directory = self.checkpoint.directory if self.checkpoint else None
        return ServedModel(self.source, self.vocab_size, self.stop_ids, directory)

    def with_layers(self, count: int) -> LoadedModel:
        """This model with the MTP layers that `count` drafts use; others need no state."""
        most = min(count, 1) if self.family.wiring.chaining == "recycle" else count
        layers = self.mtp_layers[:most]
        return self if layers == self.mtp_layers else replace(self, mtp_layers=layers)

    def wired(self, rules: Rules) -> LoadedModel:
        """This model with other rules for its MTP layers; it shares all tensors."""
        family = self.family.wired(rules)
        layers = tuple(copy.copy(layer) for layer in self.mtp_layers)
        for layer in layers:
            layer.wiring = family.wiring
        return replace(self, family=family, mtp_layers=layers)

    def for_length(self, max_len: int) -> LoadedModel:
        """This model with angles for texts of up to `max_len` tokens; see `mtpc.models.rotary`."""
        target = with_fixed_angles(self.target, max_len)
        layers = tuple(with_fixed_angles(layer, max_len) for layer in self.mtp_layers)
        return replace(self, target=target, mtp_layers=layers)

    @property
    def parts(self) -> StepParts:
        """How this model is stepped; without drafts, a target of a drafter is the usual one."""
        parts = self.family.parts or StepParts()
        if self.kept_layers:
            from mtpc.models.drafter import KeepingTarget  # Not above: few models keep any.

            given = (self.config.num_hidden_layers, self.kept_layers)
            return replace(parts, target=partial(KeepingTarget, *given))
        return StepParts() if parts.draft_entry and not self.mtp_layers else parts

    @property
    def captures_layers(self) -> bool:
        """Whether the target hands out what enters some of its layers."""
        is_inner = min(self.kept_layers, default=self.num_layers) < self.num_layers
        return is_inner or self.parts.draft_entry is not None

    @property
    def num_layers(self) -> int:
        """Layers of the target."""
        return self.family.num_layers(self.config)

    @property
    def has_draft_vocabulary(self) -> bool:
        """Whether drafts come from a head with rows for some tokens only."""
        return any(self.parts.draft_vocabulary(layer) for layer in self.mtp_layers)

    @property
    def chain_window(self) -> int:
        """Earlier rows of a request that the MTP layers compute again; see `mtpc.step.chaining`."""
        return max(len(self.mtp_layers) - 1, 0)

    def with_kv_cache(self, name: str, shifts_keys: bool = True) -> LoadedModel:
        """This model with page pools of K and V of a `CompileOptions.kv_cache_dtype`.

        Raises:
            UnsupportedModelError: no layer has such pools.
        """
        dtype = CODE_DTYPES[name]
        if (dtype, shifts_keys) == (self.kv_cache_dtype, self.shifts_keys):
            return self
        found = replace(self, kv_cache_dtype=dtype, shifts_keys=shifts_keys)
        if dtype is not None and found.state_specs == self.state_specs:
            raise UnsupportedModelError(
                f"kv_cache_dtype is {name!r}, but {self.family.name} has no pages of K and V; "
                "expected 'auto': latents, rings and recurrent state keep the model's dtype"
            )
        return found

    def cache_specs(self, layer: int) -> tuple[BufferSpec, ...]:
        """State buffers of a layer; MTP layers follow the target's."""
        specs = self.family.cache_specs(self.config, layer, self.dtype)
        return quantised_pools(specs, self.kv_cache_dtype) if self.kv_cache_dtype else specs

    @cached_property
    def state_specs(self) -> tuple[BufferSpec, ...]:
        """State buffers: of the target's layers, of the MTP layers, and of true chaining."""
        count = self.config.num_hidden_layers + len(self.mtp_layers)
        caches = (spec for layer in range(count) for spec in self.cache_specs(layer))
        width = self.config.hidden_size
        chain = chain_specs(self.chain_window, (width,), self.dtype)
        if not self.kept_layers:
            return (*caches, *chain)
        return (*caches, hidden_spec(count, self.dtype, len(self.kept_layers) * width))

    def keeping(self, layer_ids: tuple[int, ...]) -> LoadedModel:
        """This model, which keeps the inputs of some layers; see `hidden_state_layers`.

        Raises:
            OptionError: it has no such layer.
            UnsupportedModelError: it has not one residual stream.
        """
        if layer_ids and layer_ids[-1] > self.num_layers:
            raise OptionError(
                f"hidden_state_layers is {layer_ids}; expected numbers up to {self.num_layers}, "
                "which stands for the final norm"
            )
        if layer_ids and self.family.parts is not None:
            raise UnsupportedModelError(
                f"hidden_state_layers is {layer_ids}, and {self.family.name} has no residual "
                "stream of one row; expected another target"
            )
        return replace(self, kept_layers=layer_ids)

    def weights(self) -> dict[str, Tensor]:
        """All parameters and constant buffers by name; a tied tensor appears once."""
        roots = [("", self.target), *((f"mtp.{i}.", m) for i, m in enumerate(self.mtp_layers))]
        named: dict[int, tuple[str, Tensor]] = {}
        for prefix, module in roots:
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                named.setdefault(id(tensor), (prefix + name, tensor))
        return dict(named.values())

    def ends(self) -> set[str]:
        """Names of the embeddings and heads in `weights`: the target's, and the MTP layers' own."""
        modules = [self.target.get_input_embeddings(), self.target.get_output_embeddings()]
        for layer in self.mtp_layers:
            modules += [layer.embedding, layer.head]
        held = {id(module.weight) for module in modules if module is not None}
        return {name for name, tensor in self.weights().items() if id(tensor) in held}


def load_planned(source: Any, plan: Plan, headers_only: bool = False) -> LoadedModel:
    """Load a model as it is planned; see `load`."""
    given = (source, plan.dtype or None, plan.layer_drafts > 0, plan.wiring)
    return load(*given, headers_only, plan.drafter).keeping(plan.hidden_state_layers)


def load(
    source: Any,
    dtype: str | None,
    needs_mtp: bool,
    wiring: Rules = (),
    headers_only: bool = False,
    draft: Path | str | None = None,
) -> LoadedModel:
    """Load a checkpoint directory, or adopt a transformers model object.

    Args:
        source: a directory's path, its `Checkpoint`, or a `PreTrainedModel`, which shares its
            tensors and is not changed. In place of a path, an id of the hub will do.
        dtype: name of the dtype to load a directory in; None keeps the checkpoint's.
        needs_mtp: whether MTP layers are required (spec_tokens > 0).
        wiring: rules that replace those of the family.
        headers_only: read no weight of a directory. Its tensors are then memory without contents,
            for steps that are traced and kept in the cache, and never run on it.
        draft: a drafter's checkpoint, in place of MTP layers. A `Checkpoint` has its own.

    Raises:
        CheckpointError: tensors are missing, unexpected, misshapen or not finite; see
            `Checkpoint`, `load_mtp_layer`, `check_finite`.
        OptionError: the source is of another type, or a dtype is given for a model object.
        UnsupportedModelError: the architecture is not in `FAMILIES`, or the model's class or
            number of MTP layers is not supported.
    """
    if isinstance(source, (str, Path)):
        source = open_checkpoint(Path(source), draft if needs_mtp else None)
    if isinstance(source, Checkpoint):
        family = family_of(source)
        try:
            with explaining(source, family):
                headers = HeaderWeights(source) if headers_only else None
                loaded = _load_directory(source, family, dtype, needs_mtp, wiring, headers)
                _ = loaded.state_specs  # Refuses entries that only the state depends on.
                return loaded
        except UnsupportedModelError as error:
            if str(source.directory) in str(error):
                raise
            raise UnsupportedModelError(f"{source.config_path}: {error}") from error
    if isinstance(source, transformers.PreTrainedModel):
        if dtype is not None:
            raise OptionError(
                f"dtype={dtype!r} with a model object, which keeps its own; leave it out, or pass "
                "the checkpoint's directory"
            )
        return _adopt(source, needs_mtp, wiring, draft)
    raise OptionError(
        f"cannot compile a {type(source).__name__}; expected a checkpoint directory or a "
        "transformers PreTrainedModel"
    )


def family_of(file: ConfigFile) -> ModelFamily:
    """The family that serves a checkpoint.

    Raises:
        UnsupportedModelError: no family does; the message names its config.json.
    """
    try:
        return find_family(file.config.get("architectures") or [], file.text_config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{file.config_path}: {error}") from None


def find_family(architectures: list[str], entries: Mapping[str, Any] = NO_ENTRIES) -> ModelFamily:
    """The family that serves one of `architectures`.

    `entries` are those of the language model's config, by which a family is derived.

    Raises:
        UnsupportedModelError: no family does.
    """
    family = borrow(architectures, entries) or serving(architectures)
    if (family := family or derive(architectures, entries)) is not None:
        return family
    known = [name for names in MODULES.values() for name in names]
    near = [hit for name in architectures for hit in difflib.get_close_matches(name, known, 1)]
    hint = f" (the nearest is {near[0]})" if near else ""
    raise UnsupportedModelError(
        f"architectures {architectures} are not supported{hint}; expected a decoder-only causal LM "
        f"of transformers {transformers.__version__}, or a family that `mtpc models` lists"
    )


def _load_directory(
    checkpoint: Checkpoint,
    family: ModelFamily,
    dtype: str | None,
    needs_mtp: bool,
    wiring: Rules,
    headers: HeaderWeights | None,
) -> LoadedModel:
    """Load the target by transformers, and the MTP layers by mtpc."""
    directory = checkpoint.directory
    family = drafted(family, checkpoint).wired(wiring)
    model = read_target(checkpoint, family, dtype, headers)
    target = _share(model, family, str(directory), has_values=headers is None)
    layers = load_mtp_layers(checkpoint, family, target, headers) if needs_mtp else ()
    if headers is not None:
        headers.reserve([target, *layers])
    stop_ids = checkpoint.stop_ids()
    return LoadedModel(family, target, layers, stop_ids, str(directory), checkpoint, True, headers)


def drafted(family: ModelFamily, checkpoint: Checkpoint | None) -> ModelFamily:
    """The family of a target, with the drafter of its checkpoint if that has one of its own."""
    if checkpoint is None or checkpoint.draft is None:
        return family
    from mtpc.models.draft import drafted_family  # Not above: few models have such a drafter.

    config = read_config(checkpoint, family).get_text_config(decoder=True)
    return drafted_family(family, checkpoint, config)


def read_target(
    checkpoint: Checkpoint,
    family: ModelFamily,
    dtype: str | None,
    headers: HeaderWeights | None = None,
) -> Any:
    """transformers' own model of a checkpoint's target, with eager attention and experts. Without a
    `dtype`, weights keep the checkpoint's. With `headers`, no tensor is read.

    Raises:
        CheckpointError: tensors are missing, or transformers refuses them or config.json.
    """
    directory = checkpoint.directory
    if dtype is None:
        checkpoint.check_dtype()
    # Tensors come from mtpc's own reader: given a directory, transformers would follow other files.
    names = checkpoint.target_tensors
    state = headers.slices(names) if headers else {n: _Unread(checkpoint, n) for n in names}
    with explaining(checkpoint, family), quiet_transformers():
        check_size(checkpoint, family)
        model, info = model_class(family).from_pretrained(
            None,
            config=read_config(checkpoint, family),
            state_dict=state,
            dtype=getattr(torch, dtype or checkpoint.dtype),
            attn_implementation="eager",
            experts_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # They are refused below, by their names.
            key_mapping=family.inner_names(),
        )
    if info["mismatched_keys"]:
        raise misshapen(checkpoint, family, info["mismatched_keys"])
    if info["missing_keys"]:
        absent, head = sorted(info["missing_keys"]), model.get_output_embeddings()
        is_head = [n for n, p in model.named_parameters() if p is head.weight] == absent
        tie = ': if the head is the embedding, set "tie_word_embeddings": true in it' * is_head
        raise CheckpointError(
            f"{directory} lacks {len(absent)} tensor(s) of the target: {listing(absent)}; download "
            f"the checkpoint again, or correct its config.json{tie}"
        )
    return model


@dataclass(frozen=True)
class _Unread:
    """A tensor of a checkpoint in the form of a safetensors slice: indexing reads it."""

    checkpoint: Checkpoint
    name: str

    def __getitem__(self, index: Any) -> Tensor:
        return self.checkpoint.tensor(self.name)[index]


def _adopt(model: Any, needs_mtp: bool, wiring: Rules, draft: Path | str | None) -> LoadedModel:
    """Share a user's model object, and load its MTP layers from its checkpoint."""
    names = [*(model.config.architectures or ()), type(model).__name__]
    family = find_family(names, model.config.get_text_config(decoder=True).to_dict())
    is_nested = getattr(model.config, "text_config", None) is not None
    if is_nested and type(model).__name__ != family.hf_class:
        raise UnsupportedModelError(
            f"the model is a multimodal {type(model).__name__}; expected its text model: load it "
            f"with transformers.{family.hf_class}, or pass the checkpoint's directory"
        )
    kinds: Any = (model_class(family), getattr(transformers, family.hf_class, ()))
    if not isinstance(model, kinds):
        raise UnsupportedModelError(
            f"the model is a {type(model).__module__}.{type(model).__name__}; expected "
            f"transformers' {family.hf_class}; pass the checkpoint's directory instead"
        )
    from mtpc.models.adopt import check_object, check_same_weights  # Not above: few are objects.
    from mtpc.weights.paired_checkpoint import checkpoint_of

    check_object(model, family)
    checkpoint = checkpoint_of(model, needs_mtp, draft)
    family = drafted(family, checkpoint).wired(wiring)
    source = model.name_or_path or "model object"
    layers: tuple[MTPLayer, ...] = ()
    target = _share(model, family, source)
    if checkpoint and needs_mtp:
        check_same_weights(model, checkpoint, family)
        layers = load_mtp_layers(checkpoint, family, target)
    ends = tokenizer_ends(checkpoint.directory) if checkpoint else ()
    # Of the generation config or, if it has none, of the config.
    own = getattr(model.generation_config, "eos_token_id", None)
    own = getattr(model.config, "eos_token_id", None) if own is None else own
    ends = tuple(dict.fromkeys((*as_ids(own), *ends)))
    return LoadedModel(family, target, layers, ends, source, checkpoint)


def _share(model: Any, family: ModelFamily, source: str, has_values: bool = True) -> Any:
    """Check the weights, then copy the module tree onto mtpc's seams; see `share_model`."""
    quantised = [n for n, p in model.named_parameters() if p.dtype.itemsize == 1]
    if quantised:
        raise UnsupportedModelError(
            f"{source} holds {len(quantised)} parameter(s) of 8 bits ({listing(quantised)}); "
            "expected floating-point weights; pass the checkpoint's directory, which mtpc reads "
            "as bfloat16"
        )
    if has_values:
        check_finite(model.named_parameters(), source)
    return share_model(model, family.canonical)

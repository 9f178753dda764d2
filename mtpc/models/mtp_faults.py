"""What is wrong with a checkpoint's MTP tensors, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.models.adopt import ALIKE, similarity
from mtpc.models.family import ModelFamily
from mtpc.models.load import LoadedModel, family_of, load
from mtpc.models.mtp_layers import load_mtp_layer
from mtpc.models.read_config import read_config
from mtpc.models.refused_config import explaining
from mtpc.weights.checkpoint import Checkpoint, is_finite, listing, open_checkpoint
from mtpc.weights.checkpoint_files import MTP_COUNT_NAMES, CheckpointFiles
from mtpc.weights.paired_checkpoint import PairedCheckpoint
from mtpc.weights.quantise import stays_plain

_COUNT = MTP_COUNT_NAMES[-1]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, and what to do. Kinds are "absent", "count", "quantised", "not
    finite", "all zero", "misfit" and "other base"."""

    kind: str
    problem: str
    remedy: str


@dataclass(frozen=True)
class MTPTensors:
    """The tensors of a checkpoint's MTP layers, by the names of its family. The config is that of
    the language model."""

    files: CheckpointFiles
    family: ModelFamily
    config: Any

    @classmethod
    def of(cls, files: CheckpointFiles) -> MTPTensors:
        """The MTP tensors of a checkpoint.

        Raises:
            UnsupportedModelError: no family serves its architecture.
            CheckpointError: transformers refuses its config.json.
        """
        family = family_of(files)
        with explaining(files, family):
            return cls(files, family, read_config(files, family).get_text_config(decoder=True))

    @property
    def announced(self) -> int | None:
        """Number of MTP layers in the config; None if it does not say."""
        return self.family.num_mtp_layers(self.config)

    def prefix(self, index: int) -> str:
        return self.family.layer_prefix(self.config.num_hidden_layers, index)

    def layers(self) -> list[list[str]]:
        """Names of the stored tensors of each MTP layer, without gaps from layer 0 on."""
        found: list[list[str]] = []
        while True:
            prefix = self.prefix(len(found))
            names = [name for name in self.files.stored if name.startswith(prefix)]
            is_last = bool(found) and prefix == self.prefix(0)  # A family of one layer.
            if not names or is_last:
                return found
            found.append(names)

    def names(self) -> list[str]:
        """Names of the stored tensors of all MTP layers."""
        common = [n for n in self.family.common_tensors.values() if n in self.files.stored]
        return [*dict.fromkeys([*chain(*self.layers()), *common])]


def find_faults(directory: Path, dtype: str | None = None) -> list[Fault]:
    """What is wrong with the MTP tensors of a checkpoint, to be loaded in `dtype` or their own; it
    reads these tensors and no other. No fault says that the layers can be loaded, not that they fit
    the target.

    Raises:
        CheckpointError: the checkpoint itself cannot be read.
        UnsupportedModelError: no family serves its architecture.
    """
    tensors = MTPTensors.of(CheckpointFiles(directory))
    graft = f"put those of the base back: mtpc graft BASE {tensors.files.directory} OUT"
    faults = [*_counts(tensors, graft)]
    if faults:
        return faults
    values = [*_values(tensors.files, tensors.names(), graft)]
    try:
        checkpoint = Checkpoint(tensors.files.directory)
    except CheckpointError as error:
        # Weights that were rounded to 8 bits or fewer, with no scales beside them; or something
        # else is wrong.
        stored = tensors.files.stored
        leaves: dict[str, set[str]] = {}
        for name in tensors.names():
            stem, _, leaf = name.rpartition(".")
            leaves.setdefault(stem, set()).add(leaf)
        bare = [f"{stem}.weight" for stem, found in leaves.items() if found <= {"weight", "bias"}]
        narrow = [name for name in bare if name in stored and not stored[name].is_wide]
        if not narrow:
            raise error
        kinds = ", ".join(sorted({stored[name].dtype for name in narrow}))
        found = f"{len(narrow)} tensors are {kinds}, with no scales beside them: {listing(narrow)}"
        return [*values, Fault("quantised", found, graft)]
    return [*values, *_accidents(tensors, checkpoint, graft), *_misfits(checkpoint, dtype, graft)]


def _counts(tensors: MTPTensors, graft: str) -> Iterator[Fault]:
    """Layers that are announced and not stored, or the reverse."""
    announced, stored = tensors.announced, len(tensors.layers())
    wanted = 1 if announced is None else announced
    first, says = tensors.prefix(0), f"{tensors.files.config_path.name} announces"
    if wanted == 0 and stored == 0:
        found = f"{says} no MTP layers ({_COUNT} is 0 or absent), and none is stored"
        other = "for drafts, give a drafter's checkpoint (draft=DIR), or use spec_tokens=0"
        first = "" if tensors.files.gguf else f"if the base has MTP layers, {graft}; else "
        yield Fault("absent", found, first + other)
    elif stored == 0:
        found = f"no tensor is named {first}*; expected {wanted} MTP layer(s)"
        yield Fault("absent", found, graft)
    elif announced is not None and stored > announced:
        found = f"{says} {announced} MTP layer(s), and {stored} are stored"
        yield Fault("count", found, f"set {_COUNT} to {stored} in config.json")
    elif stored < wanted:
        found = f"{says} {wanted} MTP layers, and the first {stored} are stored"
        yield Fault("absent", found, f"{graft}; or set {_COUNT} to {stored} in config.json")


def find_draft_faults(directory: Path, draft: Path, dtype: str | None) -> list[Fault]:
    """What is wrong with a drafter in a checkpoint of its own; as `find_faults`.

    Raises:
        CheckpointError: a checkpoint cannot be read.
        UnsupportedModelError: no family serves the target's architecture.
    """
    checkpoint, remedy = open_checkpoint(directory, draft), "download or export the drafter again"
    assert isinstance(checkpoint, PairedCheckpoint)
    files = checkpoint.draft
    faults = [*_values(files, [*files.stored], remedy)]
    try:
        load(checkpoint, dtype, needs_mtp=True, headers_only=True)
    except (CheckpointError, UnsupportedModelError) as error:
        faults.append(Fault("misfit", str(error), "use a drafter that was made for this target"))
    return faults


def _values(files: CheckpointFiles, names: list[str], remedy: str) -> Iterator[Fault]:
    """Tensors whose values no training leaves behind. Norms and biases may be zero."""
    bad, zero = [], []
    for name in names:
        if not files.stored[name].is_wide:
            continue
        tensor = files.read(name)
        if not is_finite(tensor):
            bad.append(name)
        elif tensor.dim() > 1 and not tensor.any():
            zero.append(name)
        files.release_stored(name)
    if bad:
        found = f"{len(bad)} of {len(names)} tensors hold NaN or infinity: {listing(bad)}"
        yield Fault("not finite", found, remedy)
    if zero:
        found = f"{len(zero)} of {len(names)} tensors are all zero: {listing(zero)}"
        yield Fault("all zero", found, f"{remedy}; the fine-tune was saved without loading them")


def _accidents(tensors: MTPTensors, checkpoint: Checkpoint, graft: str) -> Iterator[Fault]:
    """Quantised weights of MTP layers that quantisers leave plain, or where all else is plain."""
    prefixes = tuple(tensors.prefix(index) for index in range(len(tensors.layers())))
    quantised = [name for name in checkpoint.quantised if name.startswith(prefixes)]
    joints = [name for name in quantised if stays_plain(name)]
    if quantised and len(quantised) == len(checkpoint.quantised):
        found = (
            f"{len(quantised)} weights of the MTP layers are quantised, and none of the target: "
            f"{listing(quantised)}"
        )
        yield Fault("quantised", found, graft)
    elif joints:
        found = f"{listing(joints)} are quantised; other servers read these weights as plain ones"
        yield Fault("quantised", found, f"{graft}, or quantise by mtpc quantize, which skips them")


def _misfits(checkpoint: Checkpoint, dtype: str | None, graft: str) -> Iterator[Fault]:
    """Tensors that are missing, unexpected or misshapen, and embeddings of another model."""
    loaded = load(checkpoint, dtype, needs_mtp=False, headers_only=True)
    tensors = MTPTensors(checkpoint, loaded.family, loaded.config)
    for index in range(len(tensors.layers())):
        try:
            load_mtp_layer(checkpoint, loaded.family, loaded.target, index, loaded.headers)
        except CheckpointError as error:
            yield Fault("misfit", str(error), f"{graft}, or name the right architecture")
            continue
        yield from _foreign(tensors, loaded, index, graft)


def _foreign(tensors: MTPTensors, loaded: LoadedModel, index: int, graft: str) -> Iterator[Fault]:
    """An embedding that is stored with a layer, and is no copy of the target's."""
    assert loaded.headers is not None
    checkpoint = loaded.checkpoint
    assert checkpoint is not None
    theirs = loaded.headers.origin(loaded.target.get_input_embeddings().weight)
    for name, role in tensors.family.shared_tensors.items():
        own = tensors.prefix(index) + name
        if role != "embedding" or own not in checkpoint.tensors or theirs is None:
            continue
        alike = similarity(checkpoint.tensor(own), checkpoint.tensor(theirs))
        if alike < ALIKE:
            found = (
                f"{own} and {theirs} have a cosine similarity of {alike:.2f}; expected a copy of "
                "the target's embedding"
            )
            yield Fault("other base", found, f"{graft}, with the BASE of this target")

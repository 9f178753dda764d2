"""Putting the MTP layers of a base back into a fine-tune that lost them.

Fine-tuning through transformers drops MTP tensors. The new checkpoint has every other tensor of the
fine-tune, bit for bit, and the base's MTP tensors with the entries of config.json that belong to
them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.layout.display import Tell
from mtpc.models.load import load
from mtpc.models.mtp_faults import MTPTensors, find_faults
from mtpc.weights.checkpoint import Checkpoint, listing
from mtpc.weights.checkpoint_files import MTP_COUNT_NAMES, CheckpointFiles
from mtpc.weights.formats import FORMATS
from mtpc.weights.json_file import CONFIG
from mtpc.weights.shards import (
    ShardWriter,
    copy_others,
    files_beside,
    new_directory,
    refuse_existing,
    write_json,
)

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Grafted:
    """A checkpoint that was written.

    Attributes:
        tensors: number of MTP tensors, which have `nbytes` bytes; `others`: of other tensors.
        replaced: MTP tensors of the fine-tune, which are left out.
        entries: entries of config.json that were added or changed.
        left_out: copies of the base's embedding and head that the fine-tune's vocabulary does not
            fit; MTP layers use the target's instead.
    """

    tensors: int
    nbytes: int
    others: int
    replaced: int
    entries: dict[str, Any]
    left_out: tuple[str, ...]


def graft(base: Path, finetune: Path, out: Path, tell: Tell = lambda *stage: None) -> Grafted:
    """Write a copy of a fine-tune with the MTP tensors of its base.

    Tensors stream from file to file; at most one file's worth of them is in memory.

    Args:
        base: checkpoint with MTP layers. Its quantised MTP weights are dequantised, unless the
            fine-tune is quantised alike.
        finetune: checkpoint of the same architecture; MTP tensors of its own are left out.
        out: the new directory; it must not exist. It appears when it is whole.
        tell: called with progress.

    Raises:
        OptionError: `out` exists.
        CheckpointError: a checkpoint cannot be read; the base's MTP layers are absent or faulty;
            they do not fit the fine-tune; or `out` cannot be written.
        UnsupportedModelError: no family serves the base or the fine-tune.
    """
    refuse_existing(out)
    return _Graft(Checkpoint(base), CheckpointFiles(finetune)).write(out, tell)


class _Graft:
    """One base and one fine-tune, checked against each other."""

    def __init__(self, base: Checkpoint, finetune: CheckpointFiles):
        self._base, self._finetune = base, finetune
        faults = find_faults(base.directory, base.dtype)
        if faults:
            raise CheckpointError(
                f"the MTP layers of the base {base.directory} cannot be used: {faults[0].kind}: "
                f"{faults[0].problem}; expected a checkpoint that `mtpc check` passes: give "
                "another BASE"
            )
        self._mtp, target = MTPTensors.of(base), MTPTensors.of(finetune)
        kinds = [
            f"{kind.family.name} with {kind.config.num_hidden_layers} decoder layers"
            for kind in (target, self._mtp)
        ]
        if kinds[0] != kinds[1]:
            raise CheckpointError(
                f"{self._finetune.directory} is a {kinds[0]}, and {self._base.directory} a "
                f"{kinds[1]}; expected the base of the fine-tune"
            )
        self._replaced = set(target.names())
        self._left_out = self._copies_that_do_not_fit()

    def write(self, out: Path, tell: Tell) -> Grafted:
        """Write the new checkpoint; see `graft`."""
        reads = self._mtp_reads()
        kept = sorted(self._finetune.stored.keys() - self._replaced)
        config, entries = self._config(reads)
        files_beside(self._finetune.directory)  # Raises now, not after all tensors.
        with new_directory(out) as scratch:
            writer = ShardWriter(scratch)
            for done, name in enumerate(kept):
                tell("copy the tensors of the fine-tune", done / len(kept))
                writer.add({name: self._finetune.read(name).clone()})
                self._finetune.release_stored(name)
            before = writer.nbytes
            for done, (name, read) in enumerate(reads.items()):
                tell("copy the MTP tensors", done / len(reads))
                writer.add({name: read(name).clone()})
            writer.finish()
            write_json(scratch / CONFIG, config)
            copy_others(self._finetune.directory, scratch)
            tell("check what was written")
            written = Checkpoint(scratch)
            try:
                load(written, written.dtype, needs_mtp=True, headers_only=True)
            except CheckpointError as error:
                raise CheckpointError(
                    f"the MTP layers of {self._base.directory} do not fit "
                    f"{self._finetune.directory}: {error}; expected the base of the fine-tune"
                ) from error
        size, replaced = writer.nbytes - before, len(self._replaced)
        left_out = tuple(sorted(self._left_out))
        return Grafted(len(reads), size, len(kept), replaced, entries, left_out)

    def _copies_that_do_not_fit(self) -> set[str]:
        """MTP tensors to leave out: copies of the base's embedding and head, where the fine-tune
        has another number of tokens. Raises CheckpointError: other tensors that both have differ in
        shape."""
        ours, theirs = self._finetune.stored, self._base.tensors
        shared = (theirs.keys() & ours.keys()) - self._replaced
        other = sorted(name for name in shared if theirs[name].shape != ours[name].shape)
        resized = [name for name in other if self._is_resized(name)]
        ends = tuple(self._mtp.family.shared_tensors)
        stored = {name for name in self._mtp.names() if ends and name.endswith(ends)}
        read = self._base.tensor
        copies = {n for n in stored if any(torch.equal(read(n), read(other)) for other in resized)}
        if other != resized or (resized and copies != stored):
            shapes = [f"{name} is {theirs[name]} and {ours[name]}" for name in other]
            raise CheckpointError(
                f"tensors of {self._base.directory} and of {self._finetune.directory} differ in "
                f"shape: {listing(shapes)}; expected the base of the fine-tune"
            )
        return copies

    def _is_resized(self, name: str) -> bool:
        """Whether a tensor has a row for each token, and base and fine-tune differ in rows only."""
        theirs, ours = self._base.tensors[name].shape, self._finetune.stored[name].shape
        return theirs[:1] == (self._mtp.config.vocab_size,) and theirs[1:] == ours[1:]

    def _is_quantised_alike(self) -> bool:
        says = self._finetune.config.get("quantization_config")
        return says is not None and says == self._base.config.get("quantization_config")

    def _mtp_reads(self) -> dict[str, Callable[[str], Tensor]]:
        """Name of each MTP tensor to write -> what reads it."""
        names = set(self._mtp.names()) - self._left_out
        if self._is_quantised_alike():
            return dict.fromkeys(sorted(names), self._base.read)
        parts = {weight: set(self._base.parts_of(weight)) for weight in self._base.quantised}
        weights = [weight for weight, stored in parts.items() if stored <= names]
        names.difference_update(*parts.values())
        return dict.fromkeys(sorted([*names, *weights]), self._base.whole)

    def _config(self, written: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """config.json of the new checkpoint, and the entries that differ from the fine-tune's."""
        config = copy.deepcopy(self._finetune.config)
        text, base = config.get("text_config") or config, self._base.text_config
        # Entries that belong to MTP layers have "mtp" or "nextn" in their names, or are lists that
        # go on for the MTP layers after the fine-tune's.
        entries: dict[str, Any] = {}
        for name, value in base.items():
            own = text.get(name)
            if ("mtp" in name or "nextn" in name or _goes_on(value, own)) and value != own:
                entries[name] = value
        for name in MTP_COUNT_NAMES:
            if name not in base:
                text.pop(name, None)
        text.update(entries)
        says = config.get("quantization_config")
        if says and not self._is_quantised_alike():
            tensors = self._base.tensors
            matrices = {n for n in written if n in tensors and len(tensors[n].shape) == 2}
            config["quantization_config"] = _leave_out(says, matrices)
        return config, entries


def _goes_on(value: Any, own: Any) -> bool:
    """Whether a list begins with all of another, and has more entries."""
    are_lists = isinstance(value, list) and isinstance(own, list)
    return are_lists and len(value) > len(own) > 0 and value[: len(own)] == own


def _leave_out(says: Config, weights: Collection[str]) -> Config:
    """A quantization_config that leaves out these plain weights, too."""
    method = says.get("quant_method", "")
    form = FORMATS.get(method)
    if form is None or form.left_out is None:
        raise CheckpointError(
            f"the fine-tune is quantised by {method!r}, whose config cannot say that MTP layers "
            "are plain; expected a plain fine-tune: graft onto that, and quantise the result by "
            "`mtpc quantize`"
        )
    modules = {name.removesuffix(".weight") for name in weights if name.endswith(".weight")}
    listed = says.get(form.left_out) or []
    return {**says, form.left_out: [*listed, *sorted(modules - set(listed))]}

"""Reading checkpoints: the weights that their files hold, quantised or not.

This module does not import transformers, because a warm start reads weights with it alone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.checkpoint_files import CheckpointFiles
from mtpc.weights.json_file import GENERATION, QKV_LAYOUT, check_ids, read_json
from mtpc.weights.served_model import tokenizer_ends
from mtpc.weights.tensor_file import Span, dtype_code

if TYPE_CHECKING:
    from mtpc.weights.formats.stored import QuantisedWeight
    from mtpc.weights.fused_qkv import QkvRows
    from mtpc.weights.grouped_recipes import GroupedRows, GroupSpec

DRAFT = "draft."
"""Prefix of the names of a drafter's tensors, see `mtpc.weights.paired_checkpoint`."""
_FIRST = 6
"""A message lists this many names; then it says how many more there are."""


class Checkpoint(CheckpointFiles):
    """The weights of a checkpoint, quantised or not, by the names that models have for them.

    Args:
        directory: the checkpoint's path, or its id on the Hugging Face hub.

    Attributes, in addition to those of `CheckpointFiles`:
        tensors: headers of all weights by name. A quantised weight has one entry, "X.weight", with
            the shape of the weight and the model's dtype. A projection of queries, keys or values
            that is stored within a fused tensor has an entry of its own (`fused_qkv`).
        target_tensors: those of `tensors` that belong to the target. `PairedCheckpoint` has others.
        dequantised: names of the quantised weights that `tensor` has dequantised so far.
        draft: the checkpoint of the drafter; None, but for a `PairedCheckpoint`.

    Raises:
        CheckpointError: as `CheckpointFiles`; or the weights are quantised in a way that mtpc does
            not read.
    """

    draft: Checkpoint | None = None

    def __init__(self, directory: Path):
        super().__init__(directory)
        directory = self.directory
        self.tensors = dict(self.stored)
        self._quantised, dropped = self._find_quantised()
        self.dequantised: set[str] = set()
        for name in dropped:
            del self.tensors[name]
        for weight in self._quantised.values():  # In place of what it is stored as.
            for stored in weight.parts.values():
                self.tensors.pop(stored, None)
            codes, dtype = self.stored[weight.parts["codes"]], dtype_code(self._read_dtype)
            self.tensors[weight.name] = replace(codes, dtype=dtype, shape=weight.own_shape)
        self._parts: dict[str, QkvRows] = {}
        if self.text_config.get(QKV_LAYOUT):
            from mtpc.weights.fused_qkv import find_fused_qkv  # Not above: few checkpoints need it.

            self._parts = find_fused_qkv(self.tensors, self.text_config)
        for name, part in self._parts.items():
            whole = self.tensors[part.fused]
            self.tensors[name] = replace(whole, shape=(part.count, *whole.shape[1:]))
        for fused in {part.fused for part in self._parts.values()}:
            del self.tensors[fused]
        self.target_tensors = self.tensors

    def _find_quantised(self) -> tuple[dict[str, QuantisedWeight], list[str]]:
        says = any(part.get("quantization_config") for part in (self.text_config, self.config))
        # Nothing looks like codes or their scales, so that no format need be asked.
        if not says and all(
            each.is_wide and "scale" not in name.rpartition(".")[2]
            for name, each in self.tensors.items()
        ):
            return {}, []
        from mtpc.weights.formats import find_quantised  # Not above: many checkpoints are plain.

        try:
            return find_quantised(self.tensors, self.config)
        except CheckpointError as error:
            raise CheckpointError(f"{self.directory}: {error}") from None

    @property
    def mtp_directory(self) -> Path:
        """Where the MTP layers are, for messages."""
        return self.directory

    @property
    def draft_vocab(self) -> tuple[int, ...]:
        """The tokens that a drafter was trained for, ascending; () if nothing names them."""
        return ()

    @property
    def replaces_mtp(self) -> bool:
        """Whether a drafter has the place of MTP layers, which config.json announces."""
        return False

    @property
    def quantised(self) -> tuple[str, ...]:
        """Names of the weights that are stored as codes with scales."""
        return tuple(self._quantised)

    @cached_property
    def specs(self) -> dict[str, GroupSpec]:
        """The weights that `grouped` can read as codes: name -> spec, from headers alone.

        Other quantised weights can only be dequantised.
        """
        own = {name: weight.spec for name, weight in self._quantised.items()}
        parts = {name: own.get(part.fused) for name, part in self._parts.items()}
        return {name: spec for name, spec in (own | parts).items() if spec and name in self.tensors}

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that tell a user how the weights are read."""
        known = {name: weight for name, weight in self._quantised.items() if not weight.is_plain}
        notes = list[str]()
        if self.dequantised:
            kinds = _counted(known[self._whole(name)].layout for name in self.dequantised)
            notes.append(
                f"{len(self.dequantised)} of {len(known)} quantised weight(s) are dequantised to "
                f"{self.dtype} where no kernel reads their codes: {kinds}"
            )
        rounded = [weight.layout for weight in known.values() if weight.is_rounded]
        if rounded:
            notes.append(
                f"{len(rounded)} of {len(known)} quantised weight(s) are of types whose codes no "
                f"kernel reads: {_counted(rounded)}"
            )
        return tuple(notes)

    @property
    def dtype(self) -> str:
        """Name of the weights' dtype: config.json's, or that of most weights if it has none.

        Quantised weights have the dtype to which they are dequantised.
        """
        if self._quantised:
            return self._read_dtype
        return self.announced_dtype or self._usual_dtype

    @property
    def _read_dtype(self) -> str:
        """Name of the dtype to which quantised weights are dequantised."""
        return self.announced_dtype or "bfloat16"

    @property
    def _usual_dtype(self) -> str:
        """The floating-point dtype of most bytes."""
        sizes = Counter[str]()
        for stored in self.target_tensors.values():
            if stored.is_floating_point:
                sizes[stored.dtype_name] += stored.nbytes
        return sizes.most_common(1)[0][0] if sizes else "float32"

    def check_dtype(self) -> None:
        """Refuse weights of another dtype than config.json announces: loading would round them.

        Raises:
            CheckpointError: most of the weights have another dtype.
        """
        announced, usual = self.announced_dtype, self._usual_dtype
        if not self._quantised and announced not in (None, usual):
            raise CheckpointError(
                f"{self.config_path}: dtype is {announced!r}, and most weights are {usual}; "
                f"expected the same: correct the file, or choose one with dtype={announced!r}"
            )

    def names(self, prefix: str = "") -> list[str]:
        return [name for name in self.tensors if name.startswith(prefix)]

    def tensor(self, name: str) -> Tensor:
        """One tensor as stored; see `TensorFile.tensor`.

        A quantised weight is dequantised to a new tensor at each call, and a part of a fused one is
        copied.
        """
        weight = self._quantised.get(self._whole(name))
        if weight is not None and not weight.is_plain:
            self.dequantised.add(name)
        if name not in self._parts:
            return self.whole(name)
        part = self._parts[name]
        whole = self.whole(part.fused)
        return torch.cat([whole[start:stop] for start, stop in part.runs])

    def grouped(self, name: str) -> GroupedRows:
        """A quantised weight as codes. Its name must be in `specs`."""
        if name not in self._parts:
            return self._quantised[name].grouped(self.read)
        from mtpc.weights.grouped_recipes import take_rows  # Not above: few checkpoints need it.

        part = self._parts[name]
        whole = self._quantised[part.fused].grouped(self.read)
        return take_rows(whole, part.runs)

    def meta_tensor(self, name: str) -> Tensor:
        """A meta tensor of the shape and dtype of `tensor`, from the headers alone."""
        header, stored = self.tensors[name], self._whole(name)
        dtype = getattr(torch, self._read_dtype)
        if stored not in self._quantised:
            dtype = self._files[header.path].dtype(stored)
        return torch.empty(header.shape, dtype=dtype, device="meta")

    def _whole(self, name: str) -> str:
        """Name of the fused weight that holds a weight, or the weight's own name."""
        return self._parts[name].fused if name in self._parts else name

    def parts_of(self, name: str) -> tuple[str, ...]:
        """Names of the tensors in the files that a weight is stored as: one, or codes and more."""
        whole = self._whole(name)
        quantised = self._quantised.get(whole)
        return tuple(quantised.parts.values()) if quantised else (whole,)

    def spans(self, name: str) -> list[Span]:
        """Where in the files the tensors of a weight are, those of `parts_of`."""
        return [self.stored[part].span for part in self.parts_of(name)]

    def piece_spans(self, name: str) -> list[Span]:
        """Where in the files the `pieces` of a plain tensor are."""
        return self.stored[name].pieces

    def is_plain(self, name: str) -> bool:
        """Whether `tensor` returns the stored bytes, without computing anything."""
        return name in self.stored and name not in self._quantised

    def whole(self, name: str) -> Tensor:
        """One tensor of the files, or a quantised weight by its own name, dequantised."""
        if name not in self._quantised:
            return self.read(name)
        return self._quantised[name].values(self.read, getattr(torch, self._read_dtype))

    def release(self, name: str) -> None:
        """Give back the memory of a tensor; if it is used again, it is read again."""
        for part in self.parts_of(name):
            self.release_stored(part)

    def stop_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids in generation_config.json or, if it has none, in config.json; and the
        tokenizer's, which chat templates end an answer with. vLLM also counts both."""
        path = self.directory / GENERATION
        ids = read_json(path).get("eos_token_id") if os.path.isfile(path) else None
        check_ids(ids, path, "eos_token_id")
        own = as_ids(self.text_config.get("eos_token_id") if ids is None else ids)
        return tuple(dict.fromkeys((*own, *tokenizer_ends(self.directory))))


def open_checkpoint(directory: Path, draft: Path | str | None) -> Checkpoint:
    """A target's checkpoint, with a drafter's where there is one.

    Raises:
        CheckpointError: as `mtpc.weights.paired_checkpoint.PairedCheckpoint`.
    """
    if not draft:
        return Checkpoint(directory)
    from mtpc.weights.paired_checkpoint import PairedCheckpoint  # Not above: few have a drafter.

    return PairedCheckpoint(directory, Path(draft))


def _counted(layouts: Iterable[str]) -> str:
    """How many there are of each, the most frequent first."""
    return "; ".join(f"{count} x {layout}" for layout, count in Counter(layouts).most_common())


def stored_dtype(source: Any) -> str | None:
    """Name of the weights' dtype of a checkpoint or a model object; None if it is not known."""
    if isinstance(source, Checkpoint):
        return source.dtype
    dtype = getattr(source, "dtype", None)
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else None


def as_ids(ids: Any) -> tuple[int, ...]:
    """The `eos_token_id` of a config (None, one id or several) as a tuple."""
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)


def listing(names: list[str]) -> str:
    """The first few names as text, and how many more there are."""
    if not names:
        return "none"
    more = f" and {len(names) - _FIRST} more" if len(names) > _FIRST else ""
    return ", ".join(names[:_FIRST]) + more


def check_finite(tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Refuse weights that hold NaN or infinity; they would decode to garbage without an error. The
    message says what they belong to.

    Raises:
        CheckpointError: some do; the message names the first of them.
    """
    refuse_not_finite([name for name, tensor in tensors if not is_finite(tensor)], what)


def refuse_not_finite(bad: list[str], what: str) -> None:
    """Raise one error for all tensors that hold NaN or infinity, if there are any. `bad` has their
    names, and `what` says what they belong to.

    Raises:
        CheckpointError: `bad` is not empty.
    """
    if bad:
        raise CheckpointError(
            f"{what}: {len(bad)} tensor(s) hold NaN or infinity: {listing(bad)}; expected finite "
            "weights: the checkpoint is damaged, or its training diverged"
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether all values of a tensor are finite.

    It computes the minimum and the maximum, which are NaN if any value is. That takes one
    vectorised pass and is 40 times as fast as isfinite.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.dtype.itemsize == 1:  # torch has no aminmax for eight-bit floats.
        tensor = tensor.bfloat16()
    low, high = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(low) & torch.isfinite(high))

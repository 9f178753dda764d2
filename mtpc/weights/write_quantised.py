"""Writing a quantised checkpoint, in the format of the library compressed-tensors.

The new checkpoint is written piece by piece beside its place, and moved there when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import mtpc
from mtpc.config import check_scheme
from mtpc.errors import CheckpointError, OptionError
from mtpc.weights.checkpoint import Checkpoint, is_finite, refuse_not_finite
from mtpc.weights.formats.stored import pack_words
from mtpc.weights.grouped import GroupedWeight
from mtpc.weights.grouped_recipes import GroupSpec
from mtpc.weights.json_file import CONFIG, INDEX
from mtpc.weights.quantise import SCHEMES, is_head, quantise, stays_plain

_SHARD_BYTES = 1 << 30
"""A file is written when its tensors have this many bytes; it bounds the memory in use."""
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", ".h5")
"""Ends of names of files that are not copied."""
_ACTIVATIONS: dict[str, Any] = {"symmetric": True, "strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class Written:
    """A checkpoint that was written.

    Attributes:
        quantised: number of weights that are quantised.
        plain: names of the matrices that are not.
        bytes_before: bytes of the tensors that were read.
        bytes_after: bytes of the tensors that were written.
    """

    quantised: int
    plain: tuple[str, ...]
    bytes_before: int
    bytes_after: int


def quantise_checkpoint(
    source: Path,
    out: Path,
    scheme: str,
    head: bool = False,
    keep: Sequence[str] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> Written:
    """Write a quantised copy of a checkpoint.

    Args:
        source: the checkpoint, of plain weights.
        out: the new directory; it must not exist.
        scheme: one of `mtpc.config.SCHEMES`.
        head: quantise output heads, too. vLLM reads them since March 2026; SGLang does not.
        keep: patterns of names of modules that stay plain, as "*.self_attn.*".
        tell: hears of progress.

    Raises:
        OptionError: there is no such scheme, or `out` exists.
        CheckpointError: the checkpoint cannot be read, is quantised already, or holds weights that
            are not finite; or `out` cannot be written.
    """
    check_scheme("scheme", scheme)
    if os.path.lexists(out):
        raise OptionError(f"{out} exists; expected the name of a new directory")
    checkpoint = Checkpoint(source)
    if checkpoint.is_quantised:
        raise CheckpointError(
            f"{checkpoint.directory} is quantised already; expected a checkpoint of plain weights"
        )
    try:
        scratch = Path(tempfile.mkdtemp(dir=out.absolute().parent, prefix=f".{out.name}."))
        try:
            written = _Writer(checkpoint, scratch, scheme, head, tuple(keep), tell).write()
            scratch.chmod(0o755)
            scratch.rename(out)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error}") from error
    return written


class _Writer:
    """Writes one checkpoint into a directory."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: Path,
        scheme: str,
        head: bool,
        keep: tuple[str, ...],
        tell: Callable[[str], None],
    ):
        self._checkpoint, self._directory, self._tell = checkpoint, directory, tell
        self._scheme, self._head, self._keep = scheme, head, keep
        self._shards: list[list[str]] = []

    def write(self) -> Written:
        """Write all files."""
        stored = self._checkpoint.stored
        specs = {name: spec for name in stored if (spec := self._spec(name)) is not None}
        if not specs:
            raise CheckpointError(
                f"{self._checkpoint.directory} has no weight that {self._scheme} fits; expected "
                "matrices whose number of inputs is a multiple of its groups"
            )
        matrices = (n for n, s in stored.items() if n.endswith(".weight") and len(s.shape) == 2)
        plain = tuple(name for name in matrices if name not in specs)
        after = self._write_shards(specs)
        self._write_config(plain)
        self._copy_others()
        before = sum(tensor.nbytes for tensor in stored.values())
        return Written(len(specs), plain, before, after)

    def _spec(self, name: str) -> GroupSpec | None:
        """The spec that a tensor gets; None if it stays as it is."""
        stored, module = self._checkpoint.stored[name], name.removesuffix(".weight")
        is_matrix = name.endswith(".weight") and len(stored.shape) == 2
        if not is_matrix or not stored.is_floating_point or stays_plain(name):
            return None
        if any(fnmatch(module, pattern) for pattern in self._keep):
            return None
        if is_head(name) and not self._head:
            return None
        dtype = getattr(torch, stored.dtype_name)
        return SCHEMES[self._scheme].spec(stored.shape[1], dtype)

    def _write_shards(self, specs: dict[str, GroupSpec]) -> int:
        """Write all tensors; returns their bytes."""
        held: dict[str, Tensor] = {}
        total = 0
        names = sorted(self._checkpoint.stored)
        for done, name in enumerate(names):
            self._tell(f"{done} of {len(names)} tensors: {name}")
            tensor = self._checkpoint.read(name)
            if not is_finite(tensor):
                refuse_not_finite([name], str(self._checkpoint.directory))
            spec = specs.get(name)
            parts = {name: tensor.clone()} if spec is None else dict(self._parts(name, spec))
            self._checkpoint.release(name)
            held |= parts
            total += sum(part.nbytes for part in parts.values())
            if sum(part.nbytes for part in held.values()) >= _SHARD_BYTES:
                self._save(held)
                held = {}
        if held:
            self._save(held)
        self._name_shards(total)
        return total

    def _parts(self, name: str, spec: GroupSpec) -> Iterator[tuple[str, Tensor]]:
        """The tensors that a weight is stored as."""
        weight = quantise(self._checkpoint.read(name), spec)
        yield f"{name}_scale", weight.scales
        if spec.form.kind == "int4":
            yield f"{name}_packed", pack_words(weight.codes)
            yield f"{name}_shape", torch.tensor(weight.codes.shape)
        else:
            yield name, _signed(weight)

    def _save(self, tensors: dict[str, Tensor]) -> None:
        path = self._directory / _numbered(len(self._shards))
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(0o644)  # The library gives it to its owner alone.
        self._shards.append(list(tensors))

    def _name_shards(self, total: int) -> None:
        """Give the files the names by which other programs find them."""
        count = len(self._shards)
        if count == 1:
            (self._directory / _numbered(0)).rename(self._directory / "model.safetensors")
            return
        places: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05}-of-{count:05}.safetensors"
            (self._directory / _numbered(index)).rename(self._directory / file)
            places |= dict.fromkeys(names, file)
        index_json = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (self._directory / INDEX).write_text(json.dumps(index_json, indent=2) + "\n")

    def _write_config(self, plain: Sequence[str]) -> None:
        ignored = sorted(name.removesuffix(".weight") for name in plain)
        says = quantization_config(self._scheme, ignored)
        config = {**self._checkpoint.config, "quantization_config": says}
        (self._directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    def _copy_others(self) -> None:
        """Copy the tokenizer and whatever else lies beside the weights."""
        for path in self._checkpoint.directory.iterdir():
            if path.is_file() and path.name != CONFIG and not path.name.endswith(_WEIGHTS):
                shutil.copyfile(path, self._directory / path.name)


def _numbered(index: int) -> str:
    return f"shard-{index:05}"


def _signed(weight: GroupedWeight) -> Tensor:
    """Codes of one byte as compressed-tensors stores them: int8, or float8."""
    if weight.form.kind == "float8":
        return weight.codes
    return (weight.codes ^ weight.form.default_zero).view(torch.int8)


def quantization_config(scheme: str, ignored: Sequence[str]) -> dict[str, Any]:
    """The entry of config.json that announces weights of a scheme.

    Args:
        scheme: one of `mtpc.config.SCHEMES`.
        ignored: names of modules with plain weights.
    """
    form, group = SCHEMES[scheme].kind, SCHEMES[scheme].group
    kind, bits = ("float" if form == "float8" else "int"), (4 if form == "int4" else 8)
    name = "pack-quantized" if form == "int4" else f"{kind}-quantized"
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
    }
    acts = None if form == "int4" else {"num_bits": bits, "type": kind, **_ACTIVATIONS}
    layers = {"targets": ["Linear"], "weights": weights, "input_activations": acts}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**layers, "output_activations": None, "format": name}},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "provider": f"mtpc {mtpc.__version__}",
    }

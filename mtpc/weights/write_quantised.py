"""Writing a quantised checkpoint, in the format of the library compressed-tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mtpc
from mtpc.errors import CheckpointError
from mtpc.option_checks import check_scheme
from mtpc.weights.checkpoint import Checkpoint, is_finite, refuse_not_finite
from mtpc.weights.formats.stored import pack_words
from mtpc.weights.grouped_recipes import GroupSpec
from mtpc.weights.json_file import CONFIG
from mtpc.weights.quantise import SCHEMES, is_head, quantise, stays_plain
from mtpc.weights.shards import (
    ShardWriter,
    copy_others,
    files_beside,
    new_directory,
    refuse_existing,
    write_json,
)

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
    tell: Callable[[str, float], None] = lambda stage, fraction: None,
) -> Written:
    """Write a quantised copy of a checkpoint.

    Args:
        source: the checkpoint, of plain weights.
        out: the new directory; it must not exist.
        scheme: one of `mtpc.option_checks.SCHEMES`.
        head: quantise output heads, too. vLLM reads them since March 2026; SGLang does not.
        keep: patterns of names of modules that stay plain, as "*.self_attn.*".
        tell: called with progress: the stage, and the share of it that is done.

    Raises:
        OptionError: there is no such scheme, or `out` exists.
        CheckpointError: the checkpoint cannot be read, is quantised already, or holds weights that
            are not finite; or `out` cannot be written.
    """
    check_scheme("scheme", scheme)
    refuse_existing(out)
    checkpoint = Checkpoint(source)
    if checkpoint.gguf:
        raise CheckpointError(
            f"{checkpoint.directory} is a GGUF model; expected a directory with config.json and "
            "*.safetensors: quantise the checkpoint that it was made from"
        )
    if checkpoint.is_quantised:
        raise CheckpointError(
            f"{checkpoint.directory} is quantised already; expected a checkpoint of plain weights"
        )
    files_beside(checkpoint.directory)  # Raises now, not after an hour.
    with new_directory(out) as scratch:
        return _Writer(checkpoint, scratch, scheme, head, keep, tell).write()


@dataclass(frozen=True)
class _Writer:
    """Writes one checkpoint into a directory; see `quantise_checkpoint`."""

    checkpoint: Checkpoint
    directory: Path
    scheme: str
    head: bool
    keep: Sequence[str]
    tell: Callable[[str, float], None]

    def write(self) -> Written:
        """Write all files."""
        stored = self.checkpoint.stored
        specs = {name: spec for name in stored if (spec := self._spec(name)) is not None}
        if not specs:
            raise CheckpointError(
                f"{self.checkpoint.directory} has no weight that {self.scheme} fits; expected "
                "matrices whose number of inputs is a multiple of its groups"
            )
        matrices = (n for n, s in stored.items() if n.endswith(".weight") and len(s.shape) == 2)
        plain = tuple(name for name in matrices if name not in specs)
        after = self._write_shards(specs)
        ignored = sorted(name.removesuffix(".weight") for name in plain)
        says = quantization_config(self.scheme, ignored)
        config = {**self.checkpoint.config, "quantization_config": says}
        write_json(self.directory / CONFIG, config)
        copy_others(self.checkpoint.directory, self.directory)
        before = sum(tensor.nbytes for tensor in stored.values())
        return Written(len(specs), plain, before, after)

    def _spec(self, name: str) -> GroupSpec | None:
        """The spec that a tensor gets; None if it stays as it is."""
        stored, module = self.checkpoint.stored[name], name.removesuffix(".weight")
        is_matrix = name.endswith(".weight") and len(stored.shape) == 2
        if not is_matrix or not stored.is_floating_point or stays_plain(name):
            return None
        if any(fnmatch(module, pattern) for pattern in self.keep):
            return None
        if is_head(name) and not self.head:
            return None
        dtype = getattr(torch, stored.dtype_name)
        return SCHEMES[self.scheme].spec(stored.shape[1], dtype)

    def _write_shards(self, specs: dict[str, GroupSpec]) -> int:
        """Write all tensors; returns their bytes."""
        writer = ShardWriter(self.directory)
        names = sorted(self.checkpoint.stored)
        for done, name in enumerate(names):
            self.tell(f"quantise {len(names)} tensors", done / len(names))
            tensor = self.checkpoint.read(name)
            if not is_finite(tensor):
                refuse_not_finite([name], str(self.checkpoint.directory))
            spec = specs.get(name)
            parts = {name: tensor.clone()} if spec is None else dict(_parts(name, tensor, spec))
            self.checkpoint.release(name)
            writer.add(parts)
        writer.finish()
        return writer.nbytes


def _parts(name: str, tensor: Tensor, spec: GroupSpec) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a weight is stored as."""
    weight = quantise(tensor, spec)
    yield f"{name}_scale", weight.scales
    if spec.form.kind == "int4":
        yield f"{name}_packed", pack_words(weight.codes)
        yield f"{name}_shape", torch.tensor(weight.codes.shape)
    elif spec.form.kind == "float8":
        yield name, weight.codes
    else:  # Signed, as compressed-tensors stores them.
        yield name, (weight.codes ^ weight.form.default_zero).view(torch.int8)


def quantization_config(scheme: str, ignored: Sequence[str]) -> dict[str, Any]:
    """The entry of config.json that announces weights of a scheme.

    Args:
        scheme: one of `mtpc.option_checks.SCHEMES`.
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

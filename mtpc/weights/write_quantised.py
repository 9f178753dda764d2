"""Writing a quantised checkpoint: as safetensors, in the format of the library compressed-tensors;
and GGUF files as GGUF."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mtpc
from mtpc.config import check_scheme, warn_of_cost
from mtpc.errors import CheckpointError, OptionError
from mtpc.weights.checkpoint import Checkpoint, check_finite
from mtpc.weights.formats.stored import pack_words
from mtpc.weights.grouped_recipes import GroupSpec
from mtpc.weights.json_file import CONFIG
from mtpc.weights.quantise import SCHEMES, TABLES, is_head, quantise, stays_plain
from mtpc.weights.rounding import Sensitivity
from mtpc.weights.shards import (
    ShardWriter,
    copy_others,
    files_beside,
    new_directory,
    refuse_existing,
    write_json,
)

Calibrate = Callable[[Checkpoint], Mapping[str, Sensitivity]]
"""What errors of a checkpoint's weights cost, by name; of some weights nothing may be known."""


def nothing_known(_: Checkpoint) -> Mapping[str, Sensitivity]:
    """Weights are rounded without calibration."""
    return {}


@dataclass(frozen=True)
class Written:
    """A checkpoint that was written.

    Attributes:
        quantised: number of weights by the scheme that they are quantised by.
        plain: names of the matrices that are not.
        bytes_before: bytes of the tensors that were read.
        bytes_after: bytes of the tensors that were written.
    """

    quantised: Mapping[str, int]
    plain: tuple[str, ...]
    bytes_before: int
    bytes_after: int


def quantise_checkpoint(
    source: Path,
    out: Path,
    scheme: str,
    head: bool = False,
    keep: Sequence[str] = (),
    calibrate: Calibrate = nothing_known,
    bits: float | None = None,
    tell: Callable[[str, float], None] = lambda stage, fraction: None,
) -> Written:
    """Write a quantised copy of a checkpoint.

    Args:
        source: the checkpoint, of plain weights.
        out: the new directory, or the new file of a GGUF file; it must not exist.
        scheme: one of `mtpc.config.SCHEMES`: those of blocks for GGUF files, others for
            directories.
        head: quantise output heads, too; those of GGUF files always are, and embeddings with them.
            vLLM reads quantised heads since March 2026; SGLang does not.
        keep: patterns of names of modules that stay plain, as "*.self_attn.*".
        calibrate: called when all else is known to be in order; see `quantise` for what moments do.
        bits: of a weight, on average: where it pays most, matrices of which something is known get
            schemes of more bits. GGUF files alone have them.
        tell: called with progress: the stage, and the share of it that is done.

    Raises:
        OptionError: there is no such scheme, it is of the other format, it has more bits than are
            asked for, or `out` exists.
        CheckpointError: the checkpoint cannot be read, is quantised already, or holds weights that
            are not finite; or `out` cannot be written.
    """
    check_scheme("scheme", scheme)
    refuse_existing(out)
    checkpoint = Checkpoint(source)
    _check_format(checkpoint, scheme)
    if checkpoint.quantised:
        raise CheckpointError(
            f"{checkpoint.directory} is quantised already; expected a checkpoint of plain weights"
        )
    writer = _Writer(checkpoint, scheme, head, keep, calibrate, tell)
    if checkpoint.gguf:
        return writer.rewrite_gguf(out, bits)
    if bits is not None:
        raise OptionError(
            f"bits are those of a GGUF file, and {checkpoint.directory} is a directory of "
            "safetensors; expected a scheme alone, or a GGUF file"
        )
    warn_of_cost(scheme)
    files_beside(checkpoint.directory)  # Raises now, not after an hour.
    with new_directory(out) as scratch:
        return writer.write(scratch)


def _check_format(checkpoint: Checkpoint, scheme: str) -> None:
    is_block, place = SCHEMES[scheme].block is not None, checkpoint.directory
    if bool(checkpoint.gguf) == is_block:
        return
    fitting = ", ".join(n for n, s in SCHEMES.items() if (s.block is None) == is_block)
    if is_block:
        raise OptionError(
            f"scheme is {scheme!r}, which GGUF files have, and {place} is a directory of "
            f"safetensors; expected one of {fitting}, or a GGUF file: llama.cpp's "
            "convert_hf_to_gguf.py writes one"
        )
    raise OptionError(
        f"scheme is {scheme!r}, which GGUF files do not have, and {place} is one; expected one of "
        f"{fitting}, or the checkpoint that it was made from"
    )


@dataclass(frozen=True)
class _Writer:
    """Writes one checkpoint again; see `quantise_checkpoint`."""

    checkpoint: Checkpoint
    scheme: str
    head: bool
    keep: Sequence[str]
    calibrate: Calibrate
    tell: Callable[[str, float], None]

    def rewrite_gguf(self, out: Path, bits: float | None) -> Written:
        """Write a GGUF file again; embeddings, which may be heads, are rounded with the rest.

        Raises:
            CheckpointError: it has several parts, or no weight that the scheme fits.
        """
        from mtpc.weights.gguf.file import GgufFile  # Not above: few checkpoints need it.
        from mtpc.weights.gguf.write import (
            bits_from,
            in_file_order,
            mixed_schemes,
            names_of,
            write_rounded,
        )

        (file, *more) = self.checkpoint.files
        if more:
            raise CheckpointError(
                f"{self.checkpoint.directory} is one of {1 + len(more)} files of a model; expected "
                "one file: join them by llama-gguf-split --merge"
            )
        assert isinstance(file, GgufFile)
        bits_of = {} if bits is None else bits_from(self.scheme, bits)
        names, plain = dict[str, str](), list[str]()
        for source, name in names_of(file).items():
            stored = file.header.tensors[source]
            if len(stored.shape) < 2 or not name.endswith(".weight"):
                continue
            module = name.removesuffix(".weight")
            stays = stays_plain(name) and module.rpartition(".")[2] not in TABLES
            fits = SCHEMES[self.scheme].spec(stored.shape[-1], torch.bfloat16) is not None
            if stays or not fits or self._keeps(module):
                plain.append(name)
                continue
            names[source] = name
        self._check_any(names)
        known = self.calibrate(self.checkpoint)
        matrices = {
            source: in_file_order(known[name], file.tensors[name]) if name in known else None
            for source, name in names.items()
        }
        schemes = dict.fromkeys(matrices, self.scheme)
        if bits is not None:
            schemes = mixed_schemes(file, matrices, bits_of, bits, self.tell)
        after = write_rounded(file, out, matrices, schemes, self.tell)
        return Written(Counter(schemes.values()), tuple(plain), self._bytes_before, after)

    def write(self, directory: Path) -> Written:
        """Write all files of a directory."""
        stored = self.checkpoint.stored
        specs = {name: spec for name in stored if (spec := self._spec(name)) is not None}
        self._check_any(specs)
        matrices = (n for n, s in stored.items() if n.endswith(".weight") and len(s.shape) == 2)
        plain = tuple(name for name in matrices if name not in specs)
        after = self._write_shards(directory, specs)
        ignored = sorted(name.removesuffix(".weight") for name in plain)
        says = quantization_config(self.scheme, ignored)
        write_json(directory / CONFIG, {**self.checkpoint.config, "quantization_config": says})
        copy_others(self.checkpoint.directory, directory)
        return Written({self.scheme: len(specs)}, plain, self._bytes_before, after)

    @property
    def _bytes_before(self) -> int:
        return sum(tensor.nbytes for tensor in self.checkpoint.stored.values())

    def _check_any(self, found: Collection[str]) -> None:
        if not found:
            raise CheckpointError(
                f"{self.checkpoint.directory} has no weight that {self.scheme} fits; expected "
                "matrices whose number of inputs is a multiple of its groups"
            )

    def _keeps(self, module: str) -> bool:
        return any(fnmatch(module, pattern) for pattern in self.keep)

    def _spec(self, name: str) -> GroupSpec | None:
        """The spec that a tensor gets; None if it stays as it is."""
        stored, module = self.checkpoint.stored[name], name.removesuffix(".weight")
        is_matrix = name.endswith(".weight") and len(stored.shape) == 2
        if not is_matrix or not stored.is_floating_point or stays_plain(name):
            return None
        if self._keeps(module) or (is_head(name) and not self.head):
            return None
        dtype = getattr(torch, stored.dtype_name)
        return SCHEMES[self.scheme].spec(stored.shape[1], dtype)

    def _write_shards(self, directory: Path, specs: dict[str, GroupSpec]) -> int:
        """Write all tensors; returns their bytes."""
        known, writer = self.calibrate(self.checkpoint), ShardWriter(directory)
        names = sorted(self.checkpoint.stored)
        for done, name in enumerate(names):
            self.tell(f"quantise {len(names)} tensors", done / len(names))
            tensor = self.checkpoint.read(name)
            check_finite([(name, tensor)], str(self.checkpoint.directory))
            spec = specs.get(name)
            parts = {name: tensor.clone()}
            if spec is not None:
                parts = _parts(name, tensor, spec, known[name].moments if name in known else None)
            self.checkpoint.release(name)
            writer.add(parts)
        writer.finish()
        return writer.nbytes


def _parts(name: str, tensor: Tensor, spec: GroupSpec, moments: Tensor | None) -> dict[str, Tensor]:
    """The tensors that a weight is stored as."""
    weight = quantise(tensor, spec, moments)
    scales = {f"{name}_scale": weight.scales}
    if spec.form.kind == "int4":
        shape = torch.tensor(weight.codes.shape)
        return {**scales, f"{name}_packed": pack_words(weight.codes), f"{name}_shape": shape}
    if spec.form.kind == "float8":
        return {**scales, name: weight.codes}
    # Signed, as compressed-tensors stores them.
    return {**scales, name: (weight.codes ^ weight.form.default_zero).view(torch.int8)}


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
    acts = {**weights, "strategy": "token" if group is None else "group", "dynamic": True}
    inputs = None if form == "int4" else acts
    layers = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**layers, "output_activations": None, "format": name}},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "provider": f"mtpc {mtpc.__version__}",
    }

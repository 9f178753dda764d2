"""Writing a GGUF file again with fewer bits: metadata and vocabulary stay, matrices are rounded."""

from __future__ import annotations

import secrets
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from mtpc.errors import CheckpointError, OptionError
from mtpc.weights.block_rows import Block
from mtpc.weights.checkpoint import check_finite
from mtpc.weights.gguf.blocks import BLOCKS
from mtpc.weights.gguf.file import GgufFile, GgufTensor
from mtpc.weights.gguf.header import MAGIC
from mtpc.weights.grouped import Decoded
from mtpc.weights.mixture import choose_schemes, expected_losses
from mtpc.weights.quantise import SCHEMES, quantise
from mtpc.weights.rounding import Sensitivity
from mtpc.weights.tensor_file import StoredTensor

_VERSION = 3
_U32 = 4
"""The type of a number of metadata."""
_SAYS = {"IQ4_NL": 25, "Q5_0": 8, "Q8_0": 7}
"""`general.file_type` of files whose matrices are mostly of a type."""
_FILE_TYPE, _REVISION = "general.file_type", "general.quantization_version"
_AT_ONCE = 1 << 24
"""Weights whose blocks are made at once."""


def names_of(file: GgufFile) -> Mapping[str, str]:
    """A file's names of tensors -> transformers'; of stacks, that of the first matrix."""
    found = {tensor.begin: name for name, tensor in file.tensors.items()}
    stored = file.header.tensors.items()
    return {source: found[s.begin] for source, s in stored if s.begin in found}


Sensitivities = Mapping[str, Sensitivity | None]
"""By names in a file, with inputs in the file's order; None where nothing is known."""


def _blocks() -> dict[str, Block]:
    """The type of each scheme that GGUF files have."""
    of = {block.name: block for block in BLOCKS.values()}
    return {name: of[scheme.block] for name, scheme in SCHEMES.items() if scheme.block}


def bits_from(least: str, bits: float) -> dict[str, float]:
    """The bits of a weight in each scheme that a matrix may get if `least` has the fewest.

    Raises:
        OptionError: a weight cannot have so few `bits` on average.
    """
    bits_of = {name: 8 * block.nbytes / block.inputs for name, block in _blocks().items()}
    if not bits >= bits_of[least]:  # Nor is NaN.
        raise OptionError(f"bits is {bits:g}; expected at least the {bits_of[least]:g} of {least}")
    return {name: each for name, each in bits_of.items() if each >= bits_of[least]}


def mixed_schemes(
    file: GgufFile,
    matrices: Sensitivities,
    bits_of: Mapping[str, float],
    bits: float,
    tell: Callable[[str, float], None],
) -> dict[str, str]:
    """The scheme of each matrix of a file of plain numbers; see `choose_schemes`."""
    losses, sizes = dict[str, Mapping[str, float]](), dict[str, int]()
    for done, (name, known) in enumerate(matrices.items()):
        tell(f"choose bits of {len(matrices)} tensors", done / len(matrices))
        sizes[name] = prod(file.header.tensors[name].shape)
        losses[name] = {} if known is None else expected_losses(file.plain(name), bits_of, known)
    return choose_schemes(losses, sizes, bits_of, bits)


def write_rounded(
    file: GgufFile,
    out: Path,
    matrices: Sensitivities,
    schemes: Mapping[str, str],
    tell: Callable[[str, float], None],
) -> int:
    """Write the tensors of a file, some of them rounded; returns the bytes of all.

    Args:
        file: of plain numbers.
        out: the new file.
        matrices: what is rounded. Other tensors are copied.
        schemes: a name of `SCHEMES` with a type of blocks, for each of these.
        tell: called with progress.

    Raises:
        CheckpointError: weights are not finite, or the file cannot be written.
    """
    number_of = {block: number for number, block in BLOCKS.items()}
    blocks = _blocks()
    rounded = {name: blocks[scheme] for name, scheme in schemes.items()}
    types, sizes, counts = dict[str, int](), dict[str, int](), Counter[str]()
    for name, stored in file.header.tensors.items():
        block = rounded.get(name, stored.block)
        types[name] = number_of[block]
        sizes[name] = prod(stored.shape) // block.inputs * block.nbytes
        counts[block.name] += prod(stored.shape) if name in rounded else 0
    scratch = out.with_name(f".{out.name}.mtpc-{secrets.token_hex(4)}")
    try:
        with scratch.open("xb") as target:
            target.write(_header(file, types, sizes, max(counts, key=counts.__getitem__)))
            for done, (name, stored) in enumerate(file.header.tensors.items()):
                tell(f"quantise {len(sizes)} tensors", done / len(sizes))
                _pad(target, file.header.alignment)
                if name not in matrices:
                    target.write(file.raw(stored.begin, stored.begin + sizes[name]))
                    continue
                tensor, what = file.plain(name), f"{name} of {file.path}"
                known, scheme = matrices[name], schemes[name]
                moments = None if known is None else known.moments
                for raw in _rounded(tensor, moments, scheme, rounded[name], what):
                    target.write(raw)
            _pad(target, file.header.alignment)
        scratch.rename(out)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error}") from None
    finally:
        scratch.unlink(missing_ok=True)
    return sum(sizes.values())


def _pad(target: IO[bytes], alignment: int) -> None:
    target.write(bytes(-target.tell() % alignment))


def _header(
    file: GgufFile, types: Mapping[str, int], sizes: Mapping[str, int], usual: str
) -> bytes:
    header, own = file.header, {_FILE_TYPE: _SAYS[usual], _REVISION: 2}
    entries = [file.raw(*span) for key, span in header.entries.items() if key not in own]
    entries += [_text(key) + struct.pack("<II", _U32, value) for key, value in own.items()]
    parts = [MAGIC, struct.pack("<IQQ", _VERSION, len(types), len(entries)), *entries]
    place = 0
    for name, stored in header.tensors.items():
        shape = tuple(reversed(stored.shape))
        form = f"<I{len(shape)}QIQ"
        parts.append(_text(name) + struct.pack(form, len(shape), *shape, types[name], place))
        place += sizes[name] + -sizes[name] % header.alignment
    return b"".join(parts)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _rounded(
    tensor: Tensor, moments: Tensor | None, scheme: str, block: Block, what: str
) -> Iterator[memoryview]:
    """The blocks of a matrix, or of a stack of them, some rows at a time."""
    check_finite([(what, tensor)], "weights")
    rows = tensor.reshape(-1, tensor.shape[-1])
    spec = SCHEMES[scheme].spec(rows.shape[1], rows.dtype)
    assert spec is not None
    assert block.encode is not None
    count = rows.shape[1] // block.inputs
    step = max(1, _AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), step):
        weight = quantise(rows[start : start + step], spec, moments)
        codes, scales = (t.unflatten(-1, (count, -1)) for t in (weight.codes, weight.scales))
        yield block.encode(Decoded(codes, scales)).contiguous().numpy().data


def in_file_order(known: Sensitivity, stored: StoredTensor) -> Sensitivity:
    """What is known of a weight, with inputs in the order in which the file has them.

    Where that is another order, second moments of pairs are left out.
    """
    assert isinstance(stored, GgufTensor)
    if stored.change.columns is None:
        return known
    order = stored.change.columns.order()
    diagonal = torch.empty(len(order))
    diagonal[order] = known.moments.diagonal(dim1=1, dim2=2).flatten()
    return replace(known, moments=diagonal.view(-1, 1, 1))

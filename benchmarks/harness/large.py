"""Large checkpoints that no memory holds: written tensor by tensor, or without their weights.

A *hollow* checkpoint has headers and sparse files, which take no disk space. A build reads only
headers, so it works for such a model of any size. It cannot run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness.models import (
    INITIALIZER_RANGE,
    Shape,
    without_weights,
)
from mtpc.models import ModelFamily
from mtpc.weights.grouped_recipes import GroupSpec
from mtpc.weights.json_file import CONFIG
from mtpc.weights.quantise import spec_by_scheme
from mtpc.weights.shards import ShardWriter
from mtpc.weights.tensor_file import dtype_code
from mtpc.weights.write_quantised import quantization_config

MIMO_7B = Shape(4096, 36, 11008, 151680, 32, 8)
"""MiMo-7B's own sizes."""
_SPREAD = (torch.arange(16) - 8.0).std().item()
"""Of int4 codes that are all as frequent."""


def write_codes(directory: Path, shape: Shape, scheme: str | None) -> None:
    """Write a dense MiMo, as `mtpc quantize --head` would if there is a scheme.

    Args:
        directory: where to; created if it is not there.
        shape: sizes.
        scheme: of `mtpc.config.SCHEMES`, in int4; None: all weights are bfloat16.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _, config, target, own = without_weights("mimo", shape)
    torch.manual_seed(0)
    writer, plain = ShardWriter(directory), []
    for name, tensor in {**target, **own}.items():
        spec = spec_by_scheme(scheme, name, tensor)
        if spec is not None:
            writer.add(dict(_codes(name, tensor, spec)))
            continue
        plain.append(name.removesuffix(".weight"))
        values = torch.ones if tensor.dim() == 1 else torch.randn
        factor = 1.0 if tensor.dim() == 1 else INITIALIZER_RANGE
        writer.add({name: factor * values(tensor.shape, dtype=torch.bfloat16)})
    writer.finish()
    if scheme is not None:
        config["quantization_config"] = quantization_config(scheme, plain)
    (directory / CONFIG).write_text(json.dumps(config))


def _codes(name: str, weight: Tensor, spec: GroupSpec) -> Iterator[tuple[str, Tensor]]:
    rows, inputs = weight.shape
    words = torch.randint(-(2**31), 2**31, (rows, inputs // 8), dtype=torch.int32)
    scales = torch.full((rows, inputs // spec.form.group), INITIALIZER_RANGE / _SPREAD)
    yield f"{name}_packed", words
    yield f"{name}_scale", scales.to(getattr(torch, spec.scales))
    yield f"{name}_shape", torch.tensor([rows, inputs])


_SHARD_BYTES = 4 * 10**9


def write_hollow(directory: Path, family_name: str, shape: Shape) -> None:
    """Write a bfloat16 checkpoint with one MTP layer, but for its weights.

    Args:
        directory: where to; created if it is not there.
        family_name: a name in mtpc's family table: "mimo", "glm4_moe" or "deepseek_v3".
        shape: sizes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    family, config, target, own = without_weights(family_name, shape)
    write_tensors(directory, {**dict(_one_by_one(target, family)), **own})
    (directory / CONFIG).write_text(json.dumps(config))


def write_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write files of weights by name, but for the weights; of meta tensors."""
    for number, shard in enumerate(_shards(tensors)):
        _write(directory / f"model-{number:05}.safetensors", shard)


def _one_by_one(tensors: Mapping[str, Tensor], family: ModelFamily) -> Iterator[tuple[str, Tensor]]:
    """transformers' tensors with a tensor for each expert, as released checkpoints have them."""
    gate, up, down = family.expert_names
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if not stem.endswith(".experts"):
            yield name, tensor
            continue
        names = (gate, up) if part == "gate_up_proj" else (down,)
        for index, expert in enumerate(tensor):
            for projection, rows in zip(names, expert.chunk(len(names)), strict=True):
                yield f"{stem}.{index}.{projection}.weight", rows


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """As released ones: files of a few GB, which a machine maps that could not map all in one."""
    shard: dict[str, Tensor] = {}
    left = _SHARD_BYTES
    for name, tensor in tensors.items():
        if shard and tensor.nbytes > left:
            yield shard
            shard, left = {}, _SHARD_BYTES
        shard[name] = tensor
        left -= tensor.nbytes
    yield shard


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file of so many bytes, of which the header alone is written."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        dtype = dtype_code(str(tensor.dtype).removeprefix("torch."))
        header[name] = dict(dtype=dtype, shape=list(tensor.shape), data_offsets=[start, end])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)

"""Checkpoints with headers and sparse files without data, which take no disk space.

A build reads only headers, so it works for such a model of any size. It cannot run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from benchmarks.harness.models import Shape, without_weights
from mtpc.models import ModelFamily
from mtpc.weights.json_file import CONFIG
from mtpc.weights.tensor_file import dtype_code

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

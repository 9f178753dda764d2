"""Saving a model with its MTP layers, under the tensor names of released checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpc.models.family import ModelFamily
from mtpc.models.hf import MTPLayer
from mtpc.models.mtp_layers import stored_tensors
from mtpc.weights.checkpoint_files import MTP_COUNT_NAMES
from mtpc.weights.json_file import CONFIG, INDEX
from mtpc.weights.shards import write_json


def save_checkpoint(
    model: Any, mtp_layers: Sequence[MTPLayer], directory: Path, family: ModelFamily
) -> Path:
    """Write a model and its MTP layers, in order, in the format that transformers, vLLM and mtpc
    read.

    The directory is created if it does not exist, and returned. The MTP tensors are in
    `model.safetensors` or, if transformers wrote shards, in a shard of their own that the index
    lists.
    """
    model.save_pretrained(directory)
    named = dict(_named(model, mtp_layers, family))
    if (directory / INDEX).is_file():
        # One more shard beside those of transformers.
        name = "model-mtp.safetensors"
        save_file(named, directory / name, metadata={"format": "pt"})
        index = json.loads((directory / INDEX).read_text())
        index["weight_map"].update(dict.fromkeys(named, name))
        index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in named.values())
        write_json(directory / INDEX, index)
    else:
        path = directory / "model.safetensors"
        save_file({**load_file(path), **named}, path, metadata={"format": "pt"})
    path = directory / CONFIG
    config = json.loads(path.read_text())
    config["architectures"] = [family.architectures[0]]
    text = config.get("text_config", config)
    announced = [name for name in MTP_COUNT_NAMES if name in text] or MTP_COUNT_NAMES[-1:]
    text.update(dict.fromkeys(announced, len(mtp_layers)))
    text.update({**family.released_entries, **text})
    write_json(path, config)
    return directory


def _named(
    model: Any, layers: Sequence[MTPLayer], family: ModelFamily
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of MTP layers under their names in a checkpoint."""
    decoder_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for index, layer in enumerate(layers):
        prefix = family.layer_prefix(decoder_layers, index)
        for name, tensor in stored_tensors(layer, family):
            # safetensors refuses tensors that share memory, as parts of stacked experts do.
            stored = family.common_tensors.get(name, prefix + name)
            yield stored, tensor.detach().clone().contiguous()

"""Writing a checkpoint with MTP tensors under the names that its family released them with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpc.models.family import MTP_COUNT_NAMES, ModelFamily
from mtpc.models.hf import MTPLayer
from mtpc.models.mtp_layers import stored_tensors

_INDEX = "model.safetensors.index.json"


def save_checkpoint(
    model: Any, mtp_layers: Sequence[MTPLayer], directory: Path, family: ModelFamily
) -> Path:
    """Write a model and its MTP layers as other programs (transformers, vLLM, mtpc) read them.

    Args:
        model: a transformers model of the family's class.
        mtp_layers: its MTP layers, in order; none is fine.
        directory: created if it is not there.
        family: whose names and architecture the checkpoint bears.

    Returns:
        `directory`. The MTP tensors are in `model.safetensors`, or, where transformers wrote
        shards, in one of their own that the index names.
    """
    model.save_pretrained(directory)
    named = dict(_named(model, mtp_layers, family))
    if (directory / _INDEX).is_file():
        _add_shard(directory, named)
    else:
        path = directory / "model.safetensors"
        save_file({**load_file(path), **named}, path, metadata={"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = [family.architectures[0]]
    text = config.get("text_config", config)
    announced = [name for name in MTP_COUNT_NAMES if name in text] or MTP_COUNT_NAMES[-1:]
    text.update(dict.fromkeys(announced, len(mtp_layers)))
    text.update({**family.released_entries, **text})
    path.write_text(json.dumps(config, indent=2) + "\n")
    return directory


def _named(
    model: Any, layers: Sequence[MTPLayer], family: ModelFamily
) -> Iterator[tuple[str, Tensor]]:
    layers_before = model.config.get_text_config(decoder=True).num_hidden_layers
    for index, layer in enumerate(layers):
        prefix = family.layer_prefix(layers_before, index)
        for name, tensor in stored_tensors(layer, family):
            # A file holds each tensor in full: views of stacked experts are copied out.
            yield prefix + name, tensor.detach().clone().contiguous()


def _add_shard(directory: Path, tensors: dict[str, Tensor]) -> None:
    """A further file beside the shards that transformers wrote, and its names in the index."""
    name = "model-mtp.safetensors"
    save_file(tensors, directory / name, metadata={"format": "pt"})
    index = json.loads((directory / _INDEX).read_text())
    index["weight_map"].update(dict.fromkeys(tensors, name))
    index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")

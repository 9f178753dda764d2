"""Checkpoints of released sizes with random weights, written tensor by tensor, plain or in int4."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness.models import (
    INITIALIZER_RANGE,
    Shape,
    without_weights,
)
from mtpc.weights.grouped_recipes import GroupSpec
from mtpc.weights.json_file import CONFIG
from mtpc.weights.quantise import spec_by_scheme
from mtpc.weights.shards import ShardWriter
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
        scheme: of `mtpc.option_checks.SCHEMES`, in int4; None: all weights are bfloat16.
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

"""Reading checkpoints: config.json, safetensors, and the MTP tensors transformers drops."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mtpc.errors import CheckpointError
from mtpc.models.family import ModelFamily
from mtpc.models.hf import MTPLayer

_EXPERT = re.compile(
    r"^(?P<stem>.*mlp\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.weight$"
)


class Checkpoint:
    """A directory with config.json and safetensors files, every header checked on opening.

    Args:
        directory: the checkpoint's path.

    Raises:
        CheckpointError: no such directory, no config.json, no safetensors file, or a file whose
            header or length is not what safetensors wrote.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.config = self._read_config()
        self.files = {name: path for path in self._shards() for name in _tensor_names(path)}

    def _read_config(self) -> dict[str, Any]:
        path = self.directory / "config.json"
        if not self.directory.is_dir():
            raise CheckpointError(
                f"{str(self.directory)!r} is not a directory; expected a local checkpoint with "
                "config.json and *.safetensors (mtpc downloads nothing)"
            )
        if not path.is_file():
            raise CheckpointError(f"{self.directory} has no config.json; is it a checkpoint?")
        try:
            return json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from None

    def _shards(self) -> list[Path]:
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            shards = [self.directory / name for name in names]
        else:
            shards = sorted(self.directory.glob("*.safetensors"))
        if not shards:
            raise CheckpointError(f"{self.directory} holds no *.safetensors file")
        for path in shards:
            if not path.is_file():
                raise CheckpointError(f"{path} is named in the index but missing")
        return shards

    def names(self, prefix: str = "") -> list[str]:
        """Tensor names that begin with `prefix`."""
        return [name for name in self.files if name.startswith(prefix)]

    def tensor(self, name: str) -> Tensor:
        """One tensor, as stored."""
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name)


def _tensor_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is not a complete safetensors file: {error}; "
            "copy or download it again"
        ) from None


def load_mtp_layer(
    checkpoint: Checkpoint,
    family: ModelFamily,
    config: Any,
    index: int,
    block_class: type[nn.Module],
    norm_class: type[nn.Module],
    dtype: torch.dtype,
) -> MTPLayer:
    """Build MTP layer `index` and fill it from the checkpoint.

    Args:
        checkpoint: where its tensors are.
        family: names and wiring.
        config: the target's config (a private copy, set to mtpc's seams).
        index: MTP layer, from 0.
        block_class: the decoder layer class of the target.
        norm_class: the target's norm class.
        dtype: dtype of the parameters; buffers keep float32 or the wider dtype asked for.

    Raises:
        CheckpointError: tensors missing, unconsumed or of another shape; the message lists them.
    """
    prefix = family.layer_prefix(config.num_hidden_layers, index)
    stored = {name[len(prefix) :]: name for name in checkpoint.names(prefix)}
    scales = sorted(name for name in stored if "weight_scale" in name)
    if scales:
        raise CheckpointError(
            f"MTP layer {index} of {checkpoint.directory} is block-quantised ({scales[0]} ...); "
            "dequantise the checkpoint to bfloat16 first"
        )
    with torch.device("meta"):
        block = block_class(family.block_config(config), config.num_hidden_layers + index)
        layer = MTPLayer(family.wiring, config, block, norm_class)
    for name in family.shared_tensors:
        stored.pop(name, None)
    tensors = {_module_name(name, family): checkpoint.tensor(full) for name, full in stored.items()}
    _fill(layer, _stack_experts(tensors), dtype, f"MTP layer {index} of {checkpoint.directory}")
    return layer.eval()


def _module_name(name: str, family: ModelFamily) -> str:
    """Checkpoint name within an MTP layer -> name within `MTPLayer`."""
    wiring = family.wiring
    joints = {
        wiring.embedding_norm: "embedding_norm",
        wiring.hidden_norm: "hidden_norm",
        wiring.projection: "projection",
        wiring.final_norm: "final_norm",
    }
    stem, _, leaf = name.rpartition(".")
    return f"{joints[stem]}.{leaf}" if stem in joints else f"block.{name}"


def _stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Per-expert projections -> transformers' stacked `gate_up_proj` [E, 2I, H], `down_proj`."""
    out: dict[str, Tensor] = {}
    parts: dict[str, dict[tuple[str, int], Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.match(name)
        if match is None:
            out[name] = tensor
        else:
            key = (match["part"], int(match["index"]))
            parts.setdefault(match["stem"], {})[key] = tensor
    for stem, by_part in parts.items():
        count = 1 + max(index for _, index in by_part)
        absent = [
            f"{i}.{p}_proj"
            for i in range(count)
            for p in ("gate", "up", "down")
            if (p, i) not in by_part
        ]
        if absent:
            raise CheckpointError(f"{stem}: experts lack {', '.join(absent[:8])}")
        rows = [torch.cat([by_part["gate", i], by_part["up", i]]) for i in range(count)]
        out[f"{stem}.gate_up_proj"] = torch.stack(rows)
        out[f"{stem}.down_proj"] = torch.stack([by_part["down", i] for i in range(count)])
    return out


def _fill(layer: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, what: str) -> None:
    """Assign tensors to a module built on the meta device; every name must match."""
    expected = layer.state_dict()
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(
            f"{what}: missing {_listing(missing)}; unexpected {_listing(unknown)}"
        )
    shapes = [
        f"{name} is {tuple(t.shape)}, expected {tuple(expected[name].shape)}"
        for name, t in tensors.items()
        if t.shape != expected[name].shape
    ]
    if shapes:
        raise CheckpointError(f"{what}: {'; '.join(shapes[:4])}")
    parameters = {name for name, _ in layer.named_parameters()}
    # Buffers (the router's selection bias) stay in float32 at least, as transformers keeps them.
    wide = torch.promote_types(dtype, torch.float32)
    cast = {n: t.to(dtype if n in parameters else wide) for n, t in tensors.items()}
    layer.load_state_dict(cast, assign=True)
    layer.requires_grad_(False)


def _listing(names: list[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


def check_finite(tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Refuse weights that hold NaN or infinity: they would decode to garbage without a word.

    Raises:
        CheckpointError: names of the first tensors at fault.
    """
    bad = [
        name for name, t in tensors if t.is_floating_point() and not bool(torch.isfinite(t).all())
    ]
    if bad:
        raise CheckpointError(
            f"{what}: {len(bad)} tensor(s) hold NaN or infinity: {_listing(bad)}; "
            "the checkpoint is damaged or was saved from a diverged run"
        )

"""MiMo-V2's released configs, and the fused projections of MiMo-V2.5 and later."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.explained import explained
from helpers.released.mimo_v2 import released_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.models.families.mimo_v2 import config_entries
from mtpc.models.load import load
from mtpc.weights.checkpoint import Checkpoint

CHUNKS = 2
"""As many as key/value heads of a full layer, of which the tiny model here has two."""
WIDTHS = {"q_proj": 4 * 24, "k_proj": 2 * 24, "v_proj": 2 * 16}
"""Rows of a full layer's projections; a sliding layer has twice the keys and values."""


def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each layer's projections as one tensor: a chunk has its queries, keys and values in turn."""
    out = dict(tensors)
    for stem in [n.removesuffix("q_proj.weight") for n in tensors if n.endswith("q_proj.weight")]:
        parts = [out.pop(f"{stem}{part}.weight").chunk(CHUNKS) for part in WIDTHS]
        chunks = [part[chunk] for chunk in range(CHUNKS) for part in parts]
        out[f"{stem}qkv_proj.weight"] = torch.cat(chunks)
    return out


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """pair(**changes): a checkpoint, and the same as released, with changes of its config."""
    from helpers import tiny

    def make(fused: bool = True, **changes: Any) -> tuple[Path, Path]:
        plain, other = tmp_path / "plain", tmp_path / "released"
        tiny.make_checkpoint("mimo_v2", plain, num_key_value_heads=2, rms_norm_eps=1e-3)
        other.mkdir()
        config = json.loads((plain / "config.json").read_text())
        layout = {"attention_projection_layout": "fused_qkv"} if fused else {}
        text = json.dumps(released_config(config, **layout, **changes))
        (other / "config.json").write_text(text)
        tensors = load_file(plain / "model.safetensors")
        tensors = fuse(tensors) if fused else tensors
        save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
        return plain, other

    return make


@pytest.mark.parametrize(
    ("fused", "changes"),
    [
        (True, {}),
        (False, {"rope_scaling": None}),
        (False, {"rope_scaling": {"type": "default"}}),
        (False, {"rope_scaling": {"rope_type": "default"}}),
        (True, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}),
    ],
)
def test_released_checkpoints(
    fused: bool, changes: dict[str, Any], pair: Callable[..., tuple[Path, Path]]
) -> None:
    """The same weights and the same config, by another way; and a warm start finds all of them."""
    plain, other = pair(fused, **changes)
    wanted, found = load(plain, "float32", True), load(other, "float32", True)
    assert found.config.layer_types == wanted.config.layer_types
    assert found.config.mlp_layer_types == wanted.config.mlp_layer_types
    assert found.config.rms_norm_eps == 1e-3
    assert found.config.sliding_window == wanted.config.sliding_window
    assert found.config.rope_parameters == wanted.config.rope_parameters
    weights = wanted.weights()
    assert found.weights().keys() == weights.keys()
    for name, tensor in found.weights().items():
        assert torch.equal(tensor, weights[name]), name
    assert explained(found).keys() == weights.keys()


def test_fused_projections_of_blocks(pair: Callable[..., tuple[Path, Path]]) -> None:
    """FP8 with blocks that begin anew in each chunk, as released: 48 + 24 + 16 rows by 32."""
    _, directory = pair(quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]})
    path = directory / "model.safetensors"
    tensors, name = load_file(path), "model.layers.1.self_attn.qkv_proj.weight"
    weight = tensors[name]
    assert weight.shape == (CHUNKS * 88, 64)
    scales = torch.rand(CHUNKS * 3, 2) + 0.5
    stored = (weight * 50).to(torch.float8_e4m3fn)
    save_file({**tensors, name: stored, f"{name}_scale_inv": scales}, path)
    checkpoint = Checkpoint(directory)
    whole = [
        stored[row].float() * scales[row // 88 * 3 + row % 88 // 32].repeat_interleave(32)
        for row in range(CHUNKS * 88)
    ]
    rows = torch.stack(whole).view(CHUNKS, 88, 64)  # float32, as config.json announces.
    for part, (start, stop) in {"q": (0, 48), "k": (48, 72), "v": (72, 88)}.items():
        found = checkpoint.tensor(name.replace("qkv", part))
        assert torch.equal(found, rows[:, start:stop].flatten(0, 1)), part


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling"),
        ({"swa_num_key_value_heads": 2}, "swa_num_key_value_heads 2; expected 4"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias True; expected"),
    ],
)
def test_other_layers_are_refused(changes: dict[str, Any], message: str) -> None:
    entries = {"num_key_value_heads": 2, "num_attention_heads": 4, **changes}
    with pytest.raises(UnsupportedModelError, match=message):
        config_entries(entries)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 1}, r"qkv_proj\.weight is .*; expected 1 chunks"),
        ({"attention_projection_layout": "other"}, "expected 'split' or"),
    ],
)
def test_other_layouts_are_refused(
    changes: dict[str, Any], message: str, pair: Callable[..., tuple[Path, Path]]
) -> None:
    _, directory = pair()
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(directory)

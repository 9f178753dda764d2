"""Checkpoints in NVFP4, as NVIDIA's ModelOpt writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP, LARGEST, LARGEST_SCALE = 16, 6.0, 448.0
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
PLAIN = ("embed", "head", "norm", "gate.weight")


def nvfp4_parts(weight: Tensor) -> dict[str, Tensor]:
    """Ending of a tensor's name -> the tensor, for a weight [N, K]."""
    whole = weight.abs().amax() / (LARGEST * LARGEST_SCALE)
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / LARGEST / whole).to(torch.float8_e4m3fn)
    numbers = groups / (scales.float() * whole).clamp_min(1e-12)[..., None]
    places = (numbers.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (numbers < 0)
    codes = places.flatten(1).to(torch.uint8)
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    return {"": pairs, "_scale": scales, "_scale_2": whole.float()}


def write_nvfp4(source: Path, out: Path, keep: tuple[str, ...] = ()) -> Path:
    """A copy of a checkpoint with linear layers in NVFP4, but for those whose name has such a part;
    its config in hf_quant_config.json."""
    shutil.copytree(source, out)
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        fits = tensor.dim() == 2 and tensor.shape[1] % GROUP == 0
        if fits and not any(part in name for part in (*PLAIN, *keep)):
            stored |= {f"{name}{end}": part for end, part in nvfp4_parts(tensor.float()).items()}
            stored[f"{name.removesuffix('weight')}input_scale"] = torch.ones(())
        else:
            stored[name] = tensor.bfloat16()
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    says = {"quant_algo": "NVFP4", "group_size": GROUP, "kv_cache_quant_algo": None}
    left_out = ["lm_head", *(f"*{part}*" for part in keep)]
    quantization = {"quantization": {**says, "exclude_modules": left_out}}
    (out / "hf_quant_config.json").write_text(json.dumps(quantization))
    return out

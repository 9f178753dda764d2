"""Against the library compressed-tensors, where it is installed: what it and we write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.quantise import SCHEMES
from mtpc.weights.write_quantised import quantise_checkpoint

N, K = 64, 256
NAME = "model.layers.0.mlp.up_proj"

INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group"}
LIBRARY: list[tuple[str, dict[str, Any], tuple[int, int]]] = [
    ("pack-quantized", {**INT4, "group_size": 32, "symmetric": True}, (N, K // 32)),
    ("pack-quantized", {**INT4, "group_size": 128, "symmetric": False}, (N, K // 128)),
    ("pack-quantized", {**INT4, "strategy": "channel", "symmetric": True}, (N, 1)),
    ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, (N, 1)),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, (N, 1)),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, (1,)),
]


@pytest.mark.parametrize(("name", "weights", "grid"), LIBRARY)
def test_what_the_library_writes(
    name: str, weights: dict[str, Any], grid: tuple[int, ...], tmp_path: Path
) -> None:
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(name)
    state = {"weight": torch.randn(N, K), "weight_scale": torch.rand(grid) * 0.2 + 0.1}
    if weights.get("symmetric") is False:
        state["weight_zero_point"] = torch.randint(-8, 8, grid).to(torch.int8)
    stored = compressor.compress(dict(state), scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    tensors = {f"{NAME}.{leaf}": tensor for leaf, tensor in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    says = QuantizationConfig(
        config_groups={"group_0": scheme}, format=name, quantization_status="compressed"
    ).model_dump(mode="json")
    config = {"dtype": "float32", "quantization_config": says}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(
        Checkpoint(tmp_path).tensor(f"{NAME}.weight"), expected.float(), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("scheme", [n for n, scheme in SCHEMES.items() if scheme.block is None])
def test_what_the_library_reads(scheme: str, tmp_path: Path) -> None:
    """Its config parser takes our config, and its values are ours."""
    plain, out = tmp_path / "plain", tmp_path / "out"
    plain.mkdir()
    save_file({f"{NAME}.weight": torch.randn(N, K).bfloat16()}, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    quantise_checkpoint(plain, out, scheme)
    says = json.loads((out / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(says)
    stored = {n.rpartition(".")[2]: t for n, t in load_file(out / "model.safetensors").items()}
    compressor = BaseCompressor.get_value_from_registry(config.format)
    assert set(stored) == set(compressor.compression_param_names(config.config_groups["group_0"]))
    wide = {n: t.float() if n == "weight_scale" else t for n, t in stored.items()}
    expected = compressor.decompress(wide, config.config_groups["group_0"])["weight"]
    found = Checkpoint(out).grouped(f"{NAME}.weight").whole().dequantise()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_nvfp4_as_the_library_dequantises_it(tmp_path: Path) -> None:
    """To the bit, in bfloat16 as it gives it."""
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    weight = torch.randn(N, K)
    whole = 6 * 448 / weight.abs().amax().reshape(1)
    groups = weight.unflatten(1, (-1, 16)).abs().amax(-1) / 6 * whole
    scale = groups.to(torch.float8_e4m3fn).float()
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
    stored = compressor.compress(dict(state), scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    tensors = {f"{NAME}.{leaf}": tensor.contiguous() for leaf, tensor in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    says = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="nvfp4-pack-quantized",
        quantization_status="compressed",
        ignore=["lm_head", "re:.*mtp.*"],
    ).model_dump(mode="json")
    config = {"dtype": "bfloat16", "quantization_config": says}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.specs[f"{NAME}.weight"].form.two_level
    assert torch.equal(checkpoint.tensor(f"{NAME}.weight"), expected.bfloat16())
    error = (checkpoint.tensor(f"{NAME}.weight").float() - weight).norm() / weight.norm()
    assert 0.05 < float(error) < 0.15

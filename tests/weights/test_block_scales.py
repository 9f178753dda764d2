"""Block-scaled FP8 checkpoints run as the bfloat16 weights they stand for, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.compiled import give_kernels
from helpers.explained import explained
from helpers.families import CPU_OPTIONS, TINY
from helpers.theorem import PROMPTS
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import mtpc
from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.models.load import load
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.recipes import make

EAGER = {"backend": "eager", "dtype": "float64", "batch_buckets": (2,), **TINY}
NOTE = "FP8 in blocks of"


def quantise(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """float8 weights and the scales of their blocks, block by block."""
    blocks = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    out, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(blocks)
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[place].abs().max() / 448
            out[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
    return out, scales


def by_hand(weight: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """What the blocks stand for, element by element, in bfloat16."""
    at = torch.arange(weight.shape[0])[:, None] // rows, torch.arange(weight.shape[1]) // columns
    return (weight.float() * scales[at]).bfloat16()


def quantised_pair(
    source: Path, directory: Path, block: tuple[int, int], keep: tuple[str, ...] = ()
) -> tuple[Path, Path]:
    """(FP8 checkpoint, the same dequantised by hand), from a checkpoint in float32."""
    fp8, plain = directory / "fp8", directory / "plain"
    for path in (fp8, plain):
        shutil.copytree(source, path)
    tensors = {n: t.bfloat16() for n, t in load_file(source / "model.safetensors").items()}
    stored, wanted = dict(tensors), dict(tensors)
    kept = ("embed", "head", "norm", "gate.weight", *keep)
    for name in [n for n, t in tensors.items() if t.dim() == 2 and not any(k in n for k in kept)]:
        weight, scales = quantise(tensors[name].float(), *block)
        stored[name], stored[name + "_scale_inv"] = weight, scales
        wanted[name] = by_hand(weight, scales, *block)
    assert sum(n.endswith("weight_scale_inv") for n in stored) > 10
    config = json.loads((source / "config.json").read_text())
    fp8_says = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    for path, saved, more in (
        (fp8, stored, {"quantization_config": fp8_says}),
        (plain, wanted, {}),
    ):
        save_file(saved, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", **more}))
    return fp8, plain


@pytest.mark.parametrize("family", [pytest.param("mimo", marks=pytest.mark.slow), "deepseek_v3"])
def test_fp8_runs_as_the_weights_it_stands_for(
    family: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Target and MTP layer, blocks that do not divide the sizes, experts one by one; a note."""
    fp8, plain = quantised_pair(checkpoint(family), tmp_path, (24, 40), keep=("eh_proj",))
    found, wanted = (mtpc.compile(path, spec_tokens=1, **EAGER) for path in (fp8, plain))
    assert found.loaded is not None
    assert wanted.loaded is not None
    theirs = wanted.loaded.weights()
    assert found.loaded.weights().keys() == theirs.keys()
    for name, weight in found.loaded.weights().items():
        assert torch.equal(weight, theirs[name]), name
    assert found.generate(PROMPTS[3:6], 12) == wanted.generate(PROMPTS[3:6], 12)
    assert found.stats.accepted == wanted.stats.accepted
    assert sum(found.stats.accepted) > 0
    assert any(NOTE in line for line in found.stats.fallbacks)
    assert not any(NOTE in line for line in wanted.stats.fallbacks)


def test_deepseek_v4_as_it_is_released(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """FP8 with exponents for scales, experts in MXFP4, all named X.scale: as their values."""
    source = checkpoint("deepseek_v4")
    paths = tmp_path / "quantised", tmp_path / "plain"
    stored = {n: t.bfloat16() for n, t in load_file(source / "model.safetensors").items()}
    wanted = dict(stored)
    of = Fp8Dequantize(None)
    linears = [n for n, t in stored.items() if t.dim() == 2 and (".experts." in n or ".w" in n)]
    for name in linears:
        weight, scale = stored[name].float(), name.removesuffix("weight") + "scale"
        exponents = torch.full((len(weight), weight.shape[1] // 32), 122, dtype=torch.uint8)
        codes = torch.randint(0, 256, (len(weight), weight.shape[1] // 2)).to(torch.int8)
        if ".experts." not in name:
            grid = [-(-size // 8) for size in weight.shape]
            exponents = torch.randint(121, 124, grid, dtype=torch.uint8)
            codes = (weight * 16).to(torch.float8_e4m3fn)
        stored[name], stored[scale] = codes, exponents.view(torch.float8_e8m0fnu)
        wanted[name] = of._dequantize_one(codes, stored[scale], output_dtype=torch.bfloat16)
    assert sum(tensor.dtype == torch.int8 for tensor in stored.values()) > 20
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) > 5
    says = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [8, 8]}
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    more = {"quantization_config": says, "expert_dtype": "fp4"}
    for path, saved, entries in zip(paths, (stored, wanted), (more, {}), strict=True):
        shutil.copytree(source, path)
        save_file(saved, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config | entries))
    assert len(Checkpoint(paths[0]).specs) == len(linears)
    found, right = (load(path, "float32", needs_mtp=True).weights() for path in paths)
    assert found.keys() == right.keys()
    for name, weight in found.items():
        assert torch.equal(weight, right[name]), name


def test_dtype_defaults_to_bfloat16(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    fp8, _ = quantised_pair(checkpoint("mimo"), tmp_path, (64, 64))
    assert load(fp8, None, needs_mtp=True).dtype == torch.bfloat16


def test_fp8_with_mtp_layers_in_bfloat16(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The target's linears are FP8; the MTP layer, which config.json lists, is as it was."""
    fp8, plain = quantised_pair(checkpoint("mimo"), tmp_path, (24, 40), keep=("mtp_layers",))
    config = json.loads((fp8 / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "model.mtp_layers.0"]
    (fp8 / "config.json").write_text(json.dumps(config))
    specs = Checkpoint(fp8).specs
    assert len(Checkpoint(fp8).quantised) > 10
    assert not any("mtp_layers" in name for name in (*specs, *Checkpoint(fp8).quantised))
    found, wanted = (load(path, None, needs_mtp=True).weights() for path in (fp8, plain))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in found.items())


@pytest.mark.parametrize("family", ["mimo", "deepseek_v3"])
def test_every_weight_has_a_recipe(
    family: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """What a warm start makes of the files is what a cold one loaded."""
    fp8, _ = quantised_pair(checkpoint(family), tmp_path, (24, 40))
    loaded, again = load(fp8, "float32", needs_mtp=True), Checkpoint(fp8)
    recipes = explained(loaded)
    assert recipes.keys() == loaded.weights().keys()
    made = [(n, make(r, again.tensor)) for n, r in recipes.items() if r is not None]
    assert len(made) > 20
    assert all(torch.equal(tensor.float(), loaded.weights()[name]) for name, tensor in made)


@pytest.mark.slow
def test_a_warm_start_of_fp8(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The cache's recipes read the scales: nothing is traced again, nothing differs."""
    fp8, plain = quantised_pair(checkpoint("mimo"), tmp_path, (24, 40))
    tmp_path.chmod(0o755)
    give_kernels(tmp_path / "cache")
    options: dict[str, Any] = {**CPU_OPTIONS, "cache_dir": tmp_path / "cache", "dtype": "float32"}
    cold = mtpc.compile(fp8, **options)
    assert cold.loaded is None  # All of it came out of the cache again.
    warm = mtpc.compile(fp8, **{**options, "frozen": True})
    wanted = mtpc.compile(plain, **{**EAGER, "dtype": "float32"}, spec_tokens=3)
    texts = wanted.generate(PROMPTS[3:5], 12)
    assert cold.generate(PROMPTS[3:5], 12) == warm.generate(PROMPTS[3:5], 12) == texts
    assert any(NOTE in line for line in warm.stats.fallbacks)


@pytest.mark.slow
def test_a_warm_start_of_fp8_needs_no_compiler(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """In bfloat16, where weights are dequantised and then packed: experts, and latent attention's
    parts of a weight. A process without compiler gives what the bfloat16 files give. 20 divides no
    weight's inputs, so that none is read as codes (their products round in another way)."""
    fp8, plain = quantised_pair(checkpoint("deepseek_v3"), tmp_path, (24, 20))
    tmp_path.chmod(0o755)
    give_kernels(tmp_path / "cache")
    options: dict[str, Any] = {**CPU_OPTIONS, "dtype": "bfloat16"}
    cold = mtpc.compile(fp8, cache_dir=tmp_path / "cache", **options)
    by_hand = mtpc.compile(plain, cache_dir=tmp_path / "cache", **options)
    wanted = by_hand.generate(PROMPTS[2:8], 16)
    assert cold.generate(PROMPTS[2:8], 16) == wanted
    code = f"""
import sys, json, torch
torch.set_num_threads(1)
import mtpc
options = json.loads(sys.argv[3])
spec = mtpc.compile(sys.argv[1], cache_dir=sys.argv[2], frozen=True, **options)
print(json.dumps(spec.generate({PROMPTS[2:8]!r}, 16)))
heavy = ("transformers", "torch._inductor", "torch._dynamo", "sympy", "mtpc.models")
print(json.dumps([name for name in heavy if name in sys.modules]))
print(json.dumps([spec.stats.accepted, list(spec.stats.fallbacks)]))
"""
    arguments = [str(fp8), str(tmp_path / "cache"), json.dumps(options)]
    clean = {"PATH": "/nonexistent", "CXX": "no-compiler", "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    tokens, heavy, (accepted, fallbacks) = map(json.loads, done.stdout.splitlines())
    assert tokens == wanted
    assert accepted == by_hand.stats.accepted == cold.stats.accepted
    assert sum(accepted) > 0
    assert heavy == []
    assert any(NOTE in line for line in fallbacks)
    assert not any(NOTE in line for line in by_hand.stats.fallbacks)


def edit(directory: Path, **changes: Tensor | None) -> Path:
    """Rewrite tensors of a checkpoint, `.` written as `__`; None takes one away."""
    tensors = load_file(directory / "model.safetensors")
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


UP = "model__layers__0__mlp__up_proj__weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({UP + "_scale_inv": None}, r"F8_E4M3\[96,64\] and has no .*up_proj\.weight_scale_inv"),
        ({UP + "_scale_inv": torch.ones(96, 1)}, r"F32\[96,1\]; expected F32\[4,2\]"),
        ({UP + "_scale_inv": torch.ones(4, 2, dtype=torch.uint8)}, r"is U8\[4,2\]; expected F32"),
        ({UP: torch.ones(96, 64)}, r"is F32\[96,64\] and has block scales"),
        ({UP: None}, r"weight_scale_inv belongs to no quantised weight of"),
        ({UP + "_scale": torch.ones(1)}, r"weight_scale belongs to no quantised weight of"),
        ({UP: torch.ones(96, 64).to(torch.float8_e5m2)}, r"F8_E5M2\[96,64\] and has block scales"),
    ],
)
def test_other_layouts_are_refused(
    changes: dict[str, Any], message: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    fp8, _ = quantised_pair(checkpoint("mimo"), tmp_path, (24, 40))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(edit(fp8, **changes))


def test_codes_that_nothing_announces_are_refused(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Only where all tensors look plain is no format asked. With scales, the codes are found."""
    fp8, _ = quantised_pair(checkpoint("mimo"), tmp_path, (128, 128))
    config = json.loads((fp8 / "config.json").read_text())
    del config["quantization_config"]
    (fp8 / "config.json").write_text(json.dumps(config))
    assert len(Checkpoint(fp8).quantised) > 10
    scales = {
        name.replace(".", "__"): None
        for name in load_file(fp8 / "model.safetensors")
        if name.endswith("_scale_inv")
    }
    with pytest.raises(CheckpointError, match=r"F8_E4M3.* and has no .*weight_scale_inv"):
        Checkpoint(edit(fp8, **scales))


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (
            {"quant_method": "gptq_4"},
            r"quant_method 'gptq_4' \(the nearest is 'gptq'\); expected one",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({"quant_method": "fp8"}, r"expected F32\[1,1\], a scale for each block of 128 x 128"),
    ],
)
def test_other_methods_are_refused(
    says: dict[str, Any], message: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    fp8, _ = quantised_pair(checkpoint("mimo"), tmp_path, (24, 40))
    config = json.loads((fp8 / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps({**config, "quantization_config": says}))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(fp8)


def test_a_model_object_in_fp8_is_refused(oracle: Callable[..., Any]) -> None:
    model = transformers.Qwen2ForCausalLM(oracle("mimo").model.config)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"1 parameter\(s\) of 8 bits"):
        mtpc.compile(model, spec_tokens=0, backend="eager")

"""MXFP4, NVFP4 and ModelOpt: what is broken, two levels of scales, and where the config stands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.formats import (
    E2M1,
    FLOAT,
    MXFP4,
    NAME,
    NVFP4,
    K,
    N,
    Tensors,
    compressed,
    compressed_nvfp4,
    edited,
    modelopt,
    modelopt_fp8,
    mxfp4,
    nvfp4,
    save,
    words,
)
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mtpc.errors import CheckpointError
from mtpc.weights import recipes
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.formats.nvfp4 import decode
from mtpc.weights.grouped import GroupedWeight, GroupForm
from mtpc.weights.grouped_recipes import GroupSpec
from mtpc.weights.recipes import Grouped, Rows
from mtpc.weights.stored import StoredWeights

OSS = mxfp4("weight_blocks", "weight_scales", MXFP4)
FP4 = mxfp4("weight_packed", "weight_scale", compressed("mxfp4-pack-quantized", **FLOAT))
V4 = mxfp4("weight", "scale", {"quant_method": "fp8"}, dtype=torch.float8_e8m0fnu)
OPT, NV = nvfp4(modelopt("NVFP4")), nvfp4(compressed_nvfp4())
OPT8 = modelopt_fp8("FP8", torch.ones(()))
BROKEN: list[tuple[Tensors, Any, str]] = [
    (edited(OSS[0], weight_scales=None), MXFP4, r"weight_scales is missing; expected U8\[24,2\]"),
    (
        edited(OSS[0], weight_blocks=OSS[0]["weight_blocks"][..., :8].contiguous()),
        MXFP4,
        r"weight_blocks is U8\[24,2,8\]; expected U8\[24,2,16\]",
    ),
    (edited(OSS[0], weight_blocks=words(24)), MXFP4, r"weight_blocks is I32\[24\]; expected U8"),
    (edited(FP4[0], weight_scale=None), FP4[2], "weight_scale is missing; expected U8"),
    (
        FP4[0],
        compressed("nvfp4-pack-quantized", **{**FLOAT, "group_size": 16}),
        r"weight_scale is U8\[24,2\]; expected F8_E4M3\[24,4\]",
    ),
    (edited(FP4[0], weight_packed=words(24, 32)), FP4[2], "weight_packed is I32.*; expected U8"),
    (edited(NV[0], weight_scale=None), NV[2], r"weight_scale is missing; expected F8_E4M3\[24,4"),
    (edited(NV[0], weight_global_scale=None), NV[2], r"global_scale is missing; expected F32\[1\]"),
    (edited(NV[0], weight_packed=words(24, 32)), NV[2], r"weight_packed is I32.*; expected U8"),
    (NV[0], compressed_nvfp4(group_size=64), "has group_size 64; expected 32 or 16"),
    (edited(OPT[0], weight_scale=None), OPT[2], r"weight_scale is missing; expected F8_E4M3\[24,4"),
    (edited(OPT[0], weight_scale_2=None), OPT[2], r"weight_scale_2 is missing; expected F32\[1\]"),
    (
        edited(OPT[0], weight_scale=OPT[0]["weight_scale"].float()),
        OPT[2],
        r"weight_scale is F32\[24,4\]; expected F8_E4M3\[24,4\]",
    ),
    (
        edited(OPT[0], weight_scale_2=torch.ones(24)),
        OPT[2],
        r"weight_scale_2 is F32\[24\]; expected F32\[1\] or F32\[\], the scale of the whole",
    ),
    (
        edited(OPT[0], weight=OPT[0]["weight"][:, :28].contiguous()),
        OPT[2],
        "weight has 56 inputs, and .* groups of 16; expected a size that divides",
    ),
    (
        edited(OPT[0], weight=OPT[0]["weight"][0].contiguous()),
        OPT[2],
        r"weight is U8\[32\]; expected U8\[1,8\], two floating-point codes a byte",
    ),
    (edited(OPT8[0], weight_scale=None), OPT8[2], "weight_scale is missing; expected F16"),
    (edited(OPT8[0], weight_scale=torch.ones(7)), OPT8[2], r"F32\[7\]; expected F16\[24,1\]"),
    (edited(OPT8[0], weight=None), OPT8[2], "weight_scale belongs to no quantised weight"),
    (edited(OPT[0], pre_quant_scale=torch.ones(K)), OPT[2], "pre_quant_scale belongs to no quant"),
    (OPT[0], modelopt("NVFP4_AWQ"), "quant_algo 'NVFP4_AWQ'; expected one of FP8, .*NVFP4"),
    (
        OPT[0],
        modelopt("MIXED_PRECISION", quantized_layers={NAME: {"quant_algo": "W4A16_AWQ"}}),
        f"quant_algo 'W4A16_AWQ' for {NAME}; expected one of",
    ),
    (OPT[0], modelopt("NVFP4", quantized_layers=[NAME]), "quantized_layers .*; expected an object"),
    (
        edited(V4[0], scale=V4[0]["scale"][:, :1].contiguous()),
        V4[2],
        r"scale is F8_E8M0\[24,1\]; expected F8_E8M0\[24,2\]",
    ),
]


@pytest.mark.parametrize(("stored", "says", "message"), BROKEN, ids=[case[2] for case in BROKEN])
def test_what_is_broken_is_named(stored: Tensors, says: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(save(tmp_path, stored, says))


def test_a_stack_of_experts_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """gpt-oss's layout: inputs are before outputs in the model, and after them in codes."""
    experts, name = 3, "model.layers.0.mlp.experts.gate_up_proj"
    stored = {
        f"{name}_blocks": torch.randint(0, 256, (experts, N, K // 32, 16), dtype=torch.uint8),
        f"{name}_scales": torch.randint(100, 150, (experts, N, K // 32), dtype=torch.uint8),
    }
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(tmp_path)
    wanted = convert_moe_packed_tensors(*stored.values())
    assert torch.equal(checkpoint.tensor(name), wanted)
    assert checkpoint.meta_tensor(name).shape == wanted.shape
    spec = checkpoint.specs[name]
    assert spec == GroupSpec(GroupForm("e2m1", 32), "uint8", turned=True)
    assert torch.equal(checkpoint.grouped(name).whole().dequantise().mT.bfloat16(), wanted)
    recipe, held = Grouped("codes", spec, name), StoredWeights(checkpoint, {name: name})
    packed = held.make(recipe)
    memory = recipes.allocate(recipe, checkpoint.meta_tensor)
    assert (memory.shape, memory.dtype) == (packed[recipe].shape, packed[recipe].dtype)
    assert recipes.from_json(recipes.to_json(recipe)) == recipe
    part = Rows(((1, 3),), name)
    assert recipes.spec_of(part, checkpoint.specs) == spec
    assert recipes.spec_of(replace(part, dim=1), checkpoint.specs) is None


@pytest.mark.parametrize("divides", [True, False], ids=["compressed-tensors", "ModelOpt"])
def test_two_levels_of_scales_are_rounded_once(divides: bool) -> None:
    """Every float8 by 300 float32, to the bits of the product or quotient in float32."""
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = scales[scales.float().isfinite()]
    for whole in torch.exp2(40 * torch.rand(300) - 20)[:, None]:
        codes = torch.randint(0, 256, (1, 8 * len(scales)), dtype=torch.uint8)
        parts = {"codes": codes, "scales": scales[None], "whole": whole}
        decoded = decode(parts, divides)
        found = GroupedWeight(NVFP4, decoded.codes, decoded.scales)
        of_groups = scales.float() / whole if divides else scales.float() * whole
        places = torch.stack((codes & 15, codes >> 4), -1).flatten()
        signed = torch.tensor([*E2M1, *(-value for value in E2M1)])[places.int()]
        wanted = signed * of_groups.repeat_interleave(16)
        assert torch.equal(found.dequantise()[0], wanted)
        assert torch.equal(found.widened().scales[0] * 2, of_groups)


BAD = OPT[0]["weight_scale"].view(torch.uint8).clone()
BAD[3, 1] = 0x7F  # NaN.


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_scale_2": torch.tensor(torch.inf)},
        {"weight_scale": BAD.view(torch.float8_e4m3fn)},
    ],
    ids=["weight", "group"],
)
def test_scales_that_are_no_numbers_are_found(changes: Tensors, tmp_path: Path) -> None:
    """Of the weight or of a group, as they are packed."""
    name = f"{NAME}.weight"
    checkpoint = Checkpoint(save(tmp_path, edited(OPT[0], **changes), OPT[2]))
    weights = StoredWeights(checkpoint, {name: name})
    weights.make(Grouped("scales", checkpoint.specs[name], name))
    with pytest.raises(CheckpointError, match=r"NaN or infinity: .*up_proj\.weight"):
        weights.check()


@pytest.mark.parametrize("where", ["config.json", "nested", "hf_quant_config.json"])
def test_modelopt_with_plain_mtp_layers(where: str, tmp_path: Path) -> None:
    """FP8 and NVFP4 in one checkpoint; the config in three places. The list errs, as released ones
    do: it names a module that is quantised, and not all of the MTP layer."""
    layers = {NAME: {"quant_algo": "NVFP4", "group_size": 16}, "model.other": {"quant_algo": "FP8"}}
    apart = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    apart |= {"kv_cache_quant_algo": "FP8", "exclude_modules": ["model.other*", "mtp.layers.0*"]}
    (four, at, _), (eight, _, _) = OPT, OPT8
    more = {f"model__other__{leaf}": tensor for leaf, tensor in eight.items()}
    more |= {"mtp__fc__weight": torch.ones(4, 4), "model__k_proj__k_scale": torch.ones(())}
    says: Any = {"quant_method": "modelopt_mixed", **apart}
    if where == "nested":
        says = {"quant_method": "modelopt", "quantization": apart}
    save(tmp_path, four, says, **more)
    if where == "hf_quant_config.json":
        (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
        (tmp_path / where).write_text(json.dumps({"quantization": apart, "producer": {}}))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensors.keys() == {f"{NAME}.weight", "model.other.weight", "mtp.fc.weight"}
    forms = {name: spec.form for name, spec in checkpoint.specs.items()}
    assert forms == {f"{NAME}.weight": NVFP4, "model.other.weight": GroupForm("float8", K)}
    assert torch.equal(checkpoint.tensor("mtp.fc.weight"), torch.ones(4, 4))
    assert abs(float(checkpoint.tensor(f"{NAME}.weight")[3, 5]) - at(3, 5)) <= 1e-6 * abs(at(3, 5))


def test_a_file_of_modelopt_that_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": "FP8"}))
    with pytest.raises(CheckpointError, match=r"quant_config\.json: quantization is text 'FP8'"):
        Checkpoint(tmp_path)

"""Quantised formats against their definitions: loops over single bits that share no code with mtpc.

Stored tensors are random, so that every bit of a word counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mtpc.errors import CheckpointError
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.formats.nvfp4 import decode
from mtpc.weights.grouped import GroupedWeight, GroupForm
from mtpc.weights.grouped_recipes import GroupSpec
from mtpc.weights.recipes import Grouped
from mtpc.weights.stored import StoredWeights

N, K = 24, 64
NAME = "model.layers.0.mlp.up_proj"
Tensors = dict[str, Tensor]
At = Callable[[int, int], float]
"""(row, input) -> the value of a weight."""


def words(*shape: int) -> Tensor:
    """Random int32, all 32 bits of them."""
    return torch.randint(-(2**31), 2**31, shape).int()


def bits_of(words: Tensor, at: tuple[int, ...], place: int, bits: int) -> int:
    """Field `place` of an int32, counted from the low bits."""
    return (int(words[at]) & 0xFFFFFFFF) >> (place * bits) & (2**bits - 1)


def scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape) + 0.1).to(dtype)


def packed(bits: int, group: int, symmetric: bool, ordered: bool = True) -> tuple[Tensors, At, Any]:
    """compressed-tensors, pack-quantized."""
    per, groups = 32 // bits, K // group
    codes, scale = words(N, K // per), scales(N, groups, dtype=torch.bfloat16)
    zeros, order = words(N // per, groups), torch.arange(K) // group
    if not ordered:
        order = order[torch.randperm(K)]
    stored = {"weight_packed": codes, "weight_scale": scale, "weight_shape": torch.tensor([N, K])}
    stored |= {} if symmetric else {"weight_zero_point": zeros}
    stored |= {} if ordered else {"weight_g_idx": order.int()}

    def at(row: int, column: int) -> float:
        code = bits_of(codes, (row, column // per), column % per, bits)
        g = int(order[column])
        zero = 2 ** (bits - 1)
        if not symmetric:
            zero = bits_of(zeros, (row // per, g), row % per, bits)
        return (code - zero) * float(scale[row, g])

    settings = dict(num_bits=bits, type="int", symmetric=symmetric, group_size=group)
    return stored, at, compressed("pack-quantized", strategy="group", **settings)


def compressed(name: str, **weights: Any) -> dict[str, Any]:
    """quantization_config of compressed-tensors."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": groups,
        "ignore": ["lm_head", "re:.*gate$"],
    }


def int8(symmetric: bool) -> tuple[Tensors, At, Any]:
    """compressed-tensors, int-quantized, a scale for each channel."""
    codes = torch.randint(-128, 128, (N, K)).to(torch.int8)
    scale, zeros = scales(N, 1, dtype=torch.float32), torch.randint(-128, 128, (N, 1)).char()
    stored = {"weight": codes, "weight_scale": scale}
    stored |= {} if symmetric else {"weight_zero_point": zeros}

    def at(row: int, column: int) -> float:
        zero = 0 if symmetric else int(zeros[row, 0])
        return (int(codes[row, column]) - zero) * float(scale[row, 0])

    settings = dict(num_bits=8, type="int", symmetric=symmetric, strategy="channel")
    return stored, at, compressed("int-quantized", **settings)


def floats(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def float8(strategy: str, scale: Tensor, **more: Any) -> tuple[Tensors, At, Any]:
    """compressed-tensors, float-quantized."""
    codes = floats(N, K)
    rows, columns = scale.shape if scale.dim() == 2 else (1, 1)

    def at(row: int, column: int) -> float:
        place = scale.reshape(rows, columns)[row * rows // N, column * columns // K]
        return float(codes[row, column].float()) * float(place)

    stored = {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}
    settings = dict(num_bits=8, type="float", strategy=strategy, **more)
    return stored, at, compressed("float-quantized", **settings)


def blocks(rows: int, columns: int) -> tuple[Tensors, At, Any]:
    """DeepSeek's blocks."""
    codes, scale = floats(N, K), scales(-(-N // rows), -(-K // columns), dtype=torch.float32)

    def at(row: int, column: int) -> float:
        return float(codes[row, column].float()) * float(scale[row // rows, column // columns])

    says = {"quant_method": "fp8", "weight_block_size": [rows, columns]}
    return {"weight": codes, "weight_scale_inv": scale}, at, says


E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
MXFP4 = {"quant_method": "mxfp4"}
FLOAT = dict(num_bits=4, type="float", symmetric=True, strategy="group", group_size=32)


def mxfp4(
    codes: str, scale: str, says: Any, *, dtype: torch.dtype = torch.uint8
) -> tuple[Tensors, At, Any]:
    """Two codes a byte, the first in its low bits, and an exponent for each 32 inputs."""
    packed = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
    exponents = torch.randint(110, 140, (N, K // 32), dtype=torch.uint8)
    exponents[0, 0], exponents[1, 0] = 0, 254  # 2^-127 and 2^127.

    def at(row: int, column: int) -> float:
        code = int(packed[row, column // 2]) >> 4 * (column % 2) & 15
        value = E2M1[code & 7] * (-1 if code & 8 else 1)
        return value * 2.0 ** (int(exponents[row, column // 32]) - 127)

    if dtype != torch.uint8:  # DeepSeek-V4's.
        return {codes: packed.view(torch.int8), scale: exponents.view(dtype)}, at, says
    shape = (N, K // 32, 16) if codes.endswith("_blocks") else (N, K // 2)
    return {codes: packed.view(shape), scale: exponents}, at, says


def compressed_nvfp4(**more: Any) -> Any:
    settings = {**FLOAT, "strategy": "tensor_group", "group_size": 16, **more}
    return compressed("nvfp4-pack-quantized", **settings)


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    """quantization_config of ModelOpt."""
    says = {"quant_algo": algorithm, "ignore": ["lm_head", "model.mtp_layers*"], **more}
    return {"quant_method": "modelopt", "kv_cache_scheme": None, **says}


def nvfp4(says: Any) -> tuple[Tensors, At, Any]:
    """Codes as above. A float8 for each 16 inputs, divided by a float32; by ModelOpt multiplied."""
    packed = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
    scale = (torch.rand(N, K // 16) * 448).to(torch.float8_e4m3fn)
    divides = says["quant_method"] == "compressed-tensors"
    whole = 2688 / 0.7 if divides else 0.7 / 2688
    factor = torch.tensor([whole] if divides else whole)

    def at(row: int, column: int) -> float:
        code = int(packed[row, column // 2]) >> 4 * (column % 2) & 15
        value = E2M1[code & 7] * (-1 if code & 8 else 1) * float(scale[row, column // 16].float())
        return value / float(factor) if divides else value * float(factor)

    names = ("weight_packed", "weight_global_scale", "input_global_scale")
    names = names if divides else ("weight", "weight_scale_2", "input_scale")
    stored = dict(zip(names, (packed, factor, torch.ones(1)), strict=True))
    return {**stored, "weight_scale": scale}, at, says


def modelopt_fp8(algorithm: str, scale: Tensor) -> tuple[Tensors, At, Any]:
    """ModelOpt's float8, with a scale for the tensor, a row, or a block of 128 x 128."""
    codes = floats(N, K)

    def at(row: int, column: int) -> float:
        return float(codes[row, column].float()) * float(scale.flatten()[row * scale.numel() // N])

    return {"weight": codes, "weight_scale": scale}, at, modelopt(algorithm)


def exponents_of_blocks() -> tuple[Tensors, At, Any]:
    """DeepSeek-V4's FP8: scales are exponents."""
    codes, says = floats(N, K), {"quant_method": "fp8", "weight_block_size": [8, 32]}
    scale = torch.randint(110, 140, (-(-N // 8), K // 32), dtype=torch.uint8)

    def at(row: int, column: int) -> float:
        return float(codes[row, column].float()) * 2.0 ** (int(scale[row // 8, column // 32]) - 127)

    return {"weight": codes, "scale": scale.view(torch.float8_e8m0fnu)}, at, says


def gptq(
    bits: int, group: int, *, v2: bool = False, sym: bool = False, act: bool = False
) -> tuple[Tensors, At, Any]:
    per, groups = 32 // bits, K // group
    codes, zeros, scale = words(K // per, N), words(groups, N // per), scales(groups, N)
    middle, less = 2 ** (bits - 1), 0 if v2 else 1
    if sym:
        one = sum((middle - less) << bits * place for place in range(per))
        zeros = torch.full((groups, N // per), one - 2**32 if one >= 2**31 else one).int()
    order = torch.arange(K) // group
    if act:
        order = order[torch.randperm(K)]
    stored = {"qweight": codes, "qzeros": zeros, "scales": scale, "g_idx": order.int()}

    def at(row: int, column: int) -> float:
        code = bits_of(codes, (column // per, row), column % per, bits)
        g = int(order[column])
        zero = bits_of(zeros, (g, row // per), row % per, bits) + less
        return (code - zero) * float(scale[g, row])

    form = "gptq_v2" if v2 else "gptq"
    says = dict(bits=bits, group_size=group, sym=sym, desc_act=act, checkpoint_format=form)
    return stored, at, {"quant_method": "gptq", **says}


def awq(group: int) -> tuple[Tensors, At, Any]:
    groups = K // group
    codes, zeros, scale = words(K, N // 8), words(groups, N // 8), scales(groups, N)
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # Of the outputs in a word.

    def at(row: int, column: int) -> float:
        g, place = column // group, order.index(row % 8)
        code = bits_of(codes, (column, row // 8), place, 4)
        zero = bits_of(zeros, (g, row // 8), place, 4)
        return (code - zero) * float(scale[g, row])

    says = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    stored = {"qweight": codes, "qzeros": zeros, "scales": scale}
    return stored, at, {**says, "version": "gemm"}


def save(directory: Path, stored: Mapping[str, Tensor], says: Any, **more: Tensor) -> Path:
    tensors = {f"{NAME}.{leaf}": tensor for leaf, tensor in stored.items()}
    tensors |= {name.replace("__", "."): tensor for name, tensor in more.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {"dtype": "float32", "quantization_config": says}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


NVFP4 = GroupForm.of("e2m1", 16, "int8")
FORMS: dict[str, tuple[Callable[[], tuple[Tensors, At, Any]], GroupForm | None]] = {
    "int4 by 32": (lambda: packed(4, 32, True), GroupForm("int4", 32)),
    "int4 by 64, zeros": (lambda: packed(4, 64, False), GroupForm("int4", 64, True)),
    "int4 by 32, g_idx": (lambda: packed(4, 32, True, ordered=False), None),
    "int8 by 32, zeros": (lambda: packed(8, 32, False), GroupForm("int8", 32, True)),
    "int8": (lambda: int8(True), GroupForm("int8", K)),
    "int8, zeros": (lambda: int8(False), GroupForm("int8", K, True)),
    "fp8 tensor": (lambda: float8("tensor", scales(1)), GroupForm("float8", K)),
    "fp8 number": (lambda: float8("tensor", scales(1)[0]), GroupForm("float8", K)),
    "fp8 channel": (lambda: float8("channel", scales(N, 1)), GroupForm("float8", K)),
    "fp8 block": (
        lambda: float8("block", scales(3, 2), block_structure=[8, 32]),
        GroupForm("float8", 32),
    ),
    "blocks 8 x 32": (lambda: blocks(8, 32), GroupForm("float8", 32)),
    "blocks 128 x 128": (lambda: blocks(128, 128), GroupForm("float8", K)),
    "blocks 10 x 40": (lambda: blocks(10, 40), None),
    "gptq": (lambda: gptq(4, 32), GroupForm("int4", 32, True)),
    "gptq v2": (lambda: gptq(4, 32, v2=True), GroupForm("int4", 32, True)),
    "gptq sym": (lambda: gptq(4, 64, sym=True), GroupForm("int4", 64)),
    "gptq desc_act": (lambda: gptq(4, 16, act=True), None),
    "gptq 8 bits": (lambda: gptq(8, 32), GroupForm("int8", 32, True)),
    "gptq 8 bits, sym": (lambda: gptq(8, 32, sym=True, v2=True), GroupForm("int8", 32)),
    "awq": (lambda: awq(32), GroupForm("int4", 32, True)),
    "mxfp4": (lambda: mxfp4("weight_blocks", "weight_scales", MXFP4), GroupForm("e2m1", 32)),
    "mxfp4, compressed-tensors": (
        lambda: mxfp4("weight_packed", "weight_scale", compressed("mxfp4-pack-quantized", **FLOAT)),
        GroupForm("e2m1", 32),
    ),
    "mxfp4, DeepSeek-V4": (
        lambda: mxfp4("weight", "scale", {"quant_method": "fp8"}, dtype=torch.float8_e8m0fnu),
        GroupForm("e2m1", 32),
    ),
    "fp8, DeepSeek-V4": (exponents_of_blocks, GroupForm("float8", 32)),
    "nvfp4, compressed-tensors": (lambda: nvfp4(compressed_nvfp4()), NVFP4),
    "nvfp4, ModelOpt": (lambda: nvfp4(modelopt("NVFP4", group_size=16)), NVFP4),
    "fp8, ModelOpt": (
        lambda: modelopt_fp8("FP8", scales(1, dtype=torch.float32)[0]),
        GroupForm("float8", K),
    ),
    "fp8 of rows, ModelOpt": (
        lambda: modelopt_fp8("FP8_PER_CHANNEL_PER_TOKEN", scales(N, dtype=torch.float32)),
        GroupForm("float8", K),
    ),
    "fp8 of blocks, ModelOpt": (
        lambda: modelopt_fp8("fp8_pb_wo", scales(1, 1, 1, 1, dtype=torch.float32)),
        GroupForm("float8", K),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_what_its_format_says(form: str, tmp_path: Path) -> None:
    """By its own name, with its shape and the model's dtype; as values, and as codes."""
    torch.manual_seed(len(form))
    make, expected_form = FORMS[form]
    stored, at, says = make()
    checkpoint = Checkpoint(save(tmp_path, stored, says, lm_head__weight=torch.ones(4, 4)))
    name = f"{NAME}.weight"
    assert checkpoint.tensors.keys() == {name, "lm_head.weight"}
    assert str(checkpoint.tensors[name]) == f"F32[{N},{K}]"
    expected = torch.tensor([[at(row, column) for column in range(K)] for row in range(N)])
    torch.testing.assert_close(checkpoint.tensor(name), expected, rtol=1e-6, atol=0)
    assert checkpoint.dequantised == {name}
    spec = checkpoint.specs.get(name)
    assert (spec.form if spec else None) == expected_form
    if spec is not None:
        rows = checkpoint.grouped(name)
        weight, few = rows.whole(), rows.read(5, N - 2)
        assert weight.form == expected_form
        assert str(weight.scales.dtype) == f"torch.{spec.scales}"
        torch.testing.assert_close(weight.dequantise(), expected, rtol=1e-6, atol=0)
        assert torch.equal(few.dequantise(), weight.dequantise()[5 : N - 2])


def test_a_stack_of_experts_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """gpt-oss's layout. transformers gives inputs before outputs, as its own experts have them."""
    experts, name = 3, "model.layers.0.mlp.experts.gate_up_proj"
    stored = {
        f"{name}_blocks": torch.randint(0, 256, (experts, N, K // 32, 16), dtype=torch.uint8),
        f"{name}_scales": torch.randint(100, 150, (experts, N, K // 32), dtype=torch.uint8),
    }
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    wanted = convert_moe_packed_tensors(*stored.values()).transpose(1, 2)
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.tensor(name), wanted)
    assert torch.equal(checkpoint.grouped(name).whole().dequantise().bfloat16(), wanted)
    assert checkpoint.specs[name] == GroupSpec(GroupForm("e2m1", 32), "uint8")


@pytest.mark.parametrize("is_fp4", [True, False])
def test_deepseek_v4_is_what_transformers_makes_of_it(is_fp4: bool, tmp_path: Path) -> None:
    form = FORMS["mxfp4, DeepSeek-V4" if is_fp4 else "fp8, DeepSeek-V4"]
    stored, _, says = form[0]()
    found = Checkpoint(save(tmp_path, stored, says)).tensor(f"{NAME}.weight")
    wanted = Fp8Dequantize(None)._dequantize_one(*stored.values(), output_dtype=torch.float32)
    assert torch.equal(found, wanted)


def edited(stored: Tensors, **changes: Tensor | None) -> Tensors:
    return {n: t for n, t in {**stored, **changes}.items() if t is not None}


PACKED, AWQ, GPTQ = packed(4, 32, False), awq(32), gptq(4, 32)
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
    (
        edited(PACKED[0], weight_scale=None),
        PACKED[2],
        r"weight_scale is missing; expected F16\[24,2",
    ),
    (edited(PACKED[0], weight_zero_point=None), PACKED[2], r"zero_point is missing; .*I32\[3,2\]"),
    (
        edited(PACKED[0], weight_shape=None),
        PACKED[2],
        r"weight_shape is missing; expected I64\[2\]",
    ),
    (
        edited(PACKED[0], weight_packed=None),
        PACKED[2],
        "belongs to no quantised weight of this checkpoint",
    ),
    (
        edited(PACKED[0], weight_scale=scales(24, 1)),
        PACKED[2],
        r"weight_scale is F16\[24,1\]; expected F16\[24,2\]",
    ),
    (
        edited(PACKED[0], weight_scale=torch.ones(24, 2).int()),
        PACKED[2],
        r"weight_scale is I32\[24,2\]; expected F16\[24,2\]",
    ),
    (
        edited(PACKED[0], weight_packed=words(24)),
        PACKED[2],
        r"weight_packed is I32\[24\]; expected",
    ),
    (PACKED[0], packed(4, 64, False)[2], r"weight_scale is BF16\[24,2\]; expected F16\[24,1\]"),
    (
        PACKED[0],
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=48),
        "64 inputs, and config.json has groups of 48; expected a size that divides",
    ),
    (
        PACKED[0],
        compressed("pack-quantized", num_bits=3, type="int", strategy="group", group_size=32),
        "has num_bits 3; expected 4 or 8",
    ),
    (PACKED[0], {**PACKED[2], "ignore": [NAME]}, f"ignores {NAME}; expected either, not both"),
    (PACKED[0], {**PACKED[2], "ignore": ["re:.*up"]}, f"ignores {NAME}; expected either, not both"),
    (PACKED[0], {**PACKED[2], "ignore": ["re:("]}, r"pattern '\(': .*; expected a regular"),
    (PACKED[0], {**PACKED[2], "config_groups": {}}, "at least one group of modules"),
    (AWQ[0], {**AWQ[2], "version": "gemv"}, "has version 'gemv'; expected 'gemm'"),
    (
        AWQ[0],
        {**AWQ[2], "modules_to_not_convert": ["mlp"]},
        "leaves it out; expected either, not both",
    ),
    (edited(AWQ[0], qzeros=words(2, 2)), AWQ[2], r"qzeros is I32\[2,2\]; expected I32\[2,3\]"),
    (edited(AWQ[0], scales=None), AWQ[2], r"scales is missing; expected F16\[2,24\]"),
    (GPTQ[0], {**GPTQ[2], "group_size": 24}, "groups of 24; expected a size that divides"),
    (GPTQ[0], {**GPTQ[2], "dynamic": {"-:.*up_proj": {}}}, "leaves out '-:.*up_proj'"),
    (GPTQ[0], {**GPTQ[2], "bits": 2}, "has bits 2; expected 4 or 8"),
    (GPTQ[0], {**GPTQ[2], "group_size": "all"}, "group_size 'all'; expected a whole number"),
    (GPTQ[0], {"quant_method": "hqq"}, r"'hqq'.*expected one of 'fp8', 'compressed-tensors'"),
]


@pytest.mark.parametrize(("stored", "says", "message"), BROKEN, ids=[case[2] for case in BROKEN])
def test_what_is_broken_is_named(stored: Tensors, says: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(save(tmp_path, stored, says))


@pytest.mark.parametrize(
    ("stored", "says", "message"),
    [
        (GPTQ[0], {**GPTQ[2], "sym": True}, "qzeros holds other zero points than 8; expected"),
        (gptq(4, 32, act=True)[0], GPTQ[2], "g_idx does not name runs of 32 inputs; expected"),
        (
            edited(PACKED[0], weight_shape=torch.tensor([24, 60])),
            PACKED[2],
            r"weight_shape is \[24, 60\], and .*weight_packed holds \[24, 64\]; expected the same",
        ),
        (
            edited(gptq(4, 32, act=True)[0], g_idx=torch.full((64,), 2).int()),
            gptq(4, 32, act=True)[2],
            r"g_idx names groups outside of 0\.\.1",
        ),
    ],
)
def test_values_that_contradict_the_config_are_named(
    stored: Tensors, says: Any, message: str, tmp_path: Path
) -> None:
    """Headers do not show it; reading the weight does."""
    checkpoint = Checkpoint(save(tmp_path, stored, says))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.tensor(f"{NAME}.weight")


def test_gptq_settings_of_one_module(tmp_path: Path) -> None:
    stored, _, says = gptq(8, 32)
    dynamic = {"+:.*up_proj": {"bits": 8, "group_size": 32}}
    says = {**says, "bits": 4, "group_size": 64, "dynamic": dynamic}
    checkpoint = Checkpoint(save(tmp_path, stored, says))
    assert checkpoint.specs[f"{NAME}.weight"].form == GroupForm("int8", 32, True)


def test_compressed_groups_by_name(tmp_path: Path) -> None:
    """The settings of a module's own name stand before those of its class."""
    stored, _, says = packed(4, 32, True)
    other = packed(8, 64, False)[2]["config_groups"]["group_0"]
    own = {"targets": ["re:.*up_proj"], "weights": says["config_groups"]["group_0"]["weights"]}
    checkpoint = Checkpoint(
        save(tmp_path, stored, {**says, "config_groups": {"a": other, "b": own}})
    )
    assert checkpoint.specs[f"{NAME}.weight"].form == GroupForm("int4", 32)


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


MTP = "model.mtp_layers.0.mlp.up_proj.weight"
LEFT_OUT: dict[str, tuple[tuple[Tensors, At, Any], dict[str, Any]]] = {
    "fp8": (blocks(8, 32), {"modules_to_not_convert": ["lm_head", "model.mtp_layers"]}),
    "gptq": (GPTQ, {"dynamic": {"-:.*mtp_layers.*": {}, "+:.*layers.0.*": {"bits": 4}}}),
    "awq": (AWQ, {"modules_to_not_convert": ["mtp_layers", "visual"]}),
    "compressed-tensors": (PACKED, {"ignore": ["lm_head", "re:.*mtp_layers.*"]}),
    "nvfp4": (NV, {"ignore": ["lm_head", "re:.*mtp_layers.*"]}),
    "modelopt": (OPT, {"ignore": ["lm_head", "model.mtp_layers*"]}),
}


@pytest.mark.parametrize("method", LEFT_OUT)
def test_what_is_left_out_is_plain(method: str, tmp_path: Path) -> None:
    """MTP layers that the config's list names, in the dtype that they are stored in."""
    (stored, at, says), left_out = LEFT_OUT[method]
    plain = torch.randn(N, K).bfloat16()
    checkpoint = Checkpoint(
        save(tmp_path, stored, {**says, **left_out}, **{MTP.replace(".", "__"): plain})
    )
    assert checkpoint.quantised == (f"{NAME}.weight",)
    assert checkpoint.tensors.keys() == {f"{NAME}.weight", MTP}
    assert torch.equal(checkpoint.tensor(MTP), plain)
    assert abs(float(checkpoint.tensor(f"{NAME}.weight")[7, 9]) - at(7, 9)) <= 1e-5 * abs(at(7, 9))


def test_gptq_of_several_kinds(tmp_path: Path) -> None:
    """4 and 8 bits, in groups of two sizes, and a plain module, in one checkpoint."""
    (four, at, says), (eight, other, _) = GPTQ, gptq(8, 64, sym=True)
    dynamic = {"+:.*down_proj": {"bits": 8, "group_size": 64, "sym": True}, "-:.*gate": {}}
    more = {f"model__down_proj__{leaf}": tensor for leaf, tensor in eight.items()}
    more["model__gate__weight"] = torch.ones(4, 4)
    checkpoint = Checkpoint(save(tmp_path, four, {**says, "dynamic": dynamic}, **more))
    forms = {name: spec.form for name, spec in checkpoint.specs.items()}
    assert forms == {
        f"{NAME}.weight": GroupForm("int4", 32, True),
        "model.down_proj.weight": GroupForm("int8", 64),
    }
    for name, value in ((f"{NAME}.weight", at), ("model.down_proj.weight", other)):
        found = checkpoint.tensor(name)
        assert all(abs(float(found[i, i]) - value(i, i)) <= 1e-5 for i in range(N))

"""Quantised weights as their formats define them: loops over single bits that share no code with
mtpc.

Stored tensors are random, so that every bit of a word counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpc.weights.grouped import GroupForm

N, K = 24, 64
NAME = "model.layers.0.mlp.up_proj"
Tensors = dict[str, Tensor]
At = Callable[[int, int], float]
"""(row, input) -> the value of a weight."""
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
MXFP4 = {"quant_method": "mxfp4"}
FLOAT = dict(num_bits=4, type="float", symmetric=True, strategy="group", group_size=32)
NVFP4 = GroupForm.of("e2m1", 16, "int8")


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


def edited(stored: Tensors, **changes: Tensor | None) -> Tensors:
    return {n: t for n, t in {**stored, **changes}.items() if t is not None}

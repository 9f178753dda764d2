"""Every quantised format against its definition, and what a checkpoint leaves plain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.formats import (
    FLOAT,
    MXFP4,
    NAME,
    NVFP4,
    At,
    K,
    N,
    Tensors,
    awq,
    blocks,
    compressed,
    compressed_nvfp4,
    exponents_of_blocks,
    float8,
    gptq,
    int8,
    modelopt,
    modelopt_fp8,
    mxfp4,
    nvfp4,
    packed,
    save,
    scales,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.grouped import GroupForm

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


@pytest.mark.parametrize("is_fp4", [True, False])
def test_deepseek_v4_is_what_transformers_makes_of_it(is_fp4: bool, tmp_path: Path) -> None:
    form = FORMS["mxfp4, DeepSeek-V4" if is_fp4 else "fp8, DeepSeek-V4"]
    stored, _, says = form[0]()
    found = Checkpoint(save(tmp_path, stored, says)).tensor(f"{NAME}.weight")
    wanted = Fp8Dequantize(None)._dequantize_one(*stored.values(), output_dtype=torch.float32)
    assert torch.equal(found, wanted)


MTP = "model.mtp_layers.0.mlp.up_proj.weight"
LEFT_OUT: dict[str, tuple[tuple[Tensors, At, Any], dict[str, Any]]] = {
    "fp8": (blocks(8, 32), {"modules_to_not_convert": ["lm_head", "model.mtp_layers"]}),
    "gptq": (gptq(4, 32), {"dynamic": {"-:.*mtp_layers.*": {}, "+:.*layers.0.*": {"bits": 4}}}),
    "awq": (awq(32), {"modules_to_not_convert": ["mtp_layers", "visual"]}),
    "compressed-tensors": (packed(4, 32, False), {"ignore": ["lm_head", "re:.*mtp_layers.*"]}),
    "nvfp4": (nvfp4(compressed_nvfp4()), {"ignore": ["lm_head", "re:.*mtp_layers.*"]}),
    "modelopt": (nvfp4(modelopt("NVFP4")), {"ignore": ["lm_head", "model.mtp_layers*"]}),
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

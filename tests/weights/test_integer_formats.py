"""compressed-tensors of integers, GPTQ and AWQ: what is broken, and settings by module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.formats import (
    NAME,
    N,
    Tensors,
    awq,
    compressed,
    edited,
    gptq,
    packed,
    save,
    scales,
    words,
)

from mtpc.errors import CheckpointError
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.grouped import GroupForm

PACKED, AWQ, GPTQ = packed(4, 32, False), awq(32), gptq(4, 32)
BROKEN: list[tuple[Tensors, Any, str]] = [
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

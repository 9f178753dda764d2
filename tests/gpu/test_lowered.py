"""What Inductor makes of a cuda step, scheduled on the CPU: no pool is copied, few kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.families import EVERY_FAMILY

from benchmarks.gpu.count import Lowered, lowered
from benchmarks.gpu.machine import NullMachine
from mtpc.config import CompileOptions
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler

OPTIONS = CompileOptions(
    spec_tokens=1, batch_buckets=(1,), max_len=64, page_size=16, prefill_chunk=8
)


@torch.no_grad()
def _lowered(checkpoint: Path) -> Lowered:
    compiler = StepCompiler(load(checkpoint, "bfloat16", True), OPTIONS, NullMachine().backend())
    return lowered(compiler.rewritten(StepKey.decode(1, 1)))


@pytest.mark.parametrize(
    "family",
    [
        "glm4_moe",
        *(pytest.param(f, marks=pytest.mark.slow) for f in EVERY_FAMILY if f != "glm4_moe"),
    ],
)
def test_no_buffer_is_copied_before_it_is_written(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    """A clone of the KV pool in each step would cost more than all else."""
    found = _lowered(checkpoint(family, "random"))
    assert set(found.missed.values()) == {0}
    assert any(name.startswith("mtpc.") for name in found.called), "our operators are in it"


def test_joint_weights_take_the_place_of_their_parts(checkpoint: Callable[..., Path]) -> None:
    """No weight is held twice where mtpc read the checkpoint."""
    loaded = load(checkpoint("glm4_moe", "random"), "bfloat16", True)
    attention = loaded.target.get_decoder().layers[0].self_attn
    before = attention.k_proj.weight.clone()
    compiler = StepCompiler(loaded, OPTIONS, NullMachine().backend())
    with torch.no_grad():
        compiler.rewritten(StepKey.decode(1, 1))
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert torch.equal(attention.k_proj.weight, before)

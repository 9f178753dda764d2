"""Models and options of the steps that run on Triton kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.plans import plan_of
from mtpc.api import SpecModel
from mtpc.backends.cuda import CudaBackend
from mtpc.models.load import load
from mtpc.plan import Plan
from mtpc.program.compiler import StepCompiler

PROMPTS = [[5, 9, 14, 3, 7, 22], [41, 8], [60, 3, 8, 17, 2]]
"""Chunks of six, so that the second prompt is prefilled in a step in which the first decodes."""
OPTIONS = plan_of(
    spec_tokens=2,
    batch_buckets=(2,),
    max_len=32,
    page_size=4,
    prefill_chunk=6,
    num_pages=20,
    sampling=False,
)


def compile_on(
    directory: Path, backend: CudaBackend, options: Plan, dtype: str = "float32"
) -> SpecModel:
    loaded = load(directory, dtype, True)
    program = StepCompiler(loaded, options, backend).compile()
    return SpecModel(loaded.served(), options, program)


FAMILIES = {
    "glm4_moe": {"paged_attention", "experts", "topk"},
    "deepseek_v3": {"latent_attention", "experts", "group_topk"},
    "qwen3_next": {"paged_attention", "experts", "topk", "gated_delta_rule"},
    "qwen3_5": {"paged_attention", "gated_delta_rule"},
    "mimo_v2": {"paged_attention", "experts", "topk"},
    "step3p5": {"paged_attention", "experts", "topk"},
    "step3p7": {"paged_attention", "experts", "topk"},
    "deepseek_v4": {"experts", "topk", "sinkhorn", "choose_slots", "slot_attention"},
    "qwen4_exp": {"paged_attention", "experts", "topk", "gated_delta_rule", "choose_slots"},
    "nemotron_h": {"paged_attention", "relu2_experts", "topk", "mamba2_scan"},
    "deepseek_v32": {"latent_attention", "experts", "group_topk", "choose_slots"},
}
"""The mtpc operators that the steps of a family call, in addition to those of every step."""
EACH_STEP = {"write_cache", "accept"}
SLOW = pytest.mark.slow
EACH_FAMILY = [
    name if name == "deepseek_v32" else pytest.param(name, marks=SLOW) for name in FAMILIES
]
"""Steps take half a minute per family: the fast tests have only the one with the most kernels."""

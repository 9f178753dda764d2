"""Lets SGLang 0.5.23 decode speculatively without a GPU, under TRITON_INTERPRET=1. For tests only.

SGLang's kernels for a CPU are in a library that is built from source; its Triton ones run anywhere
under the interpreter. This plugin of SGLang's (entry point group `sglang.srt.plugins`) chooses
them where the host's own choice would end in a missing library. Nothing of mtpc needs it.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import torch

LOG = "SGLANG_ON_CPU_LOG"
"""Environment variable: a file to which each forward of each model is written, a line each."""

NAMED = (
    "sglang.kernels.ops.gemm.fp8_kernel",
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config",
)
"""Modules that look for sizes by the name of the device."""


def declare_torchvision_ops() -> None:
    """Let torchvision, which is built for CUDA, be imported beside a CPU torch. Before sglang."""
    for name in ("nms", "qnms"):
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", schema)


def name_device() -> None:
    """Give the CPU a name, by which the host looks for files of tuned sizes, and finds none."""
    for name in NAMED:
        importlib.import_module(name).get_device_name = lambda *args: "cpu"


def start() -> None:
    """Choose the Triton form of the draft tree's kernels; make waiting for CUDA harmless."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    tree = importlib.import_module("sglang.kernels.ops.speculative.spec_tree")
    tree._is_xpu = True  # The branch that launches them, for building and for verifying.
    name_device()
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args: None
    if LOG in os.environ:
        HookRegistry.register(
            "sglang.srt.model_loader.loader._initialize_model", _watch, HookType.AFTER
        )


def _watch(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Write down which class runs, in which of the host's phases, over how many rows."""
    run, who = model.forward, f"{type(model).__module__}.{type(model).__name__}"

    @functools.wraps(run)
    def forward(
        input_ids: Any, positions: Any, forward_batch: Any, *more: Any, **named: Any
    ) -> Any:
        with open(os.environ[LOG], "a") as log:
            log.write(f"{who} {forward_batch.forward_mode.name} {len(input_ids)}\n")
        return run(input_ids, positions, forward_batch, *more, **named)

    model.forward = forward
    return model

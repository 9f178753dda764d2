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


def stay_on_cpu() -> None:
    """Keep the host from libraries of GPUs, and from their sizes, before it makes a layer."""
    for name in NAMED:  # By the name it looks for files of tuned sizes, and finds none.
        importlib.import_module(name).get_device_name = lambda *args: "cpu"
    # It would import vLLM for a rotary kernel that it does not call on a CPU.
    importlib.import_module("sglang.srt.layers.rotary_embedding.base")._is_cpu = True
    # torch's build for CUDA brings NCCL, which takes no CPU: a library that is not there.
    os.environ["SGLANG_NCCL_SO_PATH"] = "none"


def start() -> None:
    """Choose the Triton form of the draft tree's kernels; make waiting for CUDA harmless."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    tree = importlib.import_module("sglang.kernels.ops.speculative.spec_tree")
    tree._is_xpu = True  # The branch that launches them, for building and for verifying.
    stay_on_cpu()
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

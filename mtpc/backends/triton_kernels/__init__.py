"""Triton kernels for GPUs, NVIDIA's and AMD's, in an op namespace of their own.

`mtpc_triton::` has `write_cache`, `rotate_and_write`, `rotate`, `paged_attention`,
`latent_attention`, `choose_slots`, `experts`, `gated_delta_rule`, `quantised_linear`,
`quantised_experts`, `rms_norm`, `add_rms_norm`, `draft_entry`, `silu_and_mul`, `sample`,
`count_tokens`, `write_logprobs`, `accept`, `sinkhorn`; `mtpc_loaded::` has the same, for code that
was compiled elsewhere. They take what the reference ops in `mtpc::` take and mean the same. This
module imports no Triton, which only torch's builds for GPUs bring along; all others here do.

What they guarantee:

- Grids depend on the bucket's sizes only. Lengths, block tables and slots are read on the device,
  so one captured graph serves every length up to max_len.
- No atomics: a result is the same bits in every run. A row's bits, of attention and of the gated
  delta rule, depend, at one bucket, neither on other requests nor on how many rows and how much
  context its request has, nor on whether it was replayed.
- No cache position that no row attends to is read, nor the weights of an expert nobody chose.

Sums are float32, of int8 products int32, of probabilities float64. Elements are bfloat16, float16
or float32.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

import mtpc.ops
import mtpc.ops.fused  # noqa: F401  (these register the references that kernel_table names)
from mtpc.errors import BackendError

ELEMENTS = (torch.bfloat16, torch.float16, torch.float32)
"""What the kernels compute with."""
_ADVICE = (
    "Triton comes with torch's builds for CUDA and ROCm; on a machine without GPU: pip install "
    "triton"
)


def load_kernels() -> None:
    """Make torch.ops.mtpc_triton exist in this process; later calls do nothing.

    Raises:
        BackendError: there is no Triton.
    """
    try:
        import_module("mtpc.backends.triton_kernels.ops")
    except ImportError as error:
        if not (error.name or "").startswith("triton"):
            raise
        raise BackendError(f"the GPU kernels need Triton: {error}. {_ADVICE}") from error


def kernel_table(namespace: str = "mtpc_triton") -> dict[Any, Any]:
    """Reference op overload -> our op overload; `load_kernels` must have been called."""
    from mtpc.backends.triton_kernels.plans import PLANS

    ours = getattr(torch.ops, namespace)
    return {getattr(torch.ops.mtpc, name).default: getattr(ours, name).default for name in PLANS}


__all__ = ["ELEMENTS", "kernel_table", "load_kernels"]

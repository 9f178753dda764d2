"""Sinkhorn-Knopp normalisation of small matrices: all rounds in registers, one launch.

A program has a few matrices, each of them whole, so that no round reads what another wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator

_ELEMENTS = 512
"""Elements of a program's matrices: a few registers a thread. With four streams, 32 matrices."""
_MAX_SIZE = 64
"""Rows of a matrix that is normalised in registers."""


@triton.jit
def sinkhorn_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, out_ptr, count,
    N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """logits, out [count, N, N]; sums are float32."""
    matrix = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, N_PAD)
    there = (i < N)[None, :, None] & (i < N)[None, None, :]
    at = matrix[:, None, None] * (N * N) + i[None, :, None] * N + i[None, None, :]
    mask = (matrix < count)[:, None, None] & there
    logits = tl.load(logits_ptr + at, mask=mask, other=0.0).to(tl.float32)
    peak = tl.max(tl.where(there, logits, float("-inf")), 2)
    # Rows of padding have no peak; their values are masked out.
    peak = tl.where((i < N)[None], peak, 0.0)
    mixed = tl.where(there, tl.exp(logits - peak[:, :, None]), 0.0)
    total = tl.where((i < N)[None], tl.sum(mixed, 2), 1.0)
    mixed = tl.where(there, mixed / total[:, :, None] + EPSILON, 0.0)
    mixed = mixed / (tl.sum(mixed, 1) + EPSILON)[:, None, :]
    for _ in range(ROUNDS - 1):
        mixed = mixed / (tl.sum(mixed, 2) + EPSILON)[:, :, None]
        mixed = mixed / (tl.sum(mixed, 1) + EPSILON)[:, None, :]
    tl.store(out_ptr + at, mixed.to(out_ptr.dtype.element_ty), mask=mask)


def _limit(call: Mapping[str, Any]) -> str | None:
    size, epsilon = call["logits"].shape[-1], call["epsilon"]
    if size > _MAX_SIZE:
        return f"matrices of {size} rows; it takes up to {_MAX_SIZE}"
    if not isinstance(epsilon, float) or epsilon <= 0:
        return f"epsilon {epsilon}; it takes one above 0"  # Padding would divide by zero.
    return None


@operator(limit=_limit)
def sinkhorn(logits: Tensor, rounds: int, epsilon: float) -> Plan:
    """One launch."""
    out, logits = logits.new_empty(logits.shape), logits.contiguous()
    count, size, _ = logits.shape
    padded = power_of_two(size)
    block = max(1, _ELEMENTS // padded**2)
    values = dict(
        logits_ptr=logits, out_ptr=out, count=count, N=size, N_PAD=padded, BLOCK=block,
        ROUNDS=rounds, EPSILON=float(epsilon),
    )  # fmt: skip
    return [Launch(sinkhorn_kernel, (-(-count // block), 1, 1), values, threads=64)], out

"""C++ kernels for the `cpu` backend, in an op namespace of their own.

`mtpc_cpu::` has `write_cache`, `paged_attention`, `latent_attention`, `choose_slots`,
`gated_delta_rule`, `sinkhorn`, `experts`, `float32_linear`; between linears `rms_norm`,
`add_rms_norm`, `silu_and_mul`, `clear_idle_rows`, `rotate`, `rotate_and_write`; on packed weights
`packed_linear`, `packed_linear_max`, `packed_gated_linear`, `linear_chain`, `packed_head_linear`,
`packed_experts` and, in int8, `quantised_linear`, `quantised_linear_max` and `quantised_experts`,
and `pack`, which packs them; for sampling `sample`, `count_tokens` and `write_logprobs`; `accept`.
They take what the reference ops in `mtpc::` take and mean the same; a backend's pass exchanges one
for the other, so the meaning of a traced graph never depends on what has been loaded.

They are written on libtorch's stable ABI (2.11) and compiled at first use, see `build`, for the
best level of instructions that the processor has, see `levels`. What they guarantee beyond the
references, on each level:

- A row's result is the same bits for any number of threads, of other requests in the batch, and
  of rows that its own request has: speculation can be compared with plain decoding exactly.
- Attention and `choose_slots` cost time in proportion to seq_lens, not to the width of the block
  table, and read no cache position that no row attends to.
- `experts`, `packed_experts` and `quantised_experts` read each chosen expert's weights once,
  `packed_linear` and `packed_gated_linear` their weight, `linear_chain` each of its weights.
- `sample` costs a row what its request asked for: a greedy one, one pass over the logits.
- No kernel needs Python's lock, and packages run without it (`torch.classes.mtpc_runner.Runner`).

Sums are accumulated in float32, in float64 for float64 queries or rows. Elements of q, x, caches
and weights are bfloat16, float16, float32 or float64; index tensors int32 or int64. Any strides
will do, but a tensor whose last dimension is not adjacent in memory is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mtpc.ops.attention
import mtpc.ops.experts  # noqa: F401  (these register references that kernel_table names)
from mtpc.backends.cpu_kernels.build import LIBRARY, RUNNER, build_kernels
from mtpc.backends.cpu_kernels.direct_calls import declarations, open_to_packages
from mtpc.ops.accept import fake_accept
from mtpc.ops.chain import fake_linear_chain
from mtpc.ops.choose_slots import fake_choose_slots
from mtpc.ops.float32_linear import fake_float32_linear
from mtpc.ops.fused import (
    fake_add_rms_norm,
    fake_rms_norm,
    fake_rotate,
    fake_rotate_and_write,
    fake_silu_and_mul,
)
from mtpc.ops.gated_delta import fake_gated_delta_rule
from mtpc.ops.packed import (
    fake_linear_max,
    fake_packed_gated_linear,
    fake_packed_head_linear,
    fake_packed_linear,
)
from mtpc.ops.quantised import fake_quantised_linear
from mtpc.ops.ragged import fake_clear_idle_rows
from mtpc.ops.sampling import fake_count_tokens, fake_sample, fake_write_logprobs
from mtpc.ops.sinkhorn import fake_sinkhorn
from mtpc.store.entries import Entry, EntryStore

NAMES = ("write_cache", "paged_attention", "latent_attention", "choose_slots", "experts",
         "packed_linear", "packed_linear_max", "packed_gated_linear", "linear_chain",
         "packed_head_linear", "packed_experts", "float32_linear", "quantised_linear",
         "quantised_linear_max", "quantised_experts", "rms_norm", "add_rms_norm", "silu_and_mul",
         "clear_idle_rows", "rotate", "rotate_and_write", "gated_delta_rule", "sinkhorn", "sample",
         "count_tokens", "write_logprobs", "accept")  # fmt: skip
"""Every op exists as mtpc::NAME, the reference, and as mtpc_cpu::NAME."""

_DISPATCHED = ("experts", "sample", "count_tokens", "write_logprobs")
"""Generated code calls these through torch's dispatcher, all others past it (`shims.cpp`)."""


def load_kernels(
    store: EntryStore | None = None, report: Callable[[str], None] = lambda line: None
) -> None:
    """Make torch.ops.mtpc_cpu exist in this process; later calls do nothing.

    Args:
        store: the graph cache, where builds are kept; by default the user's.
        report: receives lines on a build's progress.

    Raises:
        BackendError: there is no C++ compiler, or it failed.
        CacheError: another user could have written the cache.
    """
    if not _is_loaded():
        load_library(build_kernels(store, report))


def load_library(built: Entry | Path) -> None:
    """Load what `build_kernels` returned; does nothing where kernels are loaded already."""
    if _is_loaded():
        return
    directory = built.parent if isinstance(built, Path) else built.directory
    torch.classes.load_library(str(directory / RUNNER))
    torch.ops.load_library(directory / LIBRARY)
    open_to_packages(directory)
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"mtpc_cpu::{name}", fake)


def _is_loaded() -> bool:
    return hasattr(torch.ops.mtpc_cpu, "write_cache")


def fill_packed(weight: Tensor, packed: Tensor) -> None:
    """`mtpc.weights.packing.fill_packed` on all of torch's threads; needs the kernels loaded."""
    torch.ops.mtpc_cpu.pack(weight, packed)


def kernel_table() -> dict[Any, Any]:
    """Reference op overload -> our op overload; `load_kernels` must have been called."""
    return {
        getattr(torch.ops.mtpc, name).default: getattr(torch.ops.mtpc_cpu, name).default
        for name in NAMES
    }


def direct_calls() -> dict[Any, list[str]]:
    """Our op overload -> its C function's declaration; `load_kernels` must have been called."""
    return declarations(name for name in NAMES if name not in _DISPATCHED)


def _fake_write_cache(cache: Tensor, rows: Tensor, slot_mapping: Tensor) -> None:
    return None


def _fake_paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], v_cache.shape[3]))


def _fake_latent_attention(
    q: Tensor,
    latent_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    latent_rank: int,
) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], latent_rank))


def _fake_experts(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


_FAKES: dict[str, Callable[..., Tensor | tuple[Tensor, ...] | None]] = {
    "write_cache": _fake_write_cache,
    "paged_attention": _fake_paged_attention,
    "latent_attention": _fake_latent_attention,
    "choose_slots": fake_choose_slots,
    "experts": _fake_experts,
    "packed_linear": fake_packed_linear,
    "packed_linear_max": fake_linear_max,
    "packed_gated_linear": fake_packed_gated_linear,
    "linear_chain": fake_linear_chain,
    "packed_head_linear": fake_packed_head_linear,
    "packed_experts": _fake_experts,
    "float32_linear": fake_float32_linear,
    "quantised_linear": fake_quantised_linear,
    "quantised_linear_max": fake_linear_max,
    "quantised_experts": _fake_experts,
    "rms_norm": fake_rms_norm,
    "add_rms_norm": fake_add_rms_norm,
    "silu_and_mul": fake_silu_and_mul,
    "clear_idle_rows": fake_clear_idle_rows,
    "rotate": fake_rotate,
    "rotate_and_write": fake_rotate_and_write,
    "gated_delta_rule": fake_gated_delta_rule,
    "sinkhorn": fake_sinkhorn,
    "sample": fake_sample,
    "count_tokens": fake_count_tokens,
    "write_logprobs": fake_write_logprobs,
    "accept": fake_accept,
}

__all__ = [
    "NAMES",
    "build_kernels",
    "direct_calls",
    "fill_packed",
    "kernel_table",
    "load_kernels",
    "load_library",
]

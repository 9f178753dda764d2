"""C++ kernels for the `cpu` backend, in an op namespace of their own.

`mtpc_cpu::` has the operators of `mtpc.ops` and `mtpc.backends.cpu.ops` that have a kernel here.
They take what the references take and mean the same. A backend's pass exchanges one for the other,
so the meaning of a traced graph never depends on what has been loaded.

They are written on libtorch's stable ABI (2.11) and compiled at first use, see `build`, for the
best level of instructions that the processor has, see `levels`. What they guarantee beyond the
references, on each level:

- A row's result is the same bits for any number of threads, of other requests in the batch, and
  of rows that its own request has: speculation can be compared with plain decoding exactly.
- Attention and `choose_slots` cost time in proportion to seq_lens, not to the width of the block
  table, and read no cache position that no row attends to.
- `experts`, `packed_experts` and `grouped_experts` read each chosen expert's weights once,
  `packed_linear` and `packed_gated_linear` their weight, `linear_chain` each of its weights.
- `sample` costs a row what its request asked for: a greedy one, one pass over the logits.
- No kernel needs Python's lock, and tapes run without it (`torch.classes.mtpc_runner.Tape`).
- Collectives go through memory that the group's ranks share (`ranks/exchanges.py`); without
  it they are an error here, and a tape calls their references.

Sums are accumulated in float32, in float64 for float64 queries or rows. Elements of q, x, caches
and weights are bfloat16, float16, float32 or float64; index tensors int32 or int64. Any strides
will do, but a tensor whose last dimension is not adjacent in memory is copied.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtpc.backends.cpu_kernels.build import LIBRARY, RUNNER, build_kernels
from mtpc.layout.progress import Report, silent
from mtpc.store.entries import Entry, EntryStore
from mtpc.weights.packing import PackedWeight

if TYPE_CHECKING:
    from mtpc.weights.block_rows import BlockRows


def load_kernels(store: EntryStore | None = None, report: Report = silent) -> None:
    """Make torch.ops.mtpc_cpu exist in this process, with fakes; later calls do nothing.

    Args:
        store: the graph cache, where builds are kept; by default the user's.
        report: receives lines on a build's progress.

    Raises:
        BackendError: there is no C++ compiler, or it failed.
        CacheError: another user could have written the cache.
    """
    if not _is_loaded():
        load_library(build_kernels(store, report))
    for reference, ours in kernel_table().items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(ours.name(), "Meta"):
            torch.library.register_fake(ours.name(), reference)


def load_library(built: Entry | Path) -> None:
    """Load what `build_kernels` returned, to run tapes; later calls do nothing."""
    if _is_loaded():
        return
    directory = built.parent if isinstance(built, Path) else built.directory
    torch.classes.load_library(str(directory / RUNNER))
    torch.ops.load_library(directory / LIBRARY)
    # Tapes that are loaded later find the kernels' C functions by name.
    ctypes.CDLL(str(directory / LIBRARY), mode=ctypes.RTLD_GLOBAL)


def _is_loaded() -> bool:
    return any(Path(path).name == LIBRARY for path in torch.ops.loaded_libraries)


def fill_packed(weight: Tensor, packed: Tensor, finite: Tensor | None = None) -> None:
    """`mtpc.weights.packing.fill_packed` on all of torch's threads; needs the kernels loaded."""
    torch.ops.mtpc_cpu.pack(weight, packed, finite)


def fill_blocks(rows: BlockRows, packed: PackedWeight) -> None:
    """`mtpc.weights.packing.FillBlocks` on all of torch's threads, as `fill_packed`."""
    codes, raw = packed["codes"].view(torch.uint8), rows.raw.contiguous()
    torch.ops.mtpc_cpu.pack_blocks(
        raw, rows.block.name, codes, packed["scales"], packed.get("zeros")
    )


def kernel_table() -> dict[Any, Any]:
    """Reference overload -> our overload, of every operator that has a kernel.

    It is empty until `load_kernels` was called.
    """
    # Imported here: who runs tapes needs no references.
    import mtpc.backends.cpu.ops  # noqa: F401  (declares the operators)
    from mtpc.ops import references

    ours = torch.ops.mtpc_cpu
    return {
        reference: getattr(ours, name).default
        for name, reference in references().items()
        if hasattr(ours, name)
    }

"""Builds code objects for this device as `mtpc build --target` does, loads them and runs them.

The device takes them from the cache through Triton's own loader, whose cache is empty meanwhile: a
kernel that it would have to compile is counted as missed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.gate import NEW_TOKENS, PROMPTS, compile_beside, make_checkpoint
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rows import Row
from mtpc import CompileOptions
from mtpc.backends.cuda import CudaBackend
from mtpc.backends.eager import EagerBackend
from mtpc.backends.targets import Target, parse_target
from mtpc.plan import Plan
from mtpc.program.open_cache import plan_model
from mtpc.store.entries import EntryStore

FAMILY, DRAFTS = "deepseek_v3", 3
"""Latent attention, experts and cache writes."""
DRY_TARGET = "cuda:90"
COMPARED = "code objects = reference"


def check_aot(row: Row, machine: Machine, directory: Path) -> Row:
    """Build and load every kernel of a tiny model's steps, and compare the steps as in gate."""
    make_checkpoint(row.shape, directory)
    with TemporaryDirectory(prefix="mtpc-aot-") as root:
        plan = plan_model(directory, CompileOptions(
            spec_tokens=DRAFTS, batch_buckets=(2,), max_len=64, page_size=16, prefill_chunk=8,
            dtype="bfloat16", backend="cuda", cache_dir=root, sampling=False,
        ))[1]  # fmt: skip
        if machine.is_dry:
            row.note = _build_only(directory, plan)
            return row
        from mtpc.backends.triton_kernels.launch import device_target
        from mtpc.program.build import build_for_targets

        target = device_target()
        if target is None:
            row.passed, row.note = False, "mtpc's table of targets lacks this device"
            return row
        built = build_for_targets(directory, [plan], [target])
        row.build_s = built.elapsed_s
        _load(machine, directory, plan, target, row)
    row.note = f"{len(built.kernels)} code objects built for {target.name}; {row.note}"
    return row


def _build_only(directory: Path, plan: Plan) -> str:
    """The row of a dry run, without a device."""
    if not util.find_spec("triton") or os.environ.get("TRITON_INTERPRET") == "1":
        return "nothing was built: no Triton, or only its interpreter"
    from mtpc.program.build import build_for_targets

    built = build_for_targets(directory, [plan], [parse_target(DRY_TARGET)])
    return f"{len(built.kernels)} code objects built for {DRY_TARGET}; no device to load them"


def _load(machine: Machine, directory: Path, plan: Plan, target: Target, row: Row) -> None:
    """Capture steps with the loaded kernels, and ATen operators between them, without Inductor."""
    from mtpc.backends.triton_kernels import triton_bindings
    from mtpc.backends.triton_kernels.loading import CodeObjects, loaded_bindings

    objects = CodeObjects(EntryStore(plan.cache_dir), target)
    bindings = (*loaded_bindings(objects), *triton_bindings())
    backend = CudaBackend(machine.graphs(), EagerBackend().lower, bindings)
    with _empty_triton_cache() as asked:
        model, steps, _ = compile_beside(directory, machine, DRAFTS, backend=backend)
        model.generate(PROMPTS, NEW_TOKENS)
    found, missed = asked[True], asked[False]
    faults = steps.found.faults(steps.experts)
    faults += [f"{missed} compiled all the same"] if missed else []
    faults += [] if found else ["Triton loaded none"]
    row.kernels, row.passed = found, not faults
    lines = [*faults, f"{len(objects.seeded)} handed to Triton, {found} loaded", *backend.notes]
    row.note = "; ".join(lines)


@contextmanager
def _empty_triton_cache() -> Iterator[Counter[bool]]:
    """Counts the kernels that Triton looks up within the block, by whether its cache has them."""
    import triton

    asked: Counter[bool] = Counter()

    def listen(*, cache_hit: bool, **_: Any) -> None:
        asked[cache_hit] += 1

    with TemporaryDirectory(prefix="mtpc-triton-") as empty, triton.knobs.cache.scope():
        triton.knobs.cache.dir = empty
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.listener = listen
            yield asked

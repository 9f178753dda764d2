"""Builds kernels for an absent GPU, and loads them with Triton's launcher, each in a process.

    loaded_kernels.py build STORE TARGET   # compile every kernel into a graph cache
    loaded_kernels.py load STORE TARGET    # seed Triton's cache, and prepare each launch

`load` prints, per launch, the result of seeding and whether Triton found the code in its cache. A
mocked driver names the device, and nothing is launched.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from mtpc.backends.targets import TARGETS, Target
from mtpc.backends.triton_kernels.configs import BATCH_INVARIANT
from mtpc.backends.triton_kernels.crosscompile import cross_compile, gpu_target
from mtpc.backends.triton_kernels.launch import Launch, early_constants, early_options
from mtpc.backends.triton_kernels.loading import CodeObjects
from mtpc.backends.triton_kernels.plans import plan
from mtpc.store.entries import EntryStore


class Driver:
    """A mock of the driver, for preparing a launch."""

    def __init__(self, target: Target):
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return gpu_target(self._target)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launches() -> list[Launch]:
    """Launches of each operator, with strides and counts of 1, multiples of 16, and others."""

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    int32, int64, float32 = torch.int32, torch.int64, torch.float32
    indices = (new(2, 4, dtype=int32), new(2, dtype=int32), new(3, dtype=int32))
    one = (new(1, 3, dtype=int32), new(1, dtype=int32), new(2, dtype=int32))
    kv, latent = new(10, 16, 2, 64), new(10, 16, 80)
    choices = (new(1, 2, dtype=int64), new(1, 2))
    delta = (
        *(new(8, 72), new(64, 4), new(4), new(4)),
        *(new(3, 4, 8, 8, dtype=float32), new(3, 6, 72), new(3, dtype=int32)),
        *(new(2, dtype=int64), *indices[1:], new(2, dtype=int32)),
    )
    scanned = (
        *(new(8, 68), new(64, 4), new(64), *(new(4) for _ in range(3))),
        *(new(3, 4, 8, 8, dtype=float32), new(3, 6, 68), *delta[6:]),
    )
    numbers = (new(3, 6, dtype=torch.float64), new(3, 6, dtype=int64))
    biases = (new(3, 5, dtype=int64), new(3, 5, dtype=torch.float64))
    tokens = (*(new(3, 3, dtype=int32) for _ in range(2)), new(3, 96, dtype=int32))
    rows = (new(8, 96), new(8, dtype=int64), new(8, dtype=int64), new(2, dtype=int64))
    mask = new(2, 8, 3, dtype=int32)[1]  # Begins at 96 bytes; as a step's part of several.
    emitted = (new(2, 4, dtype=int64), new(2, dtype=int32), new(2, dtype=int64))
    reports = (
        new(2, 4, dtype=torch.float64),
        *(new(2, 4, 3, dtype=dtype) for dtype in (int64, torch.float64)),
    )
    slots = new(8, dtype=int64)
    accepted = (
        *(new(2, 5, dtype=int64), *(new(2, dtype=int32) for _ in range(3))),
        *(new(8, dtype=dtype) for dtype in (int64, torch.bool, int64)),
        *(new(3, dtype=int32), new(2, dtype=int32), new(2, dtype=torch.bool)),
        *(new(3, dtype=int32), new(3, 2, dtype=int64), new(2, dtype=int64)),
    )
    codes = [new(2, 8, 32, 4, dtype=torch.uint8)]
    masks = [new(8, width, dtype=torch.bool) for width in (12, 8)]
    rings = (new(3, 12, 64), slots, *masks)
    turned = (new(8, 4, 64), new(8, 2, 64), new(8, 2, 64))
    made = [
        plan("write_cache", kv, new(8, 2, 64), slots, None),
        plan("paged_attention", new(8, 4, 64), kv, kv, *indices, 0.1),
        plan("paged_attention", new(1, 4, 64), kv, kv, *one, 0.1, 32, 5.0, new(4)),
        plan("latent_attention", new(8, 4, 80), latent, *indices, 0.1, 64),
        plan("experts", new(1, 64), new(6, 64, 64), new(6, 64, 32), *choices, 7.0, True),
        plan("relu2_experts", new(1, 64), new(6, 32, 64), new(6, 64, 32), *choices),
        plan("gated_delta_rule", *delta),
        plan("mamba2_scan", *scanned, 2),
        plan("grouped_linear", new(8, 64), *codes, new(2, 2, 32), None, 64, None),
        plan("sample", *rows, *numbers, *biases, *tokens, new(3, 2, dtype=int64), mask),
        plan("count_tokens", tokens[2], *emitted),
        plan("write_logprobs", *reports, rows[0], *emitted, numbers[1]),
        plan("accept", *accepted),
        plan("accept", *accepted, *(new(2, dtype=torch.bool) for _ in range(2))),
        plan("rms_norm", new(8, 80)[:, :64], new(64), 1e-6),
        plan("add_rms_norm", new(1, 80), new(1, 80), new(80), 1e-6, True),
        plan("draft_entry", new(8, 64), new(64), new(8, 96)[:, 32:], new(64), 1e-6),
        plan("silu_and_mul", new(8, 128)),
        plan("skinny_linear", new(1, 64), new(8, 64), None),
        plan("norm_linear", new(1, 64), new(1, 64), new(64), 1e-6, False, new(16, 64), None, True),
        plan("batch_invariant_linear", new(1, 2048), new(8, 2048), None),
        plan("row_sum", new(8, 64)),
        plan("paged_attention", new(8, 4, 64), kv, kv, *indices, 0.1, configs=BATCH_INVARIANT),
        plan("rotate", new(8, 4, 64), new(8, 48), new(8, 48)),
        plan("rotate_and_write", *turned, new(8, 24), new(8, 24), kv, kv, slots, None, None),
        plan("choose_slots", new(8, 4, 64), new(8, 4), kv[:, :, 0], *indices, 16),
        plan("slot_attention", new(8, 4, 64), new(8, 64), *rings, new(4), 0.1, 8),
        plan("topk", new(8, 4, 8, dtype=float32), 2),
        plan("group_topk", new(8, 48, dtype=float32), 3, 4, 2),
        plan("row_max", new(8, 9000)[:, :8500]),
        plan("sinkhorn", new(8, 4, 4, dtype=float32), 20, 1e-6),
    ]
    return [replace(launch, early=True) for plan, _ in made for launch in plan]


def prepare(launch: Launch, target: Target) -> bool:
    """Let Triton prepare a launch as on a device; returns whether its cache had the code."""
    hits: list[bool] = []

    def listen(*, cache_hit: bool, **_: Any) -> None:
        hits.append(cache_hit)

    triton.knobs.compilation.listener = listen
    early = early_constants(launch, target)
    launch.kernel.run(
        grid=launch.grid,
        warmup=True,
        **launch.arguments,
        **launch.constants,
        **early,
        num_warps=max(1, launch.threads // target.warp_size),
        num_stages=launch.num_stages,
        **early_options(early),
    )
    # A launch that was prepared before is asked of nobody.
    return all(hits)


def main(action: str, root: str, name: str) -> None:
    store, target = EntryStore(Path(root)), TARGETS[name]
    triton.runtime.driver.set_active(Driver(target))
    if action == "build":
        cross_compile(launches(), target, store)
        return
    objects = CodeObjects(store, target)
    found = [(x.name, objects.seed([x]), prepare(x, target)) for x in launches()]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

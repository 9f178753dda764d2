"""Prints, as JSON, the buffers that Inductor copies before mtpc's kernels write them, before and
after its pass that removes such copies; for the cross-compile tests.

In a process of its own: the analysis asks Triton's driver for a target, so one is put in its
place that only says "sm_90".
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from helpers.mutation_analysis import Target
from mtpc.backends.triton_kernels import load_kernels


class Step(nn.Module):
    """Caches that are written, read, and written again, as layers and drafts do."""

    def forward(self, q, keys, angles, pools, slots, indices, latent, delta):  # type: ignore[no-untyped-def]
        ops, (cache, rows) = torch.ops.mtpc_triton, latent
        out = q
        for _ in range(3):
            turned = ops.rotate_and_write(out, *keys, *angles, *pools, slots, None, None)
            out = ops.paged_attention(turned, *pools, *indices, 0.1)
            ops.write_cache(cache, rows, slots, None)
        return out, ops.gated_delta_rule(*delta)


class CodedStep(nn.Module):
    """Likewise caches of codes. Triton launches writes of float8, and Inductor all else."""

    def __init__(self, codes: torch.dtype):
        super().__init__()
        ops = torch.ops.mtpc_triton if codes == torch.int8 else torch.ops.mtpc_loaded
        self.codes, self.writes = codes, ops

    def forward(self, q, keys, angles, pools, slots, indices, scales):  # type: ignore[no-untyped-def]
        out = q
        for _ in range(3):
            turned = self.writes.rotate_and_write(out, *keys, *angles, *pools, slots, *scales)
            attend = torch.ops.mtpc_triton.paged_attention
            out = attend(turned, *pools, *indices, 0.1, k_scale=scales[0], v_scale=scales[1])
            self.writes.write_cache(pools[0], keys[0], slots, scales[0])
        return (out,)

    def arguments(self) -> tuple[Any, ...]:
        """As `arguments`."""
        rows, pools = arguments(), [torch.empty(10, 16, 2, 64, dtype=self.codes) for _ in range(2)]
        return (*rows[:3], pools, *rows[4:6], [torch.empty(10, 16, 2) for _ in range(2)])


def arguments() -> tuple[Any, ...]:
    """Arguments for eight rows of two requests."""

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        # Not on "cuda": torch's builds for the CPU cannot write back what is mutated there.
        return torch.empty(shape, dtype=dtype)

    int32, int64 = torch.int32, torch.int64
    lengths = (new(2, dtype=int32), new(3, dtype=int32))
    return (
        new(8, 4, 64),
        (new(8, 2, 64), new(8, 2, 64)),
        (new(8, 64), new(8, 64)),
        (new(10, 16, 2, 64), new(10, 16, 2, 64)),
        new(8, dtype=int64),
        (new(2, 4, dtype=int32), *lengths),
        (new(10, 16, 80), new(8, 80)),
        (
            *(new(8, 72), new(64, 4), new(4), new(4)),
            *(new(3, 4, 8, 8, dtype=torch.float32), new(3, 6, 72), new(3, dtype=int32)),
            *(new(2, dtype=int64), *lengths, new(2, dtype=int32)),
        ),
    )


def copies(graph: torch.fx.Graph) -> list[list[str]]:
    """The buffers that are copied before each launch, or before each operator that writes; all that
    it writes before Inductor has looked."""
    found = []
    for node in graph.nodes:
        if "triton_kernel_wrapper" in str(node.target):
            found.append(list(node.kwargs["tensors_to_clone"]))
        elif "auto_functionalized" in str(node.target):
            found.append(node.meta.get("only_clone_these_tensors", ["all"]))
    return found


@torch.no_grad()
def _trace(step: nn.Module, given: tuple[Any, ...], compile_graph: Any) -> None:
    with FakeTensorMode() as mode:
        flat, spec = pytree.tree_flatten(given)
        flat = [mode.from_tensor(value) for value in flat]

        class Flat(nn.Module):
            def forward(self, *values: Any) -> Any:
                return step(*pytree.tree_unflatten(list(values), spec))

        aot_module_simplified(
            Flat(), flat, fw_compiler=compile_graph, inference_compiler=compile_graph,
            keep_inference_input_mutations=True,
        )  # fmt: skip


def main() -> None:
    triton.runtime.driver.set_active(Target())
    load_kernels()
    copied: list[list[list[str]]] = []

    def compile_graph(module: torch.fx.GraphModule, inputs: Any) -> Any:
        copied.append(copies(module.graph))
        updater = SimpleNamespace(incremental_update=lambda: None)
        reinplace_inplaceable_ops(updater, module.graph)
        copied.append(copies(module.graph))

        def run(values: list[Any]) -> tuple[()]:
            return ()

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    _trace(Step(), arguments(), compile_graph)
    for codes in (torch.int8, torch.float8_e4m3fn):
        step = CodedStep(codes)
        _trace(step, step.arguments(), compile_graph)
    print(json.dumps(copied))


if __name__ == "__main__":
    main()

"""Prints, as JSON, what Inductor believes that mtpc's kernels write; for the cross-compile tests.

In a process of its own: the analysis asks Triton's driver for a target, so one is put in its
place that only says "sm_90".
"""

from __future__ import annotations

import json

import torch
import triton
from torch import nn
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

from mtpc.backends.triton_kernels import load_kernels


class Target:
    """A mock of the driver, for the analysis."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Step(nn.Module):
    """Every operator once."""

    def forward(  # type: ignore[no-untyped-def]
        self, rows, kv, latent, mixture, indices, keys, delta, prompt, logits, turned,
        index, sampled, counted, reported, normed, added, entered, gated, accepted, grouped,
        grouped_mixture, slotted, skinny, halved, routed, limited, headed,
        scanned, scanned_prompt, ungated, coded, scales,
    ):  # fmt: skip
        ops = torch.ops.mtpc_triton
        ops.write_cache(kv, *keys, None)
        attended = ops.paged_attention(rows, kv, kv, *indices, 0.1)
        absorbed = ops.latent_attention(rows, latent, *indices, 0.1, 48)
        mixed = ops.experts(*mixture)
        stepped = ops.gated_delta_rule(*delta)
        in_chunks = ops.gated_delta_rule(*prompt)
        ops.count_tokens(*counted)
        ops.write_logprobs(*reported)
        return (
            attended,
            absorbed,
            mixed,
            stepped,
            in_chunks,
            ops.grouped_linear(*grouped, 64),
            ops.grouped_gated_linear(*grouped, 64),
            ops.grouped_experts(*grouped_mixture),
            ops.sinkhorn(*logits),
            ops.rotate_and_write(*turned, None, None),
            ops.choose_slots(*index, *indices, 8),
            ops.sample(*sampled),
            ops.rms_norm(*normed),
            *ops.add_rms_norm(*added),
            ops.draft_entry(*entered),
            ops.silu_and_mul(gated),
            ops.rotate(turned[0], *turned[3:5]),
            *ops.accept(*accepted),
            ops.slot_attention(*slotted),
            ops.skinny_linear(*skinny, None),
            *ops.norm_linear(skinny[0], skinny[0], *added[2:], False, skinny[1], None, True),
            ops.batch_invariant_linear(skinny[0], skinny[1], None),
            ops.batch_invariant_linear(*halved, None),
            ops.row_sum(gated),
            *ops.topk(*routed),
            *ops.group_topk(*limited),
            *ops.row_max(headed),
            ops.mamba2_scan(*scanned, 2),
            ops.mamba2_scan(*scanned_prompt, 2),
            ops.relu2_experts(*ungated),
            ops.rotate_and_write(*turned[:5], *coded, turned[-1], *scales),
            ops.paged_attention(rows, *coded, *indices, 0.1, 0, 0.0, None, *scales),
            ops.write_cache(coded[0], *keys, scales[0]),
        )


def main() -> None:
    triton.runtime.driver.set_active(Target())
    load_kernels()

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    def int4(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Groups of 32 inputs with zero points."""
        *stack, tiles, steps, features, _ = shape
        groups = (*stack, tiles, steps // 4, features)
        codes = new(*shape, dtype=torch.uint8)
        return codes, new(*groups), new(*groups, dtype=torch.uint8)

    int32, int64, float64 = torch.int32, torch.int64, torch.float64
    with FakeTensorMode():
        slots = new(2, dtype=int64)
        parameters = (
            *(new(3, 6, dtype=float64), new(3, 6, dtype=int64)),
            *(new(3, 5, dtype=int64), new(3, 5, dtype=float64)),
            *(new(3, width, dtype=int32) for width in (3, 3, 96)),
            new(3, 2, dtype=int64),
        )
        emitted = (new(2, 4, dtype=int64), new(2, dtype=int32), slots)
        reports = (
            new(2, 4, dtype=float64),
            *(new(2, 4, 3, dtype=dtype) for dtype in (int64, float64)),
        )
        lengths = (new(2, dtype=torch.int32), new(3, dtype=torch.int32))
        arguments = (
            new(8, 4, 64),
            new(10, 16, 2, 64),
            new(10, 16, 64),
            (
                *(new(8, 64), new(6, 64, 64), new(6, 64, 32)),
                *(new(8, 2, dtype=torch.int64), new(8, 2)),
            ),
            (new(2, 4, dtype=torch.int32), *lengths),
            (new(8, 2, 64), new(8, dtype=torch.int64)),
            *(
                (
                    *(new(rows, 72), new(64, 4), new(4), new(4)),
                    *(new(3, 4, 8, 8, dtype=torch.float32), new(3, 6, 72), new(3, dtype=int32)),
                    *(new(2, dtype=torch.int64), *lengths, new(2, dtype=torch.int32)),
                )
                for rows in (8, 256)
            ),
            (new(8, 4, 4, dtype=torch.float32), 20, 1e-6),
            (
                *(new(8, 4, 64), new(8, 2, 64), new(8, 2, 32), new(8, 48), new(8, 48)),
                *(new(10, 16, 2, 64), new(10, 16, 2, 32), new(8, dtype=torch.int64)),
            ),
            (new(8, 4, 64, dtype=torch.float32), new(8, 4, dtype=torch.float32), new(10, 16, 64)),
            (new(8, 96), *(new(8, dtype=int64) for _ in range(2)), slots, *parameters),
            (new(3, 96, dtype=int32), *emitted),
            (*reports, new(8, 96), *emitted, parameters[1]),
            (new(8, 4, 80), new(80), 1e-6, True),
            (new(8, 80), new(8, 80), new(80), 1e-6),
            (new(8, 80), new(80), new(8, 80), new(80), 1e-6),
            new(8, 128),
            (
                *(new(2, 5, dtype=int64), *(new(2, dtype=int32) for _ in range(3))),
                *(new(8, dtype=dtype) for dtype in (int64, torch.bool, int64)),
                *(lengths[1], new(2, dtype=int32), new(2, dtype=torch.bool)),
                *(new(3, dtype=int32), new(3, 2, dtype=int64), slots),
            ),
            (new(8, 64), *int4(2, 8, 32, 4)),
            (
                *(new(8, 64), *int4(6, 2, 8, 32, 4), *int4(6, 2, 4, 32, 4)),
                *(new(8, 2, dtype=torch.int64), new(8, 2)),
            ),
            (
                *(new(8, 4, 64), new(8, 64), new(3, 12, 64), new(8, dtype=int64)),
                *(new(8, width, dtype=torch.bool) for width in (12, 8)),
                *(new(4), 0.1, 8, new(3, 20, 64), new(8, dtype=int64), new(8, 5, dtype=int32)),
            ),
            (new(2, 80), new(96, 80)),
            (new(2, 1024), new(16, 1024)),
            (new(8, 4, 8, dtype=torch.float32), 2),
            (new(8, 8, dtype=torch.float32), 2, 4, 2),
            new(8, 4000),
            *(
                (
                    *(new(rows, 68), new(64, 4), new(64), *(new(4) for _ in range(3))),
                    *(new(3, 4, 8, 8, dtype=torch.float32), new(3, 6, 68), new(3, dtype=int32)),
                    *(new(2, dtype=torch.int64), *lengths, new(2, dtype=torch.int32)),
                )
                for rows in (8, 256)
            ),
            (
                *(new(8, 64), new(6, 32, 64), new(6, 64, 32)),
                *(new(8, 2, dtype=torch.int64), new(8, 2)),
            ),
            [new(10, 16, 2, width, dtype=torch.int8) for width in (64, 32)],
            [new(10, 16, 2, dtype=torch.float32) for _ in range(2)],
        )
        graph, _ = aot_export_module(Step(), arguments, trace_joint=False)
    launches = [n for n in graph.graph.nodes if "triton_kernel_wrapper" in str(n.target)]
    print(json.dumps([sorted(node.kwargs["tensors_to_clone"]) for node in launches]))


if __name__ == "__main__":
    main()

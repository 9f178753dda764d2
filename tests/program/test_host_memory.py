"""Host memory: what is planned before a build is what its steps hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.families import TINY
from helpers.plans import plan_of

from mtpc.backends.cpu.backend import CpuBackend
from mtpc.layout import Layout, StepKey
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler
from mtpc.program.memory_plan import need_of_model


@pytest.mark.parametrize("scheme", [None, "int4-g32", "int8"])
def test_planned_weights_are_those_that_a_step_packs(
    scheme: str | None, checkpoint: Callable[..., Path]
) -> None:
    """Plain ones in two bytes a weight, and those of a scheme at their own size."""
    options = plan_of(**TINY, spec_tokens=1, batch_buckets=(1,), backend="cpu", quantize=scheme)
    loaded = load(checkpoint("mimo", "random"), "bfloat16", True, headers_only=True)
    compiler = StepCompiler(loaded, options, CpuBackend(), new_buffer=Layout.reserve)
    compiler.weights.defers = True
    graph = compiler.rewrite(compiler.trace(StepKey.decode(1, 1)))
    names = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    packed = sum(compiler.weights[n].nbytes for n in names if n in compiler.weights.recipes)
    planned = need_of_model(compiler, owns_buffers=False).weights
    assert abs(planned - packed) < 0.01 * packed


def test_planned_state_has_its_snapshots(checkpoint: Callable[..., Path]) -> None:
    """As many as there is memory for, and no more than pages; none without reuse."""
    loaded = load(checkpoint("qwen3_next", "random"), "bfloat16", True, headers_only=True)

    def needed(**changes: Any) -> int:
        options = plan_of(
            **TINY, spec_tokens=1, batch_buckets=(2,), backend="cpu", num_pages=6, **changes
        )
        return need_of_model(StepCompiler(loaded, options, CpuBackend()), True).buffers

    heads, key, value, inputs = 4, 8, 12, 2 * 2 * 8 + 4 * 12 + 2 * 4
    each = 4 * heads * key * value + 2 * (1 + 3) * inputs + 4
    none = needed(snapshot_bytes=0)
    assert needed(snapshot_bytes=3 * each + 7) - none == 3 * each
    assert needed() - none == 5 * each
    assert needed(prefix_caching=False) == none
